"""Call tree of a run for the viewer, with the place of each call's lines in the journal.

The journal is decoded without its texts. Most of a journal is prompts, replies, token ids and
outputs, which the overview does not show. The decoder skips fields that a type does not name, so
the types here decode several times faster than full events. Each has the tag of the event that it
stands for, and some of its fields. ``call_detail.py`` reads a call in full. Not here: the tree
itself (see types/call_tree.py), reading files (see watched_run.py) and the data that a page
receives (see picture.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ramify.store.journal import check_version
from ramify.types.call_tree import CallNode, CallTree
from ramify.types.event import (
    AttemptFailed,
    CallEnded,
    Event,
    NoteAdded,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Usage
from ramify.types.trajectory import CallKind, ContextRef, Fork, Parent, Trajectory


class CallStartGlance(Event, frozen=True, gc=False, tag="CallStarted"):
    id: str
    kind: CallKind
    model: str
    depth: int
    question: str
    parent: Parent | None = None
    fork: Fork | None = None
    context: ContextRef | None = None


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
    cell: int


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
    | RunResumed
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


class RunTree:
    """Call tree of a run so far. It is valid after every event, also for an interrupted run."""

    def __init__(self) -> None:
        self.calls = CallTree()
        self.nodes, self.order = self.calls.nodes, self.calls.order
        self.version = 0
        """Number of journal lines so far; each event has one line."""
        self._starts = array("q")
        """Line of the journal -> its offset."""
        self._before = array("q")
        """Line of the journal -> the previous line about the same call; -1 for none."""

    @property
    def run(self) -> Trajectory:
        """The run as a whole, without its calls."""
        return self.calls.run

    @property
    def at_s(self) -> float:
        """Time of the last event, in seconds since the run began."""
        return self.calls.at_s

    def apply(self, event: AnyGlance, offset: int) -> CallNode | None:
        """Apply ``event``, whose journal line begins at ``offset``, and return its call's node.

        Raises KeyError or IndexError if the event is inconsistent with the earlier ones.
        """
        node = self.calls.apply(event)
        line = self.version
        self.version = line + 1
        self._starts.append(offset)
        if node is None:
            self._before.append(-1)
        else:
            self._before.append(node.last_line)
            node.last_line = line
            node.version = line + 1
        return node

    def take_marked(self) -> set[int]:
        """Indices of the calls that were newly found to differ from their siblings."""
        marked = {node.index for node in self.calls.marked}
        for node in self.calls.marked:
            node.version = self.version
        self.calls.marked.clear()
        return marked

    def skip(self, offset: int) -> None:
        """Count a line that could not be applied."""
        self.version += 1
        self._starts.append(offset)
        self._before.append(-1)

    def lines_of(self, node: CallNode, after: int = -1) -> list[tuple[int, int]]:
        """Return (number from 0, offset) of each journal line about ``node`` after ``after``."""
        lines = []
        line = node.last_line
        while line > after:
            lines.append((line, self._starts[line]))
            line = self._before[line]
        return lines[::-1]

    def take(self, trajectory: Trajectory) -> None:
        """Build the tree from a complete trajectory instead of events."""
        self.calls.take(trajectory)
        self.version += 1
