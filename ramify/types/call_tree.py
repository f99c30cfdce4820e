"""Build a run's tree of calls from its events.

Views show this tree while the run is in progress.

    events ──> CallTree ──┬─> rows of the terminal   (cli/live_run_view.py)
                          ├─> the page of the run    (viewer/run_call_tree.py)
                          └─> OpenTelemetry spans    (engine/opentelemetry_spans.py)

Each call is a node with its state, times and costs, but without its full texts. The run as a whole
is a ``Trajectory`` without calls. Events may be given in a short form that has the same tags but
only the fields read here (see ``store/textless_events.py``). ``TrajectoryBuilder`` in event.py
collects complete calls with their texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    TrajectoryBuilder,
    add_attempt_error,
)
from ramify.types.message import Usage
from ramify.types.run_call_node import RunCallNode
from ramify.types.sibling_outliers import SiblingCallOutlierFinder
from ramify.types.trajectory import Call, RunAnnotation, Trajectory, cut

_ACTS = {
    "RunStarted": "_on_run_event",
    "CallStarted": "_on_call_started",
    "Requested": "_on_request_started",
    "Attempted": "_on_attempt_failed",
    "Replied": "_on_reply_received",
    "CellRan": "_on_cell_ran",
    "ToolAnswered": "_on_tool_answered",
    "Noted": "_on_note_added",
    "ModeChosen": "_on_mode_chosen",
    "CallEnded": "_on_call_ended",
    "RunEnded": "_on_run_event",
    "RunResumed": "_on_run_resumed",
    "Scored": "_on_score_added",
}
"""Map the tag of an event to the method of ``CallTree`` that applies it."""


class CallTree:
    """A run's tree of calls so far.

    It is valid after every event, even if the run was interrupted.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, RunCallNode] = {}
        """Nodes by call id, in order of creation."""
        self.order: list[RunCallNode] = []
        self.at_s = 0.0
        """Time of the last event, in seconds since the run began."""
        self.siblings = SiblingCallOutlierFinder()
        self.marked: list[RunCallNode] = []
        """Calls that changed because of an event of another call. The code that displays the tree
        clears this list.
        """
        self._fold = TrajectoryBuilder()
        self._acts: dict[type[Event], Callable[[Any], RunCallNode | None]] = {}

    @property
    def trajectory_without_calls(self) -> Trajectory:
        """Data of the run as a whole, such as rewards and cost, without its calls."""
        return self._fold.trajectory

    def apply(self, event: Event) -> RunCallNode | None:
        """Update the call tree with one event of the run.

        Returns the node of the call that the event belongs to, or None if it belongs to no call.

        Raises KeyError or IndexError if the event is inconsistent with the earlier ones.
        """
        kind = type(event)
        act = self._acts.get(kind)
        if act is None:
            act = self._acts[kind] = getattr(self, _ACTS[str(kind.__struct_config__.tag)])
        node = act(event)
        if event.at_s > self.at_s and kind is not ScoreAdded:
            self.at_s = event.at_s
        return node

    def _on_call_started(self, event: CallStarted) -> RunCallNode:
        node = self.nodes[event.id] = RunCallNode(
            len(self.order),
            event.id,
            event.kind,
            event.model,
            event.depth,
            cut(event.question),
            event.parent,
            event.fork,
            event.at_s,
            active_s=event.at_s,
            subject=hash((event.question, event.context and event.context.digest)),
        )
        self.order.append(node)
        self.marked += self.siblings.add(node, event.question)
        return node

    def _on_request_started(self, event: RequestStarted) -> RunCallNode:
        node = self.nodes[event.call]
        node.asking, node.is_running = event.turn, False
        if node.kind == "rlm":
            _add_span(node, event.at_s)
        return node

    def _on_reply_received(self, event: ReplyReceived) -> RunCallNode:
        node = self.nodes[event.call]
        if node.asking < 0:
            raise KeyError(f"no open request of call {event.call}, turn {event.turn}")
        node.asking, node.is_running = -1, True
        node.num_turns += 1
        node.active_s = event.at_s
        if node.kind == "rlm":
            _add_span(node, event.at_s)
        self._charge(node, event.reply.usage, event.reply.cost)
        return node

    def _on_cell_ran(self, event: CellRan) -> RunCallNode:
        node = self.nodes[event.call]
        if event.turn >= node.num_turns:
            raise IndexError(f"no turn {event.turn} of call {event.call}")
        node.active_s = event.at_s
        self.marked += self.siblings.mark_outliers(event.call, event.turn, event.cell)
        return node

    def _on_tool_answered(self, event: ToolAnswered) -> RunCallNode:
        node = self.nodes[event.call]
        if node.tools is None:
            node.tools = []
        node.tools.append((event.at_s, event.error is not None))
        return node

    def _on_note_added(self, event: NoteAdded) -> RunCallNode | None:
        return self.nodes.get(event.call)

    def _on_mode_chosen(self, event: ModeChosen) -> RunCallNode | None:
        self._fold.apply(event)
        roots = [node for node in self.order if node.parent is None]
        for root in roots if event.strategy else ():
            root.kind = "strategy"
        return roots[-1] if roots else None

    def _on_run_event(self, event: RunStarted | RunEnded) -> None:
        self._fold.apply(event)

    def _on_run_resumed(self, event: RunResumed) -> RunCallNode | None:
        """Reopen calls that a limit ended, because the run continues with higher limits.

        The last turns of these calls are discarded.
        """
        (
            self.trajectory_without_calls.stop,
            self.trajectory_without_calls.answer,
            self.trajectory_without_calls.reason,
        ) = None, None, ""
        nodes = [self.nodes[id] for id in event.forgets]
        for node in nodes:
            node.num_turns = event.forgets[node.id]
            del (node.spans or [])[2 * node.num_turns :]
            node.stop = node.ended_s = None
            node.error = node.reason = node.outlier = ""
            node.set_answer(None)
        self.marked += nodes
        return nodes[0] if nodes else None

    def _on_attempt_failed(self, event: RequestAttemptFailed) -> RunCallNode:
        node = self.nodes[event.call]
        self._charge(node, event.usage, event.cost)
        add_attempt_error(self.trajectory_without_calls, event)
        return node

    def _on_call_ended(self, event: CallEnded) -> RunCallNode:
        node = self.nodes[event.id]
        node.asking, node.is_running = -1, False
        node.stop, node.ended_s = event.stop, event.at_s
        node.error, node.reason = cut(event.error or ""), event.reason
        node.set_answer(event.answer)
        if node.spans and len(node.spans) % 2:
            _add_span(node, event.at_s)
        if event.error:
            self.trajectory_without_calls.errors.append(f"call {event.id}: {event.error}")
        return node

    def _on_score_added(self, event: ScoreAdded) -> RunCallNode | None:
        node = self.nodes[event.call] if event.call else None
        before = len(self.trajectory_without_calls.marks)
        self._fold.apply(event)
        if node is not None:
            _add_marks(node, self.trajectory_without_calls.marks[before:])
        elif self.order and not event.call:
            return self.order[0]  # its row shows the rewards of the run
        return node

    def _charge(self, node: RunCallNode, usage: Usage, cost: float | None) -> None:
        run = self.trajectory_without_calls
        node.input_tokens += usage.input_tokens
        node.output_tokens += usage.output_tokens
        run.usage += usage
        if cost is not None:
            node.cost = (node.cost or 0.0) + cost
            run.cost = (run.cost or 0.0) + cost

    def build_from_trajectory(self, trajectory: Trajectory) -> None:
        """Build the tree from a complete trajectory instead of events."""
        self._fold.trajectory = trajectory
        for call in trajectory.calls:
            self.order.append(_node_of(call, len(self.order)))
            self.siblings.add(self.order[-1], call.question)
        self.siblings.mark_all_outliers()
        self.nodes.update({node.id: node for node in self.order})
        for mark in trajectory.marks:
            if (node := self.nodes.get(mark.call)) is not None:
                _add_marks(node, [mark])
        self.at_s = max([trajectory.seconds, *(call.ended_s or 0.0 for call in trajectory.calls)])


def _add_span(node: RunCallNode, at_s: float) -> None:
    if node.spans is None:
        node.spans = []
    node.spans.append(at_s)


def _add_marks(node: RunCallNode, marks: list[RunAnnotation]) -> None:
    if node.marks is None:
        node.marks = []
    node.marks += marks


def _node_of(call: Call, index: int) -> RunCallNode:
    node = RunCallNode(
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
        error=cut(call.error or ""),
        reason=call.reason,
        subject=hash((call.question, call.context and call.context.digest)),
        input_tokens=call.usage.input_tokens,
        output_tokens=call.usage.output_tokens,
        cost=call.cost,
        num_turns=len(call.turns),
    )
    node.set_answer(call.answer)
    return node
