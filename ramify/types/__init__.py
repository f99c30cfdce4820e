"""Data types that the parts of Ramify exchange.

They do no I/O, and their methods only derive values from the data.
"""

from ramify.types.message import Message, Reply, ToolCall, Usage, VersionSpan
from ramify.types.token_path import SampledTokenSpan, TokenPath
from ramify.types.training_sequences import Batch, Segment, TokenSequence
from ramify.types.trajectory import (
    Call,
    CallSite,
    Cell,
    ContextRef,
    Fork,
    Group,
    GroupFate,
    Stop,
    Trajectory,
    Turn,
)

__all__ = [
    "Batch",
    "Call",
    "CallSite",
    "Cell",
    "ContextRef",
    "Fork",
    "Group",
    "GroupFate",
    "Message",
    "Reply",
    "SampledTokenSpan",
    "Segment",
    "Stop",
    "TokenPath",
    "TokenSequence",
    "ToolCall",
    "Trajectory",
    "Turn",
    "Usage",
    "VersionSpan",
]
