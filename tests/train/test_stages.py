"""Training data of each step of a stage."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import DatasetTask, Item
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import RlSpec
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import (
    RolloutAttempt,
    RolloutConcurrencyLimiter,
    RolloutGroupInProgress,
    TaskRolloutRunner,
)
from ramify.train.stages import RandomStringWarmUpStage, RlStage, SftStage, StepData
from ramify.types.trajectory import Trajectory
from tests.train.trees import call, tree

ITEMS = [Item("?", id=f"{index}") for index in range(7)]


class PreparedRollouts(TaskRolloutRunner):
    """Prepared rollouts: the attempts at item n have the rewards ``rewards[n]``."""

    def __init__(self, rewards: dict[int, tuple[float | None, ...]]) -> None:
        self.rewards = rewards
        self.asked: list[str] = []
        self.room = RolloutConcurrencyLimiter(99)
        self.per_item = 2

    def is_scored_by_step(self, item: Item) -> bool:
        return False

    def begin(
        self, item: Item, name: str, over: Callable[[RolloutAttempt], None] = lambda _: None
    ) -> RolloutGroupInProgress:
        self.asked.append(f"{name} {item.id}")

        def one(number: int, reward: float | None) -> RolloutAttempt:
            async def run() -> Trajectory:
                rolled = tree(call("0", 3), reward=reward)
                rolled.id, rolled.task = f"{name}/rollout={number}", item.id
                return rolled

            return RolloutAttempt(name, item, self.room, run, over)

        return RolloutGroupInProgress(
            item, [one(*each) for each in enumerate(self.rewards.get(int(item.id), (1, 1)))], None
        )


def work(canned: PreparedRollouts, *, next_item: int = 0, **sample: Any) -> tuple[StepData, int]:
    """Return the data of the first step and the first item that was not started."""
    task = DatasetTask("t", {"train": ITEMS}, lambda answer, item: 0.0)
    spec = RlSpec(steps=4, sample=RolloutBatchSpec(**sample))
    stage = RlStage(spec, DrGRPO(), task, canned)

    async def first() -> tuple[StepData, int]:
        async with stage.open_data_source(next_item, []) as source:
            found = await source.step_data(0)
            return found, source.data_position()[0]

    return asyncio.run(first())


def test_minibatches_share_rollouts_and_denominator() -> None:
    found, next_item = work(PreparedRollouts({0: (1, 0, 0), 1: (1, 0)}), items=2, minibatches=2)
    assert [
        [round(float(row.advantages.max() + row.advantages.min()), 3) for row in part.rows]
        for part in found.parts
    ] == [
        [0.667, -0.333, -0.5],
        [-0.333, 0.5],
    ]
    assert [part.denominators for part in found.parts] == [{"rl": 2.5}, {"rl": 2.5}]
    assert found.metrics["items"] == 2
    assert (next_item, found.no_signal) == (2, "")


def test_fewer_rollouts_than_minibatches_give_fewer_minibatches() -> None:
    found, _ = work(PreparedRollouts({0: (1, 0)}), items=1, minibatches=5)
    assert [len(part.rows) for part in found.parts] == [1, 1]
    zero_variance, _ = work(PreparedRollouts({}), items=2, minibatches=5)
    assert (zero_variance.parts, zero_variance.no_signal) == (
        [],
        "in each of 2 groups all rollouts did equally well",
    )


def test_dynamic_sampling_replaces_groups_without_signal() -> None:
    canned = PreparedRollouts({3: (1, 0), 5: (0, 1)})
    found, next_item = work(canned, items=2, max_items=6)
    assert canned.asked == [f"step=0/group={index} {index}" for index in range(6)]
    assert (
        [row for part in found.parts for row in part.rows] != [],
        len(found.groups),
        next_item,
    ) == (True, 2, 6)
    assert [each.trajectories[0].rewards["correct"] for each in found.groups] == [1, 0]
    assert [(each.number, each.outcome) for each in found.accounts] == [
        (3, "learnt"),
        (5, "learnt"),
        (0, "no_signal"),
        (1, "no_signal"),
        (2, "no_signal"),
        (4, "no_signal"),
    ]


def test_dynamic_sampling_stops_at_max_items_and_wraps_around() -> None:
    canned = PreparedRollouts({6: (1, 0)})
    found, next_item = work(canned, items=2, max_items=4, next_item=5)
    assert [each.split()[1] for each in canned.asked] == ["5", "6", "0", "1"]
    assert [each.task for each in found.groups] == ["6", "5"]
    assert next_item == 9


def test_dynamic_sampling_starts_as_many_items_as_should_suffice() -> None:
    """Half of the first four have a signal, so four more are started for the two missing ones; one
    of them is not needed."""
    canned = PreparedRollouts(dict.fromkeys((0, 3, 4, 5, 6), (1, 0)))
    found, next_item = work(canned, items=4, max_items=12)
    assert (len(canned.asked), next_item) == (8, 8)
    assert [(each.number, each.outcome) for each in found.accounts] == [
        *((number, "learnt") for number in (0, 3, 4, 5)),
        (1, "no_signal"),
        (2, "no_signal"),
        (6, "spare"),
        (7, "spare"),
    ]


def test_step_with_only_failed_rollouts_raises() -> None:
    with pytest.raises(TrainError, match="all 2 rollouts failed: no error was recorded"):
        work(PreparedRollouts({0: (None, None)}), items=1)


def test_schedules_use_the_length_of_their_stage() -> None:
    warm = RandomStringWarmUpStage(9, OptimizerSpec(schedule="linear"), range(4, 20), 100, seed=0)
    assert warm.optim.num_steps == 9
    with pytest.raises(
        ConfigError,
        match=r"^warmup\.optim\.schedule=linear needs .* but has 9: lower warmup\.optim\.warmup_steps",
    ):
        RandomStringWarmUpStage(
            9, OptimizerSpec(schedule="linear", warmup_steps=30), range(4, 20), 100, seed=0
        )
    with pytest.raises(ConfigError, match="nothing to learn from"):
        SftStage([], OptimizerSpec(), 100, 1, 0)
    rows = asyncio.run(warm.step_data(0)).parts[0].rows
    imitate = SftStage(rows, OptimizerSpec(schedule="cosine"), 2 * len(rows[0]), 3, 0)
    assert imitate.optim.num_steps == imitate.num_steps >= 3 * len(rows) // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": 0}, "rl.sample.items=0 must be at least 1"),
        ({"minibatches": 0}, "rl.sample.minibatches=0 must be at least 1"),
        ({"max_staleness": -1}, "rl.sample.max_staleness=-1 must be at least 0"),
        ({"items": 4, "max_items": 3}, "rl.sample.max_items=3 must be at least rl.sample.items=4"),
    ],
)
def test_invalid_sample_sizes_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RolloutBatchSpec(**options)
