"""A task made of data and functions: splits, a reward, and where a session needs more than its
context, a beginning.

A reward may take the trajectory, or only the answer and the item, and may give a number, several by name or a ``Score``::

    SimpleTask("teal", splits, numeric)                                        # one of ``scoring``
    SimpleTask("teal", splits, lambda answer, item: float(answer == item.gold))
    SimpleTask("teal", splits, Whole(lambda item, trajectory: {"correct": …, "short": …}), weights={"short": 0.1})
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import Item, Score, TaskStart
from ramify.types.trajectory import Trajectory

Worth = float | Mapping[str, float] | Score
"""What a reward function may return."""
AnswerReward = Callable[[Any, Item], Worth]
"""(answer, item) -> its worth; the answer is None where there was none."""


class WholeTrajectoryReward(msgspec.Struct, frozen=True):
    """Marks a reward that looks at the whole trajectory: ``WholeTrajectoryReward(fn)`` with
    ``fn(item, trajectory)``."""

    reward: Callable[[Item, Trajectory], Worth]


class SimpleTask(msgspec.Struct, frozen=True):
    """Implements ``base.Task``."""

    name: str
    splits: Mapping[str, Sequence[Item]]
    reward: AnswerReward | WholeTrajectoryReward
    """By default called with (answer, item)."""
    weights: Mapping[str, float] = {}
    begin: Callable[[Item], Awaitable[TaskStart]] | None = None
    """What ``prepare`` does; None: a session over the item's context, with nothing else."""

    def __post_init__(self) -> None:
        if not self.name or not self.splits:
            raise ConfigError(f"task {self.name!r} needs a name and at least one split")
        if not callable(self.reward) and not isinstance(self.reward, WholeTrajectoryReward):
            raise ConfigError(
                f"task '{self.name}': its reward is a {type(self.reward).__name__}; give a function"
            )

    async def prepare(self, item: Item) -> TaskStart:
        return TaskStart(context=item.context) if self.begin is None else await self.begin(item)

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        reward, answer = self.reward, trajectory.answer
        return as_score(
            reward.reward(item, trajectory)
            if isinstance(reward, WholeTrajectoryReward)
            else reward(answer, item)
        )


def as_score(worth: Worth) -> Score:
    """A single number is the reward ``correct``."""
    if isinstance(worth, Score):
        return worth
    return Score(dict(worth)) if isinstance(worth, Mapping) else Score({"correct": float(worth)})
