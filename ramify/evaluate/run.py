"""Evaluates a model on a task: every item of a split, some attempts at each, through the engine, a
few at a time.

    EvaluationPlan ──▶ items x attempts, minus those in the record ── workers ──▶ attempt
                   ──▶ AttemptOutcome ──▶ record (one line each)

This file decides the order, the seeds and what is stored of an attempt. An evaluation with an
``OutcomeRecord`` continues after an interruption: recorded attempts are not repeated.

Not here: figures (see ``evaluation_report.py``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import GRACE_S, attempt
from ramify.tasks.base import Item, Task, items_of, total
from ramify.tasks.scoring.answer_text import as_text
from ramify.types.message import Usage
from ramify.types.trajectory import Stop, Trajectory

_MAX_ANSWER_CHARS = 500


class EvaluationPlan(
    msgspec.Struct, frozen=True, tag="plan", forbid_unknown_fields=True, kw_only=True
):
    """What is evaluated."""

    model: str
    """Its name as shown to people."""
    task: str
    """Its name, as accepted by ``task_of``."""
    options: dict[str, Any] = {}
    """Options of the task."""
    split: str = "test"
    items: int = 100
    """Number of items, from the beginning of the split; fewer if it has fewer."""
    attempts: int = 1
    """Attempts per item."""
    seed: int = 0
    """Sampling seed, from which each attempt's own seed is derived."""
    settings: dict[str, Any] = {}
    """Other settings that affect the outcome: scaffold, limits, temperature."""

    def __post_init__(self) -> None:
        if self.items < 1 or self.attempts < 1:
            raise ConfigError(
                f"cannot evaluate {self.items} items with {self.attempts} attempts: give at least "
                "1 of each"
            )


class AttemptOutcome(msgspec.Struct, frozen=True, tag="outcome", omit_defaults=True, kw_only=True):
    """The result of one attempt."""

    item: str
    """Id of the item."""
    attempt: int
    """Number of the attempt, from 0."""
    kind: str = ""
    run: str = ""
    """Id of the run, if runs are stored."""
    reward: float | None = None
    """The weighted sum of ``rewards``; None if the attempt failed for reasons outside the model."""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    answer: str | None = None
    """As text, truncated if it is long."""
    stop: Stop | None = None
    error: str = ""
    """Why the reward is None."""
    turns: int = 0
    """Turns of the root."""
    calls: int = 0
    """Number of calls below the root."""
    usage: Usage = Usage()
    cost: float | None = None
    """Dollars."""
    seconds: float = 0.0


class Evaluation(msgspec.Struct, frozen=True):
    """A plan and its outcomes.

    Example:
        [outcome for outcome in done.outcomes if outcome.error]    # attempts that failed
    """

    plan: EvaluationPlan
    outcomes: tuple[AttemptOutcome, ...]
    """In order of items and attempts."""


class OutcomeRecord(Protocol):
    """Storage for outcomes as they arrive (see ``record.py``)."""

    @property
    def outcomes(self) -> Sequence[AttemptOutcome]: ...

    def append(self, outcome: AttemptOutcome) -> None: ...


Watcher = Callable[[AttemptOutcome, Trajectory], None]


