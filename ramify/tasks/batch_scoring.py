"""Scores all rollouts of a training step with a single call.

    rollouts that await their score ──> task.score_step, once ──> one score each

A task may score its rollouts one by one as they end (``Task.score``), or all rollouts of a step
with one call. In the second case, a rollout that has ended gives up its session, and its place
among the concurrent rollouts, before it is scored. An error of the whole call applies to every
rollout; an error in place of a score applies to that rollout only. Which rollouts belong to a step
is decided in ``train/rollouts/group_queue.py``, and the time limit is applied by
``score_with_timeout.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ramify.errors import RamifyError, user_line_of_error
from ramify.tasks.base import Item, Score, Task, set_trajectory_score
from ramify.tasks.score_with_timeout import call_with_timeout
from ramify.types.trajectory import Trajectory

EndedRollout = tuple[Item, Trajectory]
"""A finished rollout without rewards, and its task item."""


@runtime_checkable
class BatchScoredTask(Protocol):
    """The interface of a task that can score all rollouts of a training step in one call.

    It adds two methods to ``Task``.

    Example:
        def is_scored_by_step(self, item): return True
        def score_step(self, rollouts): return [Score({"correct": 1.0}) for _ in rollouts]
    """

    def is_scored_by_step(self, item: Item) -> bool:
        """Return True if all rollouts of ``item`` in a training step must be scored together."""
        ...

    def score_step(self, rollouts: Sequence[EndedRollout]) -> Sequence[Score | RamifyError]:
        """Score all rollouts of a training step, and return a score or an error for each."""
        ...


def is_batch_scored(task: Task, item: Item) -> bool:
    """Return True if a task must score all rollouts of ``item`` in a training step together."""
    return isinstance(task, BatchScoredTask) and task.is_scored_by_step(item)


def batch_scores(task: Task, rollouts: Sequence[EndedRollout]) -> list[Score | RamifyError]:
    """Score all rollouts of a training step in one call of the task's score function.

    Returns for each rollout its score, or the error that prevented one.
    """
    assert isinstance(task, BatchScoredTask)
    where = f"task '{task.name}': its score of {len(rollouts)} rollouts"
    try:
        scores = list(task.score_step(rollouts))
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- it becomes each rollout's error
        failed = f": {error}" if isinstance(error, RamifyError) else f" raised {error!r}"
        return [RamifyError(f"{where}{failed}{user_line_of_error(error)}")] * len(rollouts)
    if len(scores) != len(rollouts):
        return [RamifyError(f"{where} returned {len(scores)} scores")] * len(rollouts)
    return scores


def score_batch_with_timeout(
    task: Task, rollouts: Sequence[EndedRollout], timeout_s: float
) -> list[RamifyError | None]:
    """Score all rollouts of a training step within a time limit, and store their scores.

    The rewards and metrics are stored in the trajectories. Returns for each rollout the error that
    explains why it has no score, or None if it has one. The task may take ``timeout_s`` seconds for
    all rollouts together.
    """
    what = f"task '{task.name}': its score of {len(rollouts)} rollouts"
    try:
        scores = call_with_timeout(lambda: batch_scores(task, rollouts), what, timeout_s)
    except RamifyError as error:
        return [error] * len(rollouts)
    errors: list[RamifyError | None] = []
    for (item, trajectory), score in zip(rollouts, scores, strict=True):
        problem = score if isinstance(score, RamifyError) else None
        if not isinstance(score, RamifyError):
            try:
                set_trajectory_score(f"task '{task.name}', item {item.id}", trajectory, score)
            except RamifyError as error:
                problem = error
        errors.append(problem)
    return errors
