"""Define the events of a run.

The journal, live views and the final record are all built from the same stream of events.

The engine emits each event before it acts on it. ``TrajectoryBuilder`` turns a stream of events
into a ``Trajectory``, even if the stream was truncated. The engine uses this fold in memory, and
the store uses it on a file.

    run   RunStarted  call*  RunEnded       calls of one run interleave
    call  CallStarted  turn*  CallEnded     RunResumed may follow the end, and then further turns
    turn  RequestStarted  RequestAttemptFailed*  ReplyReceived  CellRan*

``ScoreAdded`` may occur at any time, also long after the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import (
    SCHEMA_VERSION,
    Call,
    CallForkOrigin,
    CallKind,
    CallSite,
    Cell,
    ContextRef,
    NewAgentCallReason,
    RunAnnotation,
    Stop,
    Trajectory,
    Turn,
)


class Event(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", gc=False
):
    """Base class of all events of a run.

    Garbage collection is off for events (``gc=False``), because a long run has millions of them and
    they contain no cycles.
    """

    at_s: float = 0.0
    """Seconds since the run started."""


class RunStarted(Event, frozen=True, tag="RunStarted"):
    """A run began.

    This is the first event of every journal.

    Example:
        event.id, event.question, event.started_at    # seconds since 1970
    """

    id: str
    question: str
    started_at: float
    """Unix time in seconds."""
    schema_version: int = msgspec.field(default_factory=SCHEMA_VERSION.__int__)
    """Version of the journal's format. It is always written, so that later versions can tell
    formats apart."""
    task: str = ""
    context: ContextRef | None = None
    config: dict[str, Any] = {}
    """Models, limits, scaffold and sandbox as configured, which a resumed run uses again. Never
    contains a key."""


class CallStarted(Event, frozen=True, tag="CallStarted"):
    """A call began: the root call, a child (another recursive call), or a plain request to a model.

    Example:
        CallStarted(id="0.1", kind="rlm", model="openai:m", depth=1, question="Which host?")
    """

    id: str
    kind: CallKind
    model: str
    depth: int
    question: str
    parent: CallSite | None = None
    fork: CallForkOrigin | None = None
    context: ContextRef | None = None
    cause: NewAgentCallReason | None = None
    """Why an outside agent's request began this call. None for calls of the engine's own loop."""


class RequestStarted(Event, frozen=True, tag="Requested"):
    """A request is about to be sent to a model.

    Example:
        event.prompt[-1].content    # the newest message of turn ``event.turn``
    """

    call: str
    turn: int
    reused: int
    prompt: tuple[Message, ...]
    prompt_hash: str
    """Hash of the model, the full prompt and the sampling settings. Requests with equal hashes are
    identical."""
    last_word: Stop | None = None
    """The limit that was reached, if this request therefore asks the model to answer with what it
    has found so far. None for other requests.
    """


SENT_AGAIN = "in flight when the run was cut off; sent again"
"""Error text of an ``RequestAttemptFailed`` for a request that was in flight when its run was
interrupted. The resumed run sent it again."""


class RequestAttemptFailed(Event, frozen=True, tag="Attempted"):
    """An attempt to get a reply from a model failed.

    Example:
        RequestAttemptFailed(call="0", turn=2, error="429, rate limited", cost=0.0)
    """

    call: str
    turn: int
    error: str
    usage: Usage = Usage()
    """Upper bound of the attempt's usage, with ``unknown_calls`` set, if it may have been
    billed.
    """
    cost: float | None = None
    text: str = ""
    """The part of the reply that had arrived."""


class ReplyReceived(Event, frozen=True, tag="Replied"):
    """A reply arrived from a model.

    Once this event is in the journal, the reply is never requested or paid for again.

    Example:
        event.reply.message.content, event.reply.usage.output_tokens
    """

    call: str
    turn: int
    reply: Reply
    cached: bool = False
    """True if the reply came from a recorded run or the call cache, and so cost nothing."""
    reused_ids: int = 0
    """Number of ids at the start of the prompt that the call's token path already contains.
    ``reply.prompt_ids`` holds only the ids after them.
    """


class CellRan(Event, frozen=True, tag="CellRan"):
    """A session ran a cell, which is one block of code that the model wrote.

    Example:
        CellRan(call="0", turn=2, cell=0, result=Cell("1 + 1", value="2"))
    """

    call: str
    turn: int
    cell: int
    result: Cell


class ToolAnswered(Event, frozen=True, tag="ToolAnswered"):
    """A tool that the user provided returned a result to a session.

    Example:
        ToolAnswered(call="0", turn=1, cell=0, ordinal=0, name="lookup", …, seconds=0.2)
    """

    call: str
    turn: int
    cell: int
    ordinal: int
    """Index of this tool call within the cell."""
    name: str
    arguments_hash: str
    result: Any = None
    """The result, encoded by the session's codec."""
    error: str | None = None
    seconds: float = 0.0
    """Duration of the tool call in seconds."""


