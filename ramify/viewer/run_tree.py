"""Call tree of a run for the viewer: each call is a node with only what its row and its bar show.

A node records where the lines of its call are in the journal, so that call_detail.py can find them.
The run as a whole is a ``Trajectory`` without calls. Not here: reading files (see watched_run.py)
and the data that a page receives (see picture.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from ramify.types.event import (
    AttemptFailed,
    CallEnded,
    NoteAdded,
    RunEnded,
    RunStarted,
    ScoreAdded,
    TrajectoryFold,
)
from ramify.types.message import Usage
from ramify.types.trajectory import Annotation, Call, Fork, Parent, Stop, Trajectory
from ramify.viewer.event_glances import (
    AnyGlance,
    CallStartGlance,
    CellGlance,
    ReplyGlance,
    RequestGlance,
    ToolGlance,
)

GLANCE = 120
"""Maximum characters of a text in a row."""


class CallNode(msgspec.Struct, gc=False):
    """One call of the tree.

    There may be many thousands, most of them plain calls, so fields that those lack default to a
    shared empty tuple.
    """

    index: int
    """Position in order of creation."""
    id: str
    kind: str
    model: str
    depth: int
    question: str
    """Shortened, as are ``answer`` and ``error``."""
    parent: Parent | None = None
    fork: Fork | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    stop: Stop | None = None
    answer: str = ""
    error: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    num_turns: int = 0
    """Number of turns that have a reply."""
    asking: int = -1
    """Turn with a pending request; -1 for none."""
    is_running: bool = False
    """Whether the code of the last reply is running."""
    spans: tuple[float, ...] = ()
    """Times of each request and reply of a session in turn, in seconds since the run began. The
    number is odd while a request is pending."""
    tools: tuple[tuple[float, bool], ...] = ()
    """(time, whether it failed) of each answer of a user's tool."""
    marks: tuple[Annotation, ...] = ()
    version: int = 0
    """Version of the run at the last change of this call."""
    last_line: int = -1
    """Its last line in the journal, from 0. ``RunTree.lines_of`` follows the lines back from it."""


