"""Reduced events for the overview of a run: the journal decoded without its texts.

Most of a journal is prompts, replies, token ids and outputs, which the overview does not show. The
decoder skips fields that a type does not name, so these types decode several times faster than full
events. Each type has the tag of the event that it stands for, and some of its fields. Not here: the
full events of one call (see call_detail.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ramify.store.journal import check_version
from ramify.types.event import (
    AttemptFailed,
    CallEnded,
    Event,
    NoteAdded,
    RunEnded,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Usage
from ramify.types.trajectory import CallKind, Fork, Parent


class CallStartGlance(Event, frozen=True, gc=False, tag="CallStarted"):
    id: str
    kind: CallKind
    model: str
    depth: int
    question: str
    parent: Parent | None = None
    fork: Fork | None = None


class RequestGlance(Event, frozen=True, gc=False, tag="Requested"):
    call: str
    turn: int


class UsageGlance(msgspec.Struct, frozen=True, gc=False):
    usage: Usage = Usage()
    cost: float | None = None


class ReplyGlance(Event, frozen=True, gc=False, tag="Replied"):
    call: str
    turn: int
    reply: UsageGlance


class CellGlance(Event, frozen=True, gc=False, tag="CellRan"):
    call: str
    turn: int


class ToolGlance(Event, frozen=True, gc=False, tag="ToolAnswered"):
    call: str
    error: str | None = None


AnyGlance = (
    RunStarted
    | CallStartGlance
    | RequestGlance
    | AttemptFailed
    | ReplyGlance
    | CellGlance
    | ToolGlance
    | NoteAdded
    | CallEnded
    | RunEnded
    | ScoreAdded
)
_decoder: msgspec.json.Decoder[AnyGlance] = msgspec.json.Decoder(AnyGlance)
_FIRST = b'{"type":"RunStarted"'
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class DamagedLine(msgspec.Struct, frozen=True):
    """Journal line that cannot be decoded."""

    reason: str


def glances(block: bytes, path: Path) -> Iterable[tuple[AnyGlance | DamagedLine, int]]:
    """Decode ``block``, complete lines of the journal at ``path``.

    Returns (event, length of its line in bytes) for each line. At a line of a newer version,
    StoreError is raised after the events before it.
    """
    lines = block[:-1].split(b"\n")
    if _FIRST not in block:
        with suppress(*_UNREADABLE):  # decoding all lines at once is several times faster
            events = _decoder.decode_lines(block)
            # ``decode_lines`` skips empty lines, which count as damage.
            if len(events) == len(lines):
                return zip(events, [len(line) + 1 for line in lines], strict=True)
    return _one_by_one(lines, path)


def _one_by_one(lines: list[bytes], path: Path) -> Iterator[tuple[AnyGlance | DamagedLine, int]]:
    for line in lines:
        if line.startswith(_FIRST):
            check_version(line, path)
        try:
            yield _decoder.decode(line), len(line) + 1
        except _UNREADABLE as error:
            yield DamagedLine(str(error)), len(line) + 1