class NoteAdded(Event, frozen=True, tag="Noted"):
    """Something happened that readers of the run should know, such as a retry or a warning.

    Other examples are a deferred answer and a compaction of the history.

    Example:
        NoteAdded(call="0", text="retried after 1.5 s")
    """

    call: str
    text: str
    is_warning: bool = False
    """True for a warning about the run as a whole, for example about a weak sandbox."""


class RunResumed(Event, frozen=True, tag="RunResumed"):
    """A run continues with higher limits, and its calls that hit a limit continue too.

    The last turn of such a call no longer counts, except for its cost, and the cell before it runs
    again.

    Example:
        RunResumed(limits={"max_turns": 60}, forgets={"0": 30})
    """

    limits: dict[str, Any]
    forgets: dict[str, int]
    """Maps a call's id to the index of the first turn to discard. All later turns are discarded
    too."""


class ModeChosen(Event, frozen=True, tag="ModeChosen"):
    """It was chosen how a run answers its question: in a session, with a plan or by one plain call.

    The event also gives the reason.

    Example:
        ModeChosen(mode="plan", reason="aggregate: the question says 'How many'", strategy={…})
    """

    mode: str
    """``free`` (a session), ``plan``, or ``direct`` (one plain call)."""
    reason: str
    strategy: dict[str, Any] = {}
    """The recorded plan, or other strategy, that answers the question. Empty if no
    strategy does.
    """
    is_asked: bool = False
    """True if a model call chose the mode, because the rules did not decide."""


class CallEnded(Event, frozen=True, tag="CallEnded"):
    """A call ended, with or without an answer.

    Example:
        CallEnded(id="0.1", stop=Stop.FINAL, answer="web-3")
    """

    id: str
    stop: Stop
    answer: Any = None
    error: str | None = None
    reason: str = ""
    """One sentence on why the call ended, with the relevant figures. Empty for ``FINAL``."""


class RunEnded(Event, frozen=True, tag="RunEnded"):
    """The run ended.

    Usage and cost are totals over all calls of the run.

    Example:
        event.stop, event.answer, event.cost    # dollars; None if a model has no price
    """

    stop: Stop
    answer: Any = None
    error: str | None = None
    usage: Usage = Usage()
    cost: float | None = None
    answered_by: str = ""
    """Id of the call whose answer was chosen among several branches. Empty if there was only one
    answer."""
    reason: str = ""
    """One sentence on why the run ended, with the relevant figures. Empty for ``FINAL``."""
    typed_answer: Any = None
    """The answer as packed by ``SharedContextValue.to_jsonable``, if JSON would change its type (a
    tuple, NaN)."""
    partial: str = ""
    """Text of the last message of a run that ended without an answer."""
    has_open_requests: bool = False
    """True if requests may have been in flight, because the run's event loop was blocked. A resumed
    run counts them as possibly billed."""


