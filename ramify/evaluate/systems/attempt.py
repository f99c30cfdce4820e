"""Run evaluation attempts whose requests to the model are counted by a metering proxy.

Another system, or a run of Ramify, answers an item, and the task scores the answer.

    item ──prepare──> question, context ──system──> EvaluatedSystemAnswer ──score──> AttemptOutcome
    item ────────────────attempt (a run whose model is the seat)──────────> AttemptOutcome

The recorded usage and cost are those of the meter. The counts made by the system itself, or those
in the journal of the run, become the metrics ``own_requests``, ``own_input_tokens`` and
``own_output_tokens``.

If a system gave no answer, because it failed, was late or exceeded its budget, it gets the score of
a missing answer, and the outcome says why. Only a failure of the model that a retry could repair
leaves the attempt without a reward, so that it is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from ramify.engine.event_loop_thread import run_in_daemon_thread
from ramify.errors import ConfigError, RamifyError, did_you_mean
from ramify.evaluate.attempt import GRACE_S, UNANSWERED
from ramify.evaluate.run_evaluation import (
    AttemptOutcome,
    EvaluationSetup,
    PlannedAttempt,
    RlmAttemptRunner,
    outcome_of,
)
from ramify.evaluate.systems.base import (
    EvaluatedSystem,
    EvaluatedSystemAnswer,
    MeteredModelAccess,
    TaskItemBudget,
)
from ramify.evaluate.systems.command import TIMEOUT_S, CommandLineSystem
from ramify.evaluate.systems.peer_libraries import PEERS, PeerLibrarySystem
from ramify.tasks.base import Item, RolloutInitialState, Task
from ramify.tasks.score_with_timeout import score_with_timeout
from ramify.types.trajectory import Stop, Trajectory

BUDGET = "budget"
"""Reason recorded for an attempt that has no answer because a request would have exceeded its
budget."""
OWN = "own_"
"""Prefix for the names of metrics that a system reports itself."""
ModelAccessOpener = Callable[[str, TaskItemBudget], AbstractAsyncContextManager[MeteredModelAccess]]
"""Function that takes a name and a budget, and returns a context manager for metered access to the
model. The access ends with the block."""


def parse_system(words: str, *, timeout_s: float = TIMEOUT_S) -> EvaluatedSystem:
    """Return the question-answering system that the option ``--with`` selects.

    It is a known library, or a command that contains ``{question}``. ``timeout_s`` is its time
    limit for one item. Raises ConfigError if the system is unknown or not installed.
    """
    if words in PEERS:
        return PeerLibrarySystem(words, timeout_s=timeout_s)
    if "{" not in words and len(words.split()) < 2:
        raise ConfigError(
            f"--with {words!r:.80} is not a system: {did_you_mean(words, PEERS)}, or give "
            "a command "
            "such as 'my_program {question} {context_file}'"
        )
    return CommandLineSystem(words, timeout_s=timeout_s)


class SystemAttemptRunner:
    """Runs evaluation attempts in which another system answers the task items.

    The system's access to the model is metered. Implements ``AttemptRunner``.
    """

    makes_items = False

    def __init__(
        self, system: EvaluatedSystem, open_seat: ModelAccessOpener, budget: TaskItemBudget
    ) -> None:
        self._system = system
        self._open_seat = open_seat
        self._budget = budget

    async def run_attempt(
        self, job: EvaluationSetup, which: PlannedAttempt, max_cost: float | None
    ) -> tuple[AttemptOutcome, None]:
        item, number = which.item, which.number
        name = _seat_name(job, item, number, self._system.name)
        async with self._open_seat(name, _lower_budget(self._budget, max_cost)) as seat:
            return await attempt_with_system(self._system, job.task, item, number, seat=seat), None

    async def __aenter__(self) -> SystemAttemptRunner:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class MeteredRlmAttemptRunner:
    """Runs evaluation attempts with Ramify's engine through a metering proxy.

    Requests are counted in the same way as those of other systems. Implements ``AttemptRunner``.
    """

    makes_items = False

    def __init__(
        self, runs: RlmAttemptRunner, open_seat: ModelAccessOpener, budget: TaskItemBudget
    ) -> None:
        self._runs = runs
        self._open_seat = open_seat
        self._budget = budget

    async def run_attempt(
        self, job: EvaluationSetup, which: PlannedAttempt, max_cost: float | None
    ) -> tuple[AttemptOutcome, Trajectory]:
        item, number = which.item, which.number
        name = _seat_name(job, item, number, "ramify")
        is_resumed = job.record is not None and (item.id, number) in job.record.unfinished
        async with self._open_seat(name, _lower_budget(self._budget, max_cost)) as seat:
            model = seat.as_model()
            trajectory = await self._runs.run(job, item, number, max_cost, model=model)
            await seat.cancel_requests()
            journal = trajectory.usage
            own = {
                "requests": journal.calls,
                "input_tokens": journal.input_tokens,
                "output_tokens": journal.output_tokens,
            }
            trajectory.metrics = {**trajectory.metrics, **_metrics(own)}
            outcome = self._runs.outcome(job, item, number, trajectory)
            if is_resumed:  # what an earlier process spent is only in the journal
                return outcome, trajectory
            return msgspec.structs.replace(outcome, usage=seat.usage, cost=seat.cost), trajectory

    async def __aenter__(self) -> RlmAttemptRunner:
        await self._runs.__aenter__()
        return self._runs

    async def __aexit__(self, *exc: object) -> None:
        await self._runs.__aexit__(*exc)


async def attempt_with_system(
    system: EvaluatedSystem, task: Task, item: Item, number: int, *, seat: MeteredModelAccess
) -> AttemptOutcome:
    """Let another system answer a task item once, and return its scored outcome.

    ``number`` counts the attempts at the item, and ``seat`` is the system's metered access to the
    model.

    Raises ConfigError for a task that only Ramify's engine can begin, such as one with tools.
    """
    try:
        start = await task.prepare(item)
    except RamifyError as error:
        failed = Trajectory("", item.question, task=item.id, errors=[str(error)], stop=Stop.ERROR)
        return outcome_of(task, item, number, failed, is_stored=False)
    _check_plain(task, item, start)
    given = await system.answer(item.question, _as_text(start.context), seat=seat)
    await seat.cancel_requests()
    trajectory = _trajectory(item, given, seat)
    if given.answer is not None or seat.exhausted is not None or not seat.outage:
        try:
            await run_in_daemon_thread(score_with_timeout, task, item, trajectory, GRACE_S)
        except RamifyError as error:
            trajectory.errors.append(str(error))
    else:
        trajectory.errors.append(f"the model failed: {seat.outage}")
    outcome = outcome_of(task, item, number, trajectory, is_stored=False)
    return msgspec.structs.replace(outcome, error=outcome.error or _describe_failure(given, seat))


def _seat_name(job: EvaluationSetup, item: Item, number: int, system: str) -> str:
    """Return the name of an evaluation attempt for errors and for the metering proxy."""
    where = "" if job.record is None else f" in {job.record.id}"
    return f"{item.id}/{number} of {system}{where}"


def _lower_budget(budget: TaskItemBudget, max_cost: float | None) -> TaskItemBudget:
    if max_cost is None:
        return budget
    return msgspec.structs.replace(budget, max_cost=min(max_cost, budget.max_cost or max_cost))


def _check_plain(task: Task, item: Item, start: RolloutInitialState) -> None:
    """Raise ConfigError if a task item needs a feature that only Ramify supports.

    Only a question and a text are allowed. Other systems could not use its tools, for example.
    """
    names = ("tools", "messages", "conduct", "on_session", "on_end")
    more = [name for name in names if getattr(start, name)]
    if more:
        raise ConfigError(
            f"task '{task.name}', item {item.id}: it has {more[0]}, which only Ramify supports: "
            "compare systems on a task with only a question and a text"
        )


def _as_text(context: Any) -> str:
    if context is None:
        return ""
    return context if isinstance(context, str) else msgspec.json.encode(context).decode()


def _trajectory(item: Item, given: EvaluatedSystemAnswer, seat: MeteredModelAccess) -> Trajectory:
    own = {name: getattr(given, name) for name in ("requests", "input_tokens", "output_tokens")}
    return Trajectory(
        "",
        item.question,
        task=item.id,
        answer=given.answer,
        stop=_determine_stop(given, seat),
        usage=seat.usage,
        cost=seat.cost,
        seconds=given.seconds,
        metrics=_metrics(own),
        metadata={UNANSWERED: _missing_answer_reason(given, seat)},
    )


def _metrics(own: Mapping[str, int | None]) -> dict[str, float]:
    return {OWN + name: float(count) for name, count in own.items() if count is not None}


def _determine_stop(given: EvaluatedSystemAnswer, seat: MeteredModelAccess) -> Stop:
    if given.answer is not None:
        return Stop.FINAL
    if seat.exhausted is not None:
        return seat.exhausted
    return Stop.DEADLINE if given.is_late else Stop.ERROR


def _missing_answer_reason(given: EvaluatedSystemAnswer, seat: MeteredModelAccess) -> str:
    """Return a short reason why a system gave no answer, or an empty string if it did."""
    if given.answer is not None:
        return ""
    if seat.exhausted is not None:
        return BUDGET
    return "too late" if given.is_late else "system failed"


def _describe_failure(given: EvaluatedSystemAnswer, seat: MeteredModelAccess) -> str:
    """Return a sentence that says why a system gave no answer, or an empty string if it did."""
    if given.answer is not None:
        return ""
    return f"{BUDGET}: {seat.refusal}" if seat.exhausted is not None else given.failure
