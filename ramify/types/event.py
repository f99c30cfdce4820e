"""What happens in a run, as a stream of small facts: the one source of journal, live views and
trajectory.

The engine emits each event before it acts on it. ``TrajectoryFold`` turns the stream, whole or cut
off anywhere, into the ``Trajectory``; the engine uses the same fold in memory that the store uses
on a file.

    RunStarted  (CallStarted (Requested (Attempted* Replied CellRan*)* CallEnded))*  RunEnded
                 of one call, in this order; calls of one run interleave
    Scored*      at any time, also long after the end
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import (
    SCHEMA_VERSION,
    Annotation,
    Call,
    CallKind,
    Cell,
    ContextRef,
    Fork,
    Parent,
    Stop,
    Trajectory,
    Turn,
)


class Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type"):
    """Common to all events."""

    at_s: float = 0.0
    """Seconds since the run began."""


class RunStarted(Event, frozen=True, tag="RunStarted"):
    id: str
    question: str
    started_at: float
    """Unix time."""
    schema_version: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    """Always written, although it is the default: a later version must be able to tell."""
    task: str = ""
    context: ContextRef | None = None
    config: dict[str, Any] = {}
    """Models, limits, scaffold and sandbox as given: what a resume needs to go on in the same way.
    Never a key."""


class CallStarted(Event, frozen=True, tag="CallStarted"):
    id: str
    kind: CallKind
    model: str
    depth: int
    question: str
    parent: Parent | None = None
    fork: Fork | None = None
    context: ContextRef | None = None


class RequestStarted(Event, frozen=True, tag="Requested"):
    """A request is about to be sent."""

    call: str
    turn: int
    reused: int
    prompt: tuple[Message, ...]
    prompt_hash: str
    """Of model, whole prompt and sampling: what makes two requests the same."""
    last_word: Stop | None = None
    """The limit at which this request asks for the answer with what there is."""


class AttemptFailed(Event, frozen=True, tag="Attempted"):
    """An attempt to send a request failed."""

    call: str
    turn: int
    error: str
    usage: Usage = Usage()
    """An upper bound, with ``unknown_calls`` set, where the attempt may have been paid."""
    cost: float | None = None


class ReplyReceived(Event, frozen=True, tag="Replied"):
    """A reply arrived. Once this is in the journal it is never paid for again."""

    call: str
    turn: int
    reply: Reply
    cached: bool = False
    """The reply came from a recorded run or the call cache, and was not paid now."""
    reused_ids: int = 0
    """Ids of the call's path so far that the prompt begins with; ``reply.prompt_ids`` are those
    after."""


class CellRan(Event, frozen=True, tag="CellRan"):
    call: str
    turn: int
    cell: int
    result: Cell


class ToolAnswered(Event, frozen=True, tag="ToolAnswered"):
    """A user's tool returned to a session."""

    call: str
    turn: int
    cell: int
    ordinal: int
    """Of tool calls within the cell."""
    name: str
    arguments_hash: str
    result: Any = None
    """Encoded by the session's codec."""
    error: str | None = None
    seconds: float = 0.0
    """How long it took."""


class NoteAdded(Event, frozen=True, tag="Noted"):
    """Something worth telling a person: a retry, a compaction, a deferred answer."""

    call: str
    text: str


class CallEnded(Event, frozen=True, tag="CallEnded"):
    id: str
    stop: Stop
    answer: Any = None
    error: str | None = None


class RunEnded(Event, frozen=True, tag="RunEnded"):
    stop: Stop
    answer: Any = None
    error: str | None = None
    usage: Usage = Usage()
    cost: float | None = None
    answered_by: str = ""
    """The branch whose answer was chosen; empty where there was nothing to choose."""


class ScoreAdded(Event, frozen=True, tag="Scored"):
    """What a run, a call or a turn is worth to somebody. What is scored twice has its later number.
    ``at_s`` may be long after the end, and says nothing of how long the run took."""

    by: str
    """Who scored: ``task``, or the name of a signal or judge."""
    call: str = ""
    """What was scored; empty for the whole run."""
    turn: int = -1
    """Index in ``Call.turns``; -1 for the whole call."""
    rewards: dict[str, float] = {}
    """Reward name -> reward, of the run or of a whole call: what training learns from and a listing
    shows."""
    values: dict[str, float] = {}
    """Any other number by name; those of the whole run by its task are its ``metrics``."""
    tokens: dict[str, list[float]] = {}
    """Name -> a number for each token that the turn's reply sampled."""
    text: str = ""
    """One short text, as a hint, or the reason."""


AnyEvent = (
    RunStarted
    | CallStarted
    | RequestStarted
    | AttemptFailed
    | ReplyReceived
    | CellRan
    | ToolAnswered
    | NoteAdded
    | CallEnded
    | RunEnded
    | ScoreAdded
)
TASK = "task"
"""Who scored, where the task did."""