class ScoreAdded(Event, frozen=True, tag="Scored"):
    """Scores were given to a run, a call or a turn.

    A later score replaces an earlier one of the same name.

    ``at_s`` may be long after the run ended and does not extend the run's duration.
    """

    by: str
    """Name of the scorer: ``task``, or a signal or judge."""
    call: str = ""
    """Id of the scored call. Empty for the whole run."""
    turn: int = -1
    """Index of the scored turn in ``Call.turns``, or -1 for the whole call."""
    rewards: dict[str, float] = {}
    """Rewards of the run or of a whole call, by name. Training uses these, and listings show
    them."""
    values: dict[str, float] = {}
    """Other numbers by name. The task's values for the whole run become the run's ``metrics``."""
    tokens: dict[str, list[float]] = {}
    """Numbers by name, each with one value for every token sampled in the turn's reply."""
    text: str = ""
    """A short text, such as a hint or a reason."""


AnyEvent = (
    RunStarted
    | CallStarted
    | RequestStarted
    | RequestAttemptFailed
    | ReplyReceived
    | CellRan
    | ToolAnswered
    | NoteAdded
    | RunResumed
    | ModeChosen
    | CallEnded
    | RunEnded
    | ScoreAdded
)
Listener = Callable[[AnyEvent], None]
"""A function that is called with each event of a run."""

TASK = "task"
"""Name under which a task gives its scores."""


def add_attempt_error(trajectory: Trajectory, event: RequestAttemptFailed) -> None:
    """Record the error of a failed attempt to get a model's reply in the trajectory of the run.

    An attempt that was not seen to fail, because its run ended first, is only a warning: it may
    have been billed twice.
    """
    texts = trajectory.warnings if event.error == SENT_AGAIN else trajectory.errors
    texts.append(f"call {event.call}, turn {event.turn}: {event.error}")


class TrajectoryBuilder:
    """Builds the ``Trajectory`` of a run from the run's events.

    The attribute ``trajectory`` is valid after every event, even if the run was cut off.

    In a conversation, the stream has one pair of ``RunStarted`` and ``RunEnded`` for each
    question, and the numbering of calls continues across questions.
    """

    def __init__(self) -> None:
        self.trajectory = Trajectory(id="", question="")
        self._calls: dict[str, Call] = {}
        self._requests: dict[str, RequestStarted] = {}

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
                    cause=event.cause,
                )
                if event.cause is not None:
                    self._increment_metric(f"calls.{event.cause}")
                self._calls[event.id] = call
                self.trajectory.calls.append(call)
            case RequestStarted():
                self._requests[event.call] = event
            case RequestAttemptFailed():
                self._charge(self._calls[event.call], event.usage, event.cost)
                add_attempt_error(self.trajectory, event)
            case ReplyReceived():
                call = self._calls[event.call]
                request = self._requests.pop(event.call)
                turn = Turn(
                    request.reused, request.prompt, event.reply, reused_ids=event.reused_ids
                )
                self._compare_ids(call, turn)
                if call.cause is not None and call.turns:
                    self._increment_metric("turns.continued")
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
                call.reason = event.reason
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
                self.trajectory.reason = ""
            case RunEnded():
                self.trajectory.stop, self.trajectory.answer = event.stop, event.answer
                self.trajectory.answered_by = event.answered_by
                self.trajectory.reason = event.reason
                self.trajectory.seconds = event.at_s
                # The cost is 0, not None, if the model has a price but no request was sent.
                if self.trajectory.cost is None:
                    self.trajectory.cost = event.cost
            case RunResumed():
                self.trajectory.stop, self.trajectory.answer = None, None
                self.trajectory.reason = ""
                for id, first in event.forgets.items():
                    call = self._calls[id]
                    del call.turns[first:]
                    if call.turns:
                        call.turns[-1] = msgspec.structs.replace(call.turns[-1], cells=())
                    call.stop, call.answer, call.error = None, None, None
            case ModeChosen():
                self.trajectory.metadata |= mode_metadata(event)
                for root in self.trajectory.calls:  # it began before a call chose its strategy
                    if root.parent is None and event.strategy:
                        root.kind = "strategy"
            case ScoreAdded():
                apply_score(self.trajectory, event)
            case NoteAdded(is_warning=True):
                self.trajectory.warnings.append(event.text.removeprefix("warning: "))
            case _:
                pass

    def add_ended_call(self, call: Call) -> None:
        """Add a call that has already ended to the run, including its usage and cost.

        The result is the same as that of its separate events. The call has at most one turn.
        """
        self._calls[call.id] = call
        self.trajectory.calls.append(call)
        self.trajectory.usage += call.usage
        if call.cost is not None:
            self.trajectory.cost = (self.trajectory.cost or 0.0) + call.cost

    def _compare_ids(self, call: Call, turn: Turn) -> None:
        """Count a turn as split if its prompt does not start with all token ids of the previous
        turns.

        A trainer must split or reject such a turn. If the prompt's messages do start with all
        previous messages, the client tokenized old text again, which is also recorded as an error.
        """
        before = self._turn_before(call)
        if before is None or before.num_ids is None or turn.reply.prompt_ids is None:
            return
        if turn.reused_ids >= before.num_ids:
            return
        self._increment_metric("split_turns")
        if turn.reused > before.reused + len(before.prompt):
            self._increment_metric("retokenised_turns")
            self.trajectory.errors.append(
                f"call {call.id}, turn {len(call.turns)}: its prompt keeps {turn.reused_ids} of "
                f"the {before.num_ids} ids of the previous turns although it keeps their text: "
                "the client tokenized that text again"
            )

    def _turn_before(self, call: Call) -> Turn | None:
        num = len(call.turns)
        while not num and call.fork is not None:
            num, call = call.fork.turn + 1, self._calls[call.fork.call]
        return call.turns[num - 1] if num else None

    def _increment_metric(self, name: str) -> None:
        self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0) + 1

    def _charge(self, call: Call, usage: Usage, cost: float | None) -> None:
        call.usage += usage
        self.trajectory.usage += usage
        if cost is not None:
            call.cost = (call.cost or 0.0) + cost
            self.trajectory.cost = (self.trajectory.cost or 0.0) + cost


