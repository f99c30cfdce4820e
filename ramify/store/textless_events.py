"""Decodes journals and trajectories without their texts, to save time.

This is several times faster than decoding everything. Listings and the page of a run use this.

    journal lines ──> AnyEventOutline ──┬─> summarise: one row of a listing  (folder_store.py)
                                        └─> RunCallTree: the page of a run (viewer/run_call_tree.py)
    trajectory lines ──> TrajectoryOutline ──> one row of a listing          (viewer/run_catalog.py)

Most of a journal is prompts, replies, token ids and outputs, which neither listings nor a run's
page show. The decoder skips fields that a type does not declare, so each type here declares only
the fields that are needed. Each is checked against the full type when this module is imported
(``types/struct_subset_check.py``).

Full events are read by ``journal.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from ramify.store.journal import CANNOT_DECODE, check_version
from ramify.store.line_checksums import ChecksumChain
from ramify.store.stored_run import StoredRun
from ramify.types.event import (
    CallEnded,
    CallStarted,
    CellRan,
    Event,
    ModeChosen,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
    ToolAnswered,
)
from ramify.types.message import Reply, Usage
from ramify.types.struct_subset_check import check_struct_subset
from ramify.types.trajectory import (
    SCHEMA_VERSION,
    Call,
    CallForkOrigin,
    CallKind,
    CallSite,
    ContextRef,
    Stop,
    Trajectory,
    Turn,
)


@check_struct_subset(CallStarted)
class TextlessCallStarted(Event, frozen=True, gc=False, tag="CallStarted"):
    """A ``CallStarted`` event with only the fields that listings and run pages need."""

    id: str
    kind: CallKind
    model: str
    depth: int
    question: str
    parent: CallSite | None = None
    fork: CallForkOrigin | None = None
    context: ContextRef | None = None


@check_struct_subset(RequestStarted)
class TextlessRequestStarted(Event, frozen=True, gc=False, tag="Requested"):
    """A "request sent" event without its prompt."""

    call: str
    turn: int


@check_struct_subset(Reply)
class ReplyBill(msgspec.Struct, frozen=True, gc=False):
    """The token usage and the cost of a model reply."""

    usage: Usage = Usage()
    cost: float | None = None


@check_struct_subset(ReplyReceived)
class TextlessReplyReceived(Event, frozen=True, gc=False, tag="Replied"):
    """A "reply received" event without its text and token ids."""

    call: str
    turn: int
    reply: ReplyBill


@check_struct_subset(CellRan)
class TextlessCellRan(Event, frozen=True, gc=False, tag="CellRan"):
    """A "code cell run" event without its code and output."""

    call: str
    turn: int
    cell: int


@check_struct_subset(ToolAnswered)
class ToolAnsweredSummary(Event, frozen=True, gc=False, tag="ToolAnswered"):
    """A "tool answered" event without its arguments and result."""

    call: str
    error: str | None = None


AnyEventOutline = (
    RunStarted
    | TextlessCallStarted
    | TextlessRequestStarted
    | RequestAttemptFailed
    | TextlessReplyReceived
    | TextlessCellRan
    | ToolAnsweredSummary
    | NoteAdded
    | ModeChosen
    | CallEnded
    | RunEnded
    | RunResumed
    | ScoreAdded
)


@functools.cache
def _decoder() -> msgspec.json.Decoder[AnyEventOutline]:
    """Return a decoder that reads journal lines but skips the texts in their events.

    It is created on first use, because that takes a millisecond.
    """
    return msgspec.json.Decoder(AnyEventOutline)


_FIRST = b'{"type":"RunStarted"'


def decode_event_outline(line: bytes, run: StoredRun) -> AnyEventOutline:
    """Decode one line of a run into a textless event.

    Raises StoreError if a newer version of Ramify wrote the line, and an error of ``CANNOT_DECODE``
    if it is damaged.
    """
    if line.startswith(_FIRST):
        check_version(line, run)
    return _decoder().decode(line)


class DamagedJournalLine(msgspec.Struct, frozen=True):
    """Placeholder for a journal line that cannot be decoded."""

    reason: str


def decode_event_outlines(
    block: bytes, run: StoredRun, chain: ChecksumChain
) -> Iterator[tuple[AnyEventOutline | DamagedJournalLine, int]]:
    """Decode a block of complete lines of ``run`` into textless events.

    ``chain`` is the running checksum of all lines before the block.

    Yields each event with the length of its line in bytes. The running checksum advances past a
    line when the next one is requested. If a newer version of Ramify wrote a line, StoreError is
    raised after the events before that line.
    """
    lines = block[:-1].split(b"\n")
    for line, event in zip(lines, _decode_block(block, lines, run), strict=True):
        problem = chain.damage_reason(line)
        yield DamagedJournalLine(problem) if problem else event, len(line) + 1
        chain.advance_past_line(line)


def _decode_block(
    block: bytes, lines: list[bytes], run: StoredRun
) -> Iterable[AnyEventOutline | DamagedJournalLine]:
    if _FIRST not in block:
        with suppress(*CANNOT_DECODE):  # decoding all lines at once is several times faster
            events = _decoder().decode_lines(block)
            # ``decode_lines`` skips empty lines, which count as damage.
            if len(events) == len(lines):
                return events
    return _one_by_one(lines, run)


def _one_by_one(
    lines: list[bytes], run: StoredRun
) -> Iterator[AnyEventOutline | DamagedJournalLine]:
    for line in lines:
        try:
            yield decode_event_outline(line, run)
        except CANNOT_DECODE as error:
            yield DamagedJournalLine(str(error))


# --- trajectories ---------------------------------------------------------------------------------


@check_struct_subset(Turn)
class CountOnlyTurn(msgspec.Struct):
    """A turn without any fields, used if only the number of turns matters.

    Listings only count the turns.
    """


@check_struct_subset(Call)
class CallOutline(msgspec.Struct):
    """A call of a trajectory, without its texts."""

    model: str
    depth: int = 0
    turns: list[CountOnlyTurn] = []


@check_struct_subset(Trajectory)
class TrajectoryOutline(msgspec.Struct):
    """A trajectory without the texts and token ids of its calls."""

    id: str
    question: str
    calls: list[CallOutline]
    schema_version: int = SCHEMA_VERSION
    task: str = ""
    rewards: dict[str, float] = {}
    stop: Stop | None = None
    usage: Usage = Usage()
    cost: float | None = None
    seconds: float = 0.0
    started_at: float = 0.0
    answer: Any = None
    reason: str = ""