class TrajectoryFold:
    """Events in, ``trajectory`` out; valid after every event, also of a run that was cut off.

    A conversation is a second ``RunStarted`` … ``RunEnded`` in the same stream: its call ids go on
    counting.
    """

    def __init__(self) -> None:
        self.trajectory = Trajectory(id="", question="")
        self._calls: dict[str, Call] = {}
        self._asked: dict[str, RequestStarted] = {}

    def apply(self, event: AnyEvent) -> None:
        match event:
            case CallStarted():
                call = Call(
                    event.id,
                    event.kind,
                    event.model,
                    event.depth,
                    event.question,
                    parent=event.parent,
                    fork=event.fork,
                    context=event.context,
                    started_s=event.at_s,
                )
                self._calls[event.id] = call
                self.trajectory.calls.append(call)
            case RequestStarted():
                self._asked[event.call] = event
            case AttemptFailed():
                self._charge(self._calls[event.call], event.usage, event.cost)
                self.trajectory.errors.append(
                    f"call {event.call}, turn {event.turn}: {event.error}"
                )
            case ReplyReceived():
                call = self._calls[event.call]
                asked = self._asked.pop(event.call)
                turn = Turn(asked.reused, asked.prompt, event.reply, reused_ids=event.reused_ids)
                self._compare_ids(call, turn)
                call.turns.append(turn)
                self._charge(call, event.reply.usage, event.reply.cost)
            case CellRan():
                turns = self._calls[event.call].turns
                turns[event.turn] = msgspec.structs.replace(
                    turns[event.turn], cells=(*turns[event.turn].cells, event.result)
                )
            case CallEnded():
                call = self._calls[event.id]
                call.stop, call.answer, call.error, call.ended_s = (
                    event.stop,
                    event.answer,
                    event.error,
                    event.at_s,
                )
                if event.error:
                    self.trajectory.errors.append(f"call {event.id}: {event.error}")
            case RunStarted() if not self.trajectory.id:
                self.trajectory.id, self.trajectory.question = event.id, event.question
                self.trajectory.task, self.trajectory.context = event.task, event.context
                self.trajectory.started_at, self.trajectory.metadata = (
                    event.started_at,
                    dict(event.config),
                )
            case RunStarted():  # a conversation's next question
                self.trajectory.stop, self.trajectory.answer = None, None
            case RunEnded():
                self.trajectory.stop, self.trajectory.answer = event.stop, event.answer
                self.trajectory.answered_by = event.answered_by
                self.trajectory.seconds = event.at_s
                if self.trajectory.cost is None:
                    self.trajectory.cost = (
                        event.cost
                    )  # 0 where there is a price and nothing was asked
            case ScoreAdded():
                note_score(self.trajectory, event)
            case _:
                pass

    def _compare_ids(self, call: Call, turn: Turn) -> None:
        """Count a turn whose prompt does not begin with all ids of the turns before, which a
        trainer must split or refuse. Where its messages do begin with all of theirs, the client
        made ids of old text again: an error."""
        before = self._turn_before(call)
        if before is None or before.num_ids is None or turn.reply.prompt_ids is None:
            return
        if turn.reused_ids >= before.num_ids:
            return
        self._count("split_turns")
        if turn.reused > before.reused + len(before.prompt):
            self._count("retokenised_turns")
            self.trajectory.errors.append(
                f"call {call.id}, turn {len(call.turns)}: its prompt keeps {turn.reused_ids} of "
                f"the {before.num_ids} ids of "
                "the turns before, although it keeps their text: the client tokenised it anew"
            )

    def _turn_before(self, call: Call) -> Turn | None:
        while not call.turns and call.fork is not None:
            origin = self._calls[call.fork.call]
            if call.fork.turn >= 0:
                return origin.turns[call.fork.turn]
            call = origin
        return call.turns[-1] if call.turns else None

    def _count(self, name: str) -> None:
        self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0) + 1

    def _charge(self, call: Call, usage: Usage, cost: float | None) -> None:
        call.usage += usage
        self.trajectory.usage += usage
        if cost is not None:
            call.cost = (call.cost or 0.0) + cost
            self.trajectory.cost = (self.trajectory.cost or 0.0) + cost


def note_score(trajectory: Trajectory, event: ScoreAdded) -> None:
    """Put into ``trajectory`` what ``event`` says."""
    if event.rewards and event.turn < 0:
        rewards = (
            trajectory.call_rewards.setdefault(event.call, {}) if event.call else trajectory.rewards
        )
        rewards.update(event.rewards)
    values = event.values if event.turn < 0 else {**event.rewards, **event.values}
    if event.by == TASK and not event.call:
        trajectory.metrics.update(values)
        values = {}
    if values or event.tokens or event.text:
        trajectory.marks.append(
            Annotation(event.by, event.call, event.turn, values, event.tokens, event.text)
        )


def scores_of(trajectory: Trajectory, at_s: float) -> list[ScoreAdded]:
    """The rewards, metrics and marks of ``trajectory`` as the events that give them, for a
    journal."""
    calls = [
        ScoreAdded(at_s=at_s, by=TASK, call=id, rewards=given)
        for id, given in trajectory.call_rewards.items()
    ]
    marks = [
        ScoreAdded(
            at_s=at_s,
            by=each.by,
            call=each.call,
            turn=each.turn,
            values=each.values,
            tokens=each.tokens,
            text=each.text,
        )
        for each in trajectory.marks
    ]
    whole = ScoreAdded(at_s=at_s, by=TASK, rewards=trajectory.rewards, values=trajectory.metrics)
    return [*([whole] if whole.rewards or whole.values else ()), *calls, *marks]
