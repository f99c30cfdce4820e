"""Data types that the parts of Ramify exchange.

They do no I/O, and their methods only derive values from the data.
"""

from ramify.types.call_token_ids import CallTokenIds, SampledTokenSpan
from ramify.types.message import Message, Reply, ToolCall, Usage, VersionSpan
from ramify.types.training_sequences import Batch, PackedTokenSegment, TokenSequence
from ramify.types.trajectory import (
    Call,
    CallForkOrigin,
    CallSite,
    Cell,
    ContextRef,
    Group,
    RolloutGroupOutcome,
    Stop,
    Trajectory,
    Turn,
)

__all__ = [
    "Batch",
    "Call",
    "CallForkOrigin",
    "CallSite",
    "CallTokenIds",
    "Cell",
    "ContextRef",
    "Group",
    "Message",
    "PackedTokenSegment",
    "Reply",
    "RolloutGroupOutcome",
    "SampledTokenSpan",
    "Stop",
    "TokenSequence",
    "ToolCall",
    "Trajectory",
    "Turn",
    "Usage",
    "VersionSpan",
]
