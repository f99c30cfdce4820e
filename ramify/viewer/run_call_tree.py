"""Hold a run's call tree for the viewer, and read single calls in full on demand.

The tree is built from events without their texts (see ``store/textless_events.py``). It stores the
positions of each call's lines in the journal, from which the call can be read in full.

    journal lines ──> events (of the calls that it continues, then its own) ──> CallDetail

The last few calls are cached and updated while the run is in progress. A ``CallDetail`` also holds
data for transcripts that a ``Call`` lacks: the times of each request and reply, the pending
request, retries, notes, and the answers of tools.

types/call_tree.py builds the tree, watched_run.py reads the files, and run_overview.py makes the
data for a page.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import decode_line
from ramify.store.stored_run import StoredRun
from ramify.store.textless_events import AnyEventOutline
from ramify.types.call_tree import CallTree
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunResumed,
    ScoreAdded,
    ToolAnswered,
    TrajectoryBuilder,
)
from ramify.types.message import Message
from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import Call, Stop, Trajectory


class RunCallTree:
    """A run's call tree so far, and the positions of its events in the journal.

    It is valid after every event, even if the run was interrupted.
    """

    def __init__(self) -> None:
        self.calls = CallTree()
        self.nodes, self.order = self.calls.nodes, self.calls.order
        self.version = 0
        """Number of journal lines so far. Each event has one line."""
        self._starts = array("q")
        """Byte offset of each journal line."""
        self._before = array("q")
        """For each line of the journal, the index of the previous line about the same
        call, or -1.
        """

    @property
    def run_data(self) -> Trajectory:
        """Data of the run as a whole, such as rewards and cost, without its calls."""
        return self.calls.trajectory_without_calls

    def apply(self, event: AnyEventOutline, offset: int) -> RunCallNode | None:
        """Update the tree with ``event``, whose journal line begins at byte ``offset``.

        Returns the node of the call that the event belongs to.

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

    def take_changed_calls(self) -> set[int]:
        """Return and clear the indices of calls that changed because of another call's event."""
        marked = {node.index for node in self.calls.marked}
        for node in self.calls.marked:
            node.version = self.version
        self.calls.marked.clear()
        return marked

    def record_unreadable_line(self, offset: int) -> None:
        """Record the offset of a journal line that could not be read or applied to the tree."""
        self.version += 1
        self._starts.append(offset)
        self._before.append(-1)

    def lines_of(self, node: RunCallNode, after: int = -1) -> list[tuple[int, int]]:
        """Return the journal lines after line ``after`` that concern the call ``node``.

        Each has its number, from 0, and its byte offset.
        """
        lines = []
        line = node.last_line
        while line > after:
            lines.append((line, self._starts[line]))
            line = self._before[line]
        return lines[::-1]

    def load_trajectory(self, trajectory: Trajectory) -> None:
        """Build the tree from a complete trajectory instead of events."""
        self.calls.build_from_trajectory(trajectory)
        self.version += 1


MAX_CACHED = 8


class PendingModelRequest(msgspec.Struct, frozen=True):
    """A call's request to a model that has not been answered yet."""

    turn: int
    reused: int
    prompt: tuple[Message, ...]
    at_s: float


class CallEventNote(msgspec.Struct, frozen=True):
    """A note on an event in a call, such as a failed request."""

    at_s: float
    turn: int
    kind: str
    """``attempt`` for a failed request, and otherwise ``note``."""
    text: str


class CallDetail(msgspec.Struct):
    """One complete call, and further data for its page, such as times, notes and the pending
    request."""

    call: Call
    notes: list[CallEventNote] = msgspec.field(default_factory=list)
    spans: list[float] = msgspec.field(default_factory=list)
    """Alternating times of requests and replies, in seconds since the run began."""
    tools: list[ToolAnswered] = msgspec.field(default_factory=list)
    pending: PendingModelRequest | None = None
    last_word: Stop | None = None

    def add(self, event: AnyEvent) -> None:
        """Record the parts of ``event`` that a ``Call`` has no field for, such as times and
        notes."""
        match event:
            case RequestStarted():
                self.pending = PendingModelRequest(
                    event.turn, event.reused, event.prompt, event.at_s
                )
                self.last_word = event.last_word
                self.spans.append(event.at_s)
            case ReplyReceived():
                self.pending = None
                self.spans.append(event.at_s)
            case CallEnded():
                self.pending = None
            case RequestAttemptFailed():
                self.notes.append(CallEventNote(event.at_s, event.turn, "attempt", event.error))
            case NoteAdded():
                turn = self.pending.turn if self.pending else len(self.call.turns)
                self.notes.append(CallEventNote(event.at_s, turn, "note", event.text))
            case ToolAnswered():
                self.tools.append(event)
            case _:
                pass


class CallDetailReader:
    """Reads calls in full, one at a time, from one journal.

    The last few calls are cached.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._cached: OrderedDict[str, _Reading] = OrderedDict()

    def read_call(self, tree: RunCallTree, node: RunCallNode) -> CallDetail:
        """Return the complete call of ``node``, read from the journal.

        It includes all turns and texts. Raises StoreError if its lines cannot be read.
        """
        reading = self._cached.pop(node.id, None)
        try:
            reading = reading or _Reading(self._run, tree, node)
            detail = reading.read_on(tree, node)
        except (KeyError, IndexError) as error:
            problem = f"the events of call {node.id} are inconsistent: missing {error}"
            raise StoreError(f"{self._run}: {problem}") from None
        self._cached[node.id] = reading
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return detail


class _Reading:
    """Reads one call from the journal incrementally, continuing where it left off."""

    def __init__(self, run: StoredRun, tree: RunCallTree, node: RunCallNode) -> None:
        self._run = run
        self._fold = TrajectoryBuilder()
        self._detail: CallDetail | None = None
        self._last_line = -1
        ancestry = [node]
        while (fork := ancestry[-1].fork) is not None:
            origin = tree.nodes[fork.call]
            if origin.index >= ancestry[-1].index:
                raise StoreError(
                    f"{run}: call {ancestry[-1].id} continues call {origin.id}, which does not "
                    "precede it"
                )
            ancestry.append(origin)
        # A forked call continues its origins, so their events come first.
        for ancestor in reversed(ancestry[1:]):
            for event in journal_events(run, tree.lines_of(ancestor)):
                self._fold.apply(event)
        self._num_errors = len(self._fold.trajectory.errors)

    def read_on(self, tree: RunCallTree, node: RunCallNode) -> CallDetail:
        for event in journal_events(self._run, tree.lines_of(node, self._last_line)):
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
            raise StoreError(f"{self._run} has no event of call {node.id}")
        return self._detail

    def _note_token_errors(self, detail: CallDetail, event: AnyEvent) -> None:
        """Add a note to a reply's turn if ``TrajectoryBuilder`` found the reply's token ids
        inconsistent."""
        errors = self._fold.trajectory.errors
        if isinstance(event, ReplyReceived) and len(errors) > self._num_errors:
            detail.notes.append(CallEventNote(event.at_s, event.turn, "note", errors[-1]))
        self._num_errors = len(errors)


def journal_events(run: StoredRun, lines: list[tuple[int, int]]) -> Iterator[AnyEvent]:
    """Yield the events in the given journal lines.

    Each line has its number, from 0, and its byte offset.
    """
    texts = run.lines_at(offset for _, offset in lines)
    for (number, _), text in zip(lines, texts, strict=True):
        yield decode_line(text, run, number + 1)
