"""The tree of a run as it is looked at: each call as one node, with what its row and its bar show,
and no more.

A node knows where the lines of its call are in the journal, so that ``call_detail.py`` finds them.
What is told of the run as a whole is a ``Trajectory`` that has no calls. Leaves out files
(``watched_run.py``) and what a page gets (``picture.py``).
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
"""Characters of a text that a row shows."""


class CallNode(msgspec.Struct, gc=False):
    """One call. There may be many thousands, most of them plain, so what those do not have is one
    empty tuple."""

    index: int
    """In order of issue."""
    id: str
    kind: str
    model: str
    depth: int
    question: str
    """Cut to a glance, as ``answer`` and ``error``."""
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
    """That have a reply."""
    asking: int = -1
    """The turn whose request is out; -1 for none."""
    is_running: bool = False
    """It has a reply whose code runs."""
    spans: tuple[float, ...] = ()
    """Of a session: sent, answered, sent, answered …, in seconds since the run began; odd in number
    while it asks."""
    tools: tuple[tuple[float, bool], ...] = ()
    """When a tool of the user's answered, and whether it failed."""
    marks: tuple[Annotation, ...] = ()
    version: int = 0
    """Of the run when this call last changed."""
    last_line: int = -1
    """Of the journal, counted from 0; ``RunTree.lines_of`` goes back from it to those before."""


class RunTree:
    """What is known of a run so far; valid after every event, also of a run that was cut off."""

    def __init__(self) -> None:
        self.nodes: dict[str, CallNode] = {}
        """By call id, in order of issue."""
        self.order: list[CallNode] = []
        self.at_s = 0.0
        """Seconds since the run began, at its last event."""
        self.version = 0
        """Counts up with every event, which each have a line."""
        self._starts = array("q")
        """Line of the journal -> its offset."""
        self._before = array("q")
        """Line of the journal -> the one before it that is about the same call; -1 for none."""
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
        """All that is known of it but its calls."""
        return self._fold.trajectory

    def apply(self, event: AnyGlance, offset: int) -> CallNode | None:
        """Take ``event`` in, whose line of the journal begins at ``offset``; the call that it is
        about. Raises KeyError or IndexError where it does not follow from those before it."""
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
        """Count a line that could not be taken in."""
        self.version += 1
        self._starts.append(offset)
        self._before.append(-1)

    def lines_of(self, node: CallNode, after: int = -1) -> list[tuple[int, int]]:
        """(number from 0, offset) of the journal's lines that are about ``node``, in order, of
        those after ``after``."""
        found = []
        line = node.last_line
        while line > after:
            found.append((line, self._starts[line]))
            line = self._before[line]
        return found[::-1]

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
            return self.order[0]  # whose row shows the run's rewards
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
        """Become the tree of ``trajectory``, which is whole."""
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
    """``text``, cut to ``width``."""
    return text if len(text) <= width else text[: width - 1] + "…"


def as_text(value: Any) -> str:
    """An answer as text; empty for None."""
    return (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else msgspec.json.encode(value).decode()
    )