async def evaluate(
    rlm: RLM,
    task: Task,
    plan: EvaluationPlan,
    *,
    sampling: Sampling | None = None,
    concurrency: int = 16,
    record: OutcomeRecord | None = None,
    on_outcome: Watcher | None = None,
    grace_s: float = GRACE_S,
    direct: bool = False,
) -> Evaluation:
    """Make the attempts of ``plan`` that ``record`` does not have, ``concurrency`` at once.

    ``sampling`` applies to every request, except for its seed. ``on_outcome`` is called with each
    attempt as it ends. Failures of an attempt's model, session or score are recorded in its
    outcome. Raises ConfigError for a split that the task does not have; bugs are also raised.
    ``direct``: a single plain call may answer a short context (see ``attempt``).

    Example:
        plan = evaluate.EvaluationPlan(model="gpt-5-mini", task="needle", items=20, attempts=4)
        done = await evaluate.evaluate(rlm, tasks.task_of("needle"), plan)
    """
    if concurrency < 1:
        raise ConfigError(f"cannot evaluate with concurrency {concurrency}: give at least 1")
    items = items_of(task, plan.split)
    recorded = {
        (outcome.item, outcome.attempt): outcome
        for outcome in (record.outcomes if record is not None else ())
    }
    fresh: list[AttemptOutcome] = []
    work = _AttemptQueue(items, min(plan.items, len(items)), plan.attempts)

    async def worker() -> None:
        for index, number in work:
            item = await work.item(index)
            if (item.id, number) in recorded:
                continue
            attempt_sampling = _sampling(sampling, plan.seed, item, number)
            about = {"evaluation": {"split": plan.split, "attempt": number}}
            trajectory = await attempt(
                rlm,
                task,
                item,
                sampling=attempt_sampling,
                metadata=about,
                grace_s=grace_s,
                direct=direct,
            )
            outcome = outcome_of(task, item, number, trajectory, is_stored=rlm.store is not None)
            fresh.append(outcome)
            if record is not None:
                record.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome, trajectory)

    try:
        async with rlm, asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, work.most)):
                workers.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    place = {id: index for index, id in work.ids.items()}
    outcomes = [
        outcome
        for outcome in (*recorded.values(), *fresh)
        if outcome.item in place and outcome.attempt < plan.attempts
    ]
    return Evaluation(
        plan, tuple(sorted(outcomes, key=lambda outcome: (place[outcome.item], outcome.attempt)))
    )


class _AttemptQueue:
    """The attempts to make, in order, handed out one at a time. An item is made once for all its
    attempts."""

    def __init__(self, items: Sequence[Item], num: int, attempts: int) -> None:
        self.most = num * attempts
        self.ids: dict[int, str] = {}
        """Index of each item that was made -> its id."""
        self._items = items
        self._pairs = ((index, number) for index in range(num) for number in range(attempts))
        self._making: dict[int, asyncio.Task[Item]] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self._pairs

    async def item(self, index: int) -> Item:
        if index not in self._making:
            self._making[index] = asyncio.ensure_future(
                asyncio.to_thread(self._items.__getitem__, index)
            )
            # Earlier items are dropped, since their contexts may be long.
            for old in [each for each in self._making if each < index - 1]:
                if self._making[old].done():
                    del self._making[old]
        item = await asyncio.shield(self._making[index])
        self.ids[index] = item.id
        return item


def _sampling(defaults: Sampling | None, seed: int, item: Item, number: int) -> Sampling:
    attempt_seed = random.Random(f"{seed}/{item.id}/{number}").getrandbits(31)
    return msgspec.structs.replace(defaults or Sampling(), seed=attempt_seed)


def outcome_of(
    task: Task, item: Item, number: int, trajectory: Trajectory, *, is_stored: bool
) -> AttemptOutcome:
    """The outcome that is stored for a ``trajectory`` of ``attempt``."""
    has_reward = bool(trajectory.rewards)
    answer = as_text(trajectory.answer)
    return AttemptOutcome(
        item=item.id,
        attempt=number,
        kind=item.kind,
        run=trajectory.id if is_stored else "",
        reward=total(trajectory.rewards, task.weights) if has_reward else None,
        rewards=trajectory.rewards,
        metrics=trajectory.metrics,
        answer=answer if answer is None else answer[:_MAX_ANSWER_CHARS],
        stop=trajectory.stop,
        error="" if has_reward else (trajectory.errors or ["no reward"])[-1],
        turns=len(trajectory.root.turns) if trajectory.calls else 0,
        calls=max(0, len(trajectory.calls) - 1),
        usage=trajectory.usage,
        cost=trajectory.cost,
        seconds=trajectory.seconds,
    )