def mode_metadata(event: ModeChosen) -> dict[str, Any]:
    """Return the entries of a run's metadata that record which mode was chosen and why."""
    strategy = {"strategy": event.strategy} if event.strategy else {}
    return {"chosen_mode": event.mode, "mode_reason": event.reason, **strategy}


def mode_and_reason(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return the mode in which a run was answered and the reason for it.

    Both are empty for a run without a mode. If the user chose a strategy, its name is the mode.
    """
    strategy = metadata.get("strategy")
    if "chosen_mode" in metadata:
        return str(metadata["chosen_mode"]), str(metadata.get("mode_reason", ""))
    if not isinstance(strategy, dict):
        return "", ""
    return str(strategy.get("name") or "strategy"), str(strategy.get("reason", ""))


def apply_score(trajectory: Trajectory, event: ScoreAdded) -> None:
    """Add the scores in ``event`` to ``trajectory``."""
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
            RunAnnotation(event.by, event.call, event.turn, values, event.tokens, event.text)
        )


def score_events(trajectory: Trajectory, at_s: float) -> list[ScoreAdded]:
    """Convert the rewards, metrics and annotations of ``trajectory`` to events for a journal.

    Their time is ``at_s``, in seconds since the run began.
    """
    calls = [
        ScoreAdded(at_s=at_s, by=TASK, call=id, rewards=rewards)
        for id, rewards in trajectory.call_rewards.items()
    ]
    marks = [
        ScoreAdded(
            at_s=at_s,
            by=mark.by,
            call=mark.call,
            turn=mark.turn,
            values=mark.values,
            tokens=mark.tokens,
            text=mark.text,
        )
        for mark in trajectory.marks
    ]
    run = ScoreAdded(at_s=at_s, by=TASK, rewards=trajectory.rewards, values=trajectory.metrics)
    return [*([run] if run.rewards or run.values else ()), *calls, *marks]
