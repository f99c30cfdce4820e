"""One call in full: its lines of the journal, read when somebody opens it.

    its lines ──> events of the call, after those of the calls that it continues ──> Fold ──> Whole

A few are kept and read on while the run goes on. What a ``Call`` does not keep, and its transcript
shows, is noted beside it: when each request was sent and answered, the one that is out, retries,
notes, and what tools answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.journal_reader import decode_line
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    ScoreAdded,
    ToolAnswered,
    TrajectoryFold,
)
from ramify.types.message import Message
from ramify.types.trajectory import Call, Stop
from ramify.viewer.run_tree import CallNode, RunTree

MAX_KEPT = 8


class PendingRequest(msgspec.Struct, frozen=True):
    """A request that has no reply yet."""

    turn: int
    reused: int
    prompt: tuple[Message, ...]
    at_s: float


class CallNote(msgspec.Struct, frozen=True):
    """Something worth telling that happened in a call."""

    at_s: float
    turn: int
    kind: str
    """``attempt`` for a request that failed, ``note`` for the rest."""
    text: str


class CallDetail(msgspec.Struct):
    """A call, and what is known beside it."""

    call: Call
    notes: list[CallNote] = msgspec.field(default_factory=list)
    spans: list[float] = msgspec.field(default_factory=list)
    """Sent, answered, sent, answered …, in seconds since the run began."""
    tools: list[ToolAnswered] = msgspec.field(default_factory=list)
    pending: PendingRequest | None = None
    last_word: Stop | None = None

    def add(self, event: AnyEvent) -> None:
        """Note what the call itself does not keep."""
        match event:
            case RequestStarted():
                self.pending = PendingRequest(event.turn, event.reused, event.prompt, event.at_s)
                self.last_word = event.last_word
                self.spans.append(event.at_s)
            case ReplyReceived():
                self.pending = None
                self.spans.append(event.at_s)
            case CallEnded():
                self.pending = None
            case AttemptFailed():
                self.notes.append(CallNote(event.at_s, event.turn, "attempt", event.error))
            case NoteAdded():
                turn = self.pending.turn if self.pending else len(self.call.turns)
                self.notes.append(CallNote(event.at_s, turn, "note", event.text))
            case ToolAnswered():
                self.tools.append(event)
            case _:
                pass


class CallDetails:
    """The calls of one journal, whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: OrderedDict[str, _Reading] = OrderedDict()

    def of(self, tree: RunTree, node: CallNode) -> CallDetail:
        """Raises StoreError for lines that cannot be read."""
        reading = self._kept.pop(node.id, None)
        try:
            reading = reading or _Reading(self._path, tree, node)
            whole = reading.read_on(tree, node)
        except (KeyError, IndexError) as error:
            problem = f"the events of call {node.id} do not follow from one another: no {error}"
            raise StoreError(f"{self._path}: {problem}") from None
        self._kept[node.id] = reading
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return whole


class _Reading:
    """One call as far as it was read."""

    def __init__(self, path: Path, tree: RunTree, node: CallNode) -> None:
        self._path = path
        self._fold = TrajectoryFold()
        self._whole: CallDetail | None = None
        self._last_line = -1
        before = [node]
        while (fork := before[-1].fork) is not None:
            origin = tree.nodes[fork.call]
            if origin.index >= before[-1].index:
                raise StoreError(
                    f"{path}: call {before[-1].id} goes on from call {origin.id}, which is not "
                    "before it"
                )
            before.append(origin)
        for each in reversed(before[1:]):
            for event in _events(path, tree.lines_of(each)):
                self._fold.apply(event)
        self._num_errors = len(self._fold.trajectory.errors)

    def read_on(self, tree: RunTree, node: CallNode) -> CallDetail:
        for event in _events(self._path, tree.lines_of(node, self._last_line)):
            if isinstance(event, ScoreAdded):
                continue
            self._fold.apply(event)
            if self._whole is None:
                self._whole = CallDetail(self._fold.trajectory.call(node.id))
            self._whole.add(event)
            self._tell_of_ids(self._whole, event)
        self._last_line = node.last_line
        if self._whole is None:
            raise StoreError(f"{self._path} has no line of call {node.id}")
        return self._whole

    def _tell_of_ids(self, whole: CallDetail, event: AnyEvent) -> None:
        """What the fold finds wrong with a reply's token ids (see ``TrajectoryFold``) is a note of
        its turn."""
        errors = self._fold.trajectory.errors
        if isinstance(event, ReplyReceived) and len(errors) > self._num_errors:
            whole.notes.append(CallNote(event.at_s, event.turn, "note", errors[-1]))
        self._num_errors = len(errors)


def _events(path: Path, lines: list[tuple[int, int]]) -> Iterator[AnyEvent]:
    """The events of ``lines``, each (number from 0, offset)."""
    if not lines:
        return
    try:
        with path.open("rb") as file:
            for number, offset in lines:
                file.seek(offset)
                yield decode_line(file.readline()[:-1], path, number + 1)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
