"""One item answered by another system, and scored by the task like an attempt of ours.

    item ──prepare──> question, context ──system──> SystemAnswer ──score──> AttemptOutcome

The usage and the cost are those of the meter. A system that gave no answer, because it failed, was
late or passed its budget, gets the score of no answer, and the outcome says why. Only a failure of
the model that a retry could repair leaves the attempt without a reward, so that it is made again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.engine.threads import in_thread
from ramify.errors import ConfigError, RamifyError, nearest
from ramify.evaluate.attempt import GRACE_S
from ramify.evaluate.run import AttemptOutcome, outcome_of
from ramify.evaluate.systems.base import MeterSeat, System, SystemAnswer
from ramify.evaluate.systems.command import TIMEOUT_S, CommandSystem
from ramify.evaluate.systems.peers import PEERS, PeerSystem
from ramify.tasks.base import Item, Task, TaskStart
from ramify.tasks.run_score import scored_in_time
from ramify.types.trajectory import Stop, Trajectory

BUDGET = "budget"
"""First word of the reason of an attempt that passed its budget."""
_OWN = "own_"
"""Beginning of the metrics that are a system's own counts."""


def system_of(words: str, *, timeout_s: float = TIMEOUT_S) -> System:
    """The system that ``--with`` names: a peer, or a command with ``{question}``. ``timeout_s`` is
    its limit for one item. Raises ConfigError if there is no such system, or if it is not
    installed."""
    if words in PEERS:
        return PeerSystem(words, timeout_s=timeout_s)
    if "{" not in words and len(words.split()) < 2:
        raise ConfigError(
            f"--with {words!r:.80} is not a system: {nearest(words, PEERS)}, or give a command "
            "such as 'my_program {question} {context_file}'"
        )
    return CommandSystem(words, timeout_s=timeout_s)


async def attempt_by(
    system: System, task: Task, item: Item, number: int, *, seat: MeterSeat
) -> AttemptOutcome:
    """Attempt ``number`` of ``system`` at ``item``, through ``seat``. Its own counts are the
    metrics ``own_requests``, ``own_input_tokens`` and ``own_output_tokens``.

    Raises ConfigError for a task that only our engine can begin, such as one with tools."""
    start = await task.prepare(item)
    _check_plain(task, item, start)
    given = await system.answer(item.question, _as_text(start.context), seat=seat)
    await seat.end()
    trajectory = _trajectory(item, given, seat)
    failure = _failure(given, seat)
    if given.answer is not None or not seat.outage:
        try:
            await in_thread(scored_in_time, task, item, trajectory, GRACE_S)
        except RamifyError as error:
            trajectory.errors.append(str(error))
    else:
        trajectory.errors.append(f"the model failed: {seat.outage}")
    outcome = outcome_of(task, item, number, trajectory, is_stored=False)
    return msgspec.structs.replace(outcome, error=failure or outcome.error)


def _check_plain(task: Task, item: Item, start: TaskStart) -> None:
    """Raise ConfigError unless a question and a text are all that a system must be given."""
    more = [name for name in ("tools", "messages", "conduct", "on_session") if getattr(start, name)]
    if more:
        raise ConfigError(
            f"task '{task.name}', item {item.id}: it has {more[0]}, which only Ramify's engine can "
            "give a model: compare systems on a task with a question and a text"
        )


def _as_text(context: Any) -> str:
    if context is None:
        return ""
    return context if isinstance(context, str) else msgspec.json.encode(context).decode()


def _trajectory(item: Item, given: SystemAnswer, seat: MeterSeat) -> Trajectory:
    own = {
        _OWN + name: float(count)
        for name in ("requests", "input_tokens", "output_tokens")
        if (count := getattr(given, name)) is not None
    }
    return Trajectory(
        "",
        item.question,
        task=item.id,
        answer=given.answer,
        stop=_stop(given, seat),
        usage=seat.usage,
        cost=seat.cost,
        seconds=given.seconds,
        metrics=own,
    )


def _stop(given: SystemAnswer, seat: MeterSeat) -> Stop:
    if given.answer is not None:
        return Stop.FINAL
    if seat.exhausted is not None:
        return seat.exhausted
    return Stop.DEADLINE if given.is_late else Stop.ERROR


def _failure(given: SystemAnswer, seat: MeterSeat) -> str:
    """Why an answer is missing; empty if there is one."""
    if given.answer is not None:
        return ""
    if seat.exhausted is not None:
        return f"{BUDGET}: {seat.refusal}"
    return given.failure
