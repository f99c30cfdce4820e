"""Call tree of a run for the viewer, with the place of each call's lines in the journal, and one
call in full: its lines, read when a user opens it.

The journal is decoded without its texts. Most of a journal is prompts, replies, token ids and
outputs, which the overview does not show. The decoder skips fields that a type does not name, so
the types here decode several times faster than full events. Each has the tag of the event that it
stands for, and some of its fields.

    journal lines ──> events (of the calls that it continues, then its own) ──> CallDetail

The last few calls are cached and updated while the run is in progress. A ``CallDetail`` also holds
what a transcript needs but a ``Call`` lacks: the times of each request and reply, the pending
request, retries, notes, and the answers of tools.

Not here: the tree itself (see types/call_tree.py), reading files (see watched_run.py) and the data
that a page receives (see picture.py).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import check_version, decode_line
from ramify.store.line_checksums import ChecksumChain
from ramify.types.call_node import CallNode
from ramify.types.call_tree import CallTree
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    Event,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
    ToolAnswered,
    TrajectoryFold,
)
from ramify.types.message import Message, Usage
from ramify.types.trajectory import Call, CallKind, ContextRef, Fork, Parent, Stop, Trajectory


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


def glances(
    block: bytes, path: Path, chain: ChecksumChain
) -> Iterator[tuple[AnyGlance | DamagedLine, int]]:
    """Decode a block of complete lines of the journal at ``path``. They follow the lines that
    ``chain`` covers.

    Gives (event, length of its line in bytes) for each line. The chain continues after a line when
    the next one is taken. At a line of a newer version, StoreError is raised after the events
    before it.
    """
    lines = block[:-1].split(b"\n")
    for line, event in zip(lines, _decoded(block, lines, path), strict=True):
        problem = chain.problem(line)
        yield DamagedLine(problem) if problem else event, len(line) + 1
        chain.advance(line)


def _decoded(block: bytes, lines: list[bytes], path: Path) -> Iterable[AnyGlance | DamagedLine]:
    if _FIRST not in block:
        with suppress(*_UNREADABLE):  # decoding all lines at once is several times faster
            events = _decoder.decode_lines(block)
            # ``decode_lines`` skips empty lines, which count as damage.
            if len(events) == len(lines):
                return events
    return _one_by_one(lines, path)


def _one_by_one(lines: list[bytes], path: Path) -> Iterator[AnyGlance | DamagedLine]:
    for line in lines:
        if line.startswith(_FIRST):
            check_version(line, path)
        try:
            yield _decoder.decode(line)
        except _UNREADABLE as error:
            yield DamagedLine(str(error))


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


MAX_CACHED = 8


class PendingRequest(msgspec.Struct, frozen=True):
    """Request of a call that has no reply yet."""

    turn: int
    reused: int
    prompt: tuple[Message, ...]
    at_s: float


class CallNote(msgspec.Struct, frozen=True):
    """Note about a failed request or another event in a call."""

    at_s: float
    turn: int
    kind: str
    """``attempt`` for a failed request, otherwise ``note``."""
    text: str


class CallDetail(msgspec.Struct):
    """A call with its timing, notes and pending request."""

    call: Call
    notes: list[CallNote] = msgspec.field(default_factory=list)
    spans: list[float] = msgspec.field(default_factory=list)
    """Times of each request and reply in turn, in seconds since the run began."""
    tools: list[ToolAnswered] = msgspec.field(default_factory=list)
    pending: PendingRequest | None = None
    last_word: Stop | None = None

    def add(self, event: AnyEvent) -> None:
        """Record the parts of ``event`` that ``Call`` does not hold."""
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
    """Reader of full calls from one journal, with a small cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached: OrderedDict[str, _Reading] = OrderedDict()

    def of(self, tree: RunTree, node: CallNode) -> CallDetail:
        """Return the call of ``node`` in full. Raises StoreError for unreadable lines."""
        reading = self._cached.pop(node.id, None)
        try:
            reading = reading or _Reading(self._path, tree, node)
            detail = reading.read_on(tree, node)
        except (KeyError, IndexError) as error:
            problem = f"the events of call {node.id} are inconsistent: missing {error}"
            raise StoreError(f"{self._path}: {problem}") from None
        self._cached[node.id] = reading
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return detail


class _Reading:
    """One call, read up to some line of the journal."""

    def __init__(self, path: Path, tree: RunTree, node: CallNode) -> None:
        self._path = path
        self._fold = TrajectoryFold()
        self._detail: CallDetail | None = None
        self._last_line = -1
        ancestry = [node]
        while (fork := ancestry[-1].fork) is not None:
            origin = tree.nodes[fork.call]
            if origin.index >= ancestry[-1].index:
                raise StoreError(
                    f"{path}: call {ancestry[-1].id} continues call {origin.id}, which does not "
                    "precede it"
                )
            ancestry.append(origin)
        for ancestor in reversed(ancestry[1:]):
            for event in journal_events(path, tree.lines_of(ancestor)):
                self._fold.apply(event)
        self._num_errors = len(self._fold.trajectory.errors)

    def read_on(self, tree: RunTree, node: CallNode) -> CallDetail:
        for event in journal_events(self._path, tree.lines_of(node, self._last_line)):
            if isinstance(event, ScoreAdded):
                continue
            if isinstance(event, RunResumed):  # about several calls
                own = {id: turn for id, turn in event.forgets.items() if id == node.id}
                event = msgspec.structs.replace(event, forgets=own)
            self._fold.apply(event)
            if self._detail is None:
                self._detail = CallDetail(self._fold.trajectory.call(node.id))
            self._detail.add(event)
            self._note_token_errors(self._detail, event)
        self._last_line = node.last_line
        if self._detail is None:
            raise StoreError(f"{self._path} has no line of call {node.id}")
        return self._detail

    def _note_token_errors(self, detail: CallDetail, event: AnyEvent) -> None:
        """Add a note to the turn if the fold rejects a reply's token ids (``TrajectoryFold``)."""
        errors = self._fold.trajectory.errors
        if isinstance(event, ReplyReceived) and len(errors) > self._num_errors:
            detail.notes.append(CallNote(event.at_s, event.turn, "note", errors[-1]))
        self._num_errors = len(errors)


def journal_events(path: Path, lines: list[tuple[int, int]]) -> Iterator[AnyEvent]:
    """Read the events of ``lines``; each line is (number from 0, offset)."""
    if not lines:
        return
    try:
        with path.open("rb") as file:
            for number, offset in lines:
                file.seek(offset)
                yield decode_line(file.readline()[:-1], path, number + 1)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
