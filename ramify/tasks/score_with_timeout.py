"""Runs a task's score function, which is user code, with a time limit.

    score_with_timeout(task, item, trajectory, 30) ──own thread──> scored(…) ──> rewards and metrics

If a score takes too long, the error names the line that it is executing, and its thread is stopped
(``stoppable_thread.py``). The values that a score may return are defined in ``base.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ramify.errors import RamifyError
from ramify.tasks.base import Item, Task, score_trajectory
from ramify.tasks.stoppable_thread import StoppableThread
from ramify.types.trajectory import Trajectory

_T = TypeVar("_T")


def score_with_timeout(
    task: Task, item: Item, trajectory: Trajectory, timeout_s: float
) -> Trajectory:
    """Score a trajectory within ``timeout_s`` seconds, and return it with its rewards.

    Raises RamifyError, which names the task and the item. After a time-out, it also names the line
    that was running.
    """
    what = f"task '{task.name}', item {item.id}: its score"
    return call_with_timeout(lambda: score_trajectory(task, item, trajectory), what, timeout_s)


def call_with_timeout(score: Callable[[], _T], what: str, timeout_s: float) -> _T:
    """Call ``score`` in a separate thread with a time limit in seconds, and return its result.

    Errors of ``score`` are raised.

    After ``timeout_s`` seconds, RamifyError is raised. Its message begins with ``what`` and names
    the line that was running.
    """
    thread = StoppableThread(score, f"ramify {what}")
    thread.wait(timeout_s)
    if not thread.has_ended:
        place = thread.running_line()
        thread.stop()
        raise RamifyError(
            f"{what} took more than {timeout_s:g} s{place}; it was stopped (a run's limit is "
            "rl.rollout.grace_s)"
        )
    result: _T = thread.result()
    return result
