"""Tasks built from data and functions: splits, a reward, and an optional initial state.

A reward takes the answer and the item, or the whole trajectory. It returns a number, several
numbers by name, or a ``Score``::

    SimpleTask("teal", splits, numeric)                              # a score from ``scoring``
    SimpleTask("teal", splits, lambda answer, item: float(answer == item.gold))
    SimpleTask(
        "teal",
        splits,
        WholeTrajectoryReward(lambda item, trajectory: {"correct": …, "short": …}),
        weights={"short": 0.1},
    )
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import Item, Score, TaskStart
from ramify.types.trajectory import Trajectory

Worth = float | Mapping[str, float] | Score
"""Return type of a reward function."""
AnswerReward = Callable[[Any, Item], Worth]
"""Reward function: (answer, item) -> reward. The answer is None if the rollout gave none."""


class WholeTrajectoryReward(msgspec.Struct, frozen=True):
    """Wraps a reward function of the whole trajectory: ``fn(item, trajectory)``.

    Example:
        tasks.WholeTrajectoryReward(lambda item, run: {"brief": float(len(run.calls) < 10)})
    """

    reward: Callable[[Item, Trajectory], Worth]


class SimpleTask(msgspec.Struct, frozen=True):
    """Task made of splits and a reward function. Implements ``base.Task``.

    Example:
        tasks.SimpleTask("logs", tasks.generated("logs", make), tasks.numeric)
    """

    name: str
    splits: Mapping[str, Sequence[Item]]
    reward: AnswerReward | WholeTrajectoryReward
    """Called with (answer, item), unless it is a ``WholeTrajectoryReward``."""
    weights: Mapping[str, float] = {}
    begin: Callable[[Item], Awaitable[TaskStart]] | None = None
    """Creates the initial state of a rollout. None: a session with the item's context only."""

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
    """Convert the result of a reward function. A single number becomes the reward ``correct``."""
    if isinstance(worth, Score):
        return worth
    return Score(dict(worth)) if isinstance(worth, Mapping) else Score({"correct": float(worth)})
