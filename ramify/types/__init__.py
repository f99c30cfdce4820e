"""Data types that the parts of Ramify exchange. They do no I/O, and their methods only derive
values from the data."""

from ramify.types.message import Message, Reply, ToolCall, Usage, VersionSpan
from ramify.types.sequence import Batch, Segment, TokenSequence
from ramify.types.token_path import ReplyTokenSpan, TokenPath
from ramify.types.trajectory import (
    Call,
    Cell,
    ContextRef,
    Fork,
    Group,
    GroupFate,
    Parent,
    Stop,
    Trajectory,
    Turn,
)

__all__ = [
    "Batch",
    "Call",
    "Cell",
    "ContextRef",
    "Fork",
    "Group",
    "GroupFate",
    "Message",
    "Parent",
    "Reply",
    "ReplyTokenSpan",
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