class RunTree:
    """Call tree of a run so far. It is valid after every event, also for an interrupted run."""

    def __init__(self) -> None:
        self.nodes: dict[str, CallNode] = {}
        """Call id -> node, in order of creation."""
        self.order: list[CallNode] = []
        self.at_s = 0.0
        """Time of the last event, in seconds since the run began."""
        self.version = 0
        """Number of journal lines so far; each event has one line."""
        self._starts = array("q")
        """Line of the journal -> its offset."""
        self._before = array("q")
        """Line of the journal -> the previous line about the same call; -1 for none."""
        self._fold = TrajectoryFold()
        self._acts: dict[type[Any], Callable[[Any], CallNode | None]] = {
            CallStartGlance: self._begin,
            RequestGlance: self._ask,
            ReplyGlance: self._answer,
            CellGlance: self._ran,
            CallEnded: self._end,
            AttemptFailed: self._attempt,
            ToolGlance: self._use,
            NoteAdded: lambda event: self.nodes.get(event.call),
            ScoreAdded: self._score,
            RunStarted: self._fold.apply,
            RunEnded: self._fold.apply,
        }

    @property
    def run(self) -> Trajectory:
        """The run as a whole, without its calls."""
        return self._fold.trajectory

    def apply(self, event: AnyGlance, offset: int) -> CallNode | None:
        """Apply ``event``, whose journal line begins at ``offset``, and return its call's node.

        Raises KeyError or IndexError if the event is inconsistent with the earlier ones.
        """
        kind = type(event)
        node = self._acts[kind](event)
        line = self.version
        self.version = line + 1
        if event.at_s > self.at_s and kind is not ScoreAdded:
            self.at_s = event.at_s
        self._starts.append(offset)
        if node is None:
            self._before.append(-1)
        else:
            self._before.append(node.last_line)
            node.last_line = line
            node.version = line + 1
        return node

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

    def _begin(self, event: CallStartGlance) -> CallNode:
        node = self.nodes[event.id] = CallNode(
            len(self.order),
            event.id,
            event.kind,
            event.model,
            event.depth,
            cut(event.question),
            event.parent,
            event.fork,
            event.at_s,
        )
        self.order.append(node)
        return node

    def _ask(self, event: RequestGlance) -> CallNode:
        node = self.nodes[event.call]
        node.asking, node.is_running = event.turn, False
        if node.kind == "rlm":
            node.spans += (event.at_s,)
        return node

    def _answer(self, event: ReplyGlance) -> CallNode:
        node = self.nodes[event.call]
        if node.asking < 0:
            raise KeyError(f"request of call {event.call}, turn {event.turn}")
        node.asking, node.is_running = -1, True
        node.num_turns += 1
        if node.kind == "rlm":
            node.spans += (event.at_s,)
        self._charge(node, event.reply.usage, event.reply.cost)
        return node

    def _ran(self, event: CellGlance) -> CallNode:
        node = self.nodes[event.call]
        if event.turn >= node.num_turns:
            raise IndexError(f"turn {event.turn} of call {event.call}")
        return node

    def _use(self, event: ToolGlance) -> CallNode:
        node = self.nodes[event.call]
        node.tools += ((event.at_s, event.error is not None),)
        return node

    def _attempt(self, event: AttemptFailed) -> CallNode:
        node = self.nodes[event.call]
        self._charge(node, event.usage, event.cost)
        self.run.errors.append(f"call {event.call}, turn {event.turn}: {event.error}")
        return node

    def _end(self, event: CallEnded) -> CallNode:
        node = self.nodes[event.id]
        node.asking, node.is_running = -1, False
        node.stop, node.ended_s = event.stop, event.at_s
        node.answer, node.error = cut(as_text(event.answer)), cut(event.error or "")
        if len(node.spans) % 2:
            node.spans += (event.at_s,)
        if event.error:
            self.run.errors.append(f"call {event.id}: {event.error}")
        return node

    def _score(self, event: ScoreAdded) -> CallNode | None:
        node = self.nodes[event.call] if event.call else None
        before = len(self.run.marks)
        self._fold.apply(event)
        if node is not None:
            node.marks += tuple(self.run.marks[before:])
        elif self.order and not event.call:
            return self.order[0]  # its row shows the rewards of the run
        return node

    def _charge(self, node: CallNode, usage: Usage, cost: float | None) -> None:
        run = self.run
        node.input_tokens += usage.input_tokens
        node.output_tokens += usage.output_tokens
        run.usage += usage
        if cost is not None:
            node.cost = (node.cost or 0.0) + cost
            run.cost = (run.cost or 0.0) + cost

    def take(self, trajectory: Trajectory) -> None:
        """Build the tree from a complete trajectory instead of events."""
        self._fold.trajectory = trajectory
        for call in trajectory.calls:
            self.order.append(_node_of(call, len(self.order)))
        self.nodes = {node.id: node for node in self.order}
        for mark in trajectory.marks:
            if mark.call in self.nodes:
                self.nodes[mark.call].marks += (mark,)
        self.at_s = max([trajectory.seconds, *(call.ended_s or 0.0 for call in trajectory.calls)])
        self.version += 1


def _node_of(call: Call, index: int) -> CallNode:
    return CallNode(
        index,
        call.id,
        call.kind,
        call.model,
        call.depth,
        cut(call.question),
        call.parent,
        call.fork,
        call.started_s,
        call.ended_s,
        call.stop,
        cut(as_text(call.answer)),
        cut(call.error or ""),
        call.usage.input_tokens,
        call.usage.output_tokens,
        call.cost,
        len(call.turns),
    )


def cut(text: str, width: int = GLANCE) -> str:
    """Shorten ``text`` to ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def as_text(value: Any) -> str:
    """Convert an answer to text; empty for None."""
    return (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else msgspec.json.encode(value).decode()
    )
