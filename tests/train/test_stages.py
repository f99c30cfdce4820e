"""What each step of a stage learns from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import Item
from ramify.tasks.simple import SimpleTask
from ramify.train.algorithms.dr_grpo import DrGRPO
from ramify.train.backends.base import Optim
from ramify.train.loss import Loss
from ramify.train.stages import Imitate, Reinforce, Sample, WarmUp, Work
from ramify.types.trajectory import Group
from tests.train.trees import call, group, tree

ITEMS = [Item("?", id=f"{index}") for index in range(7)]


class Canned:
    """Rollouts that are made already: item n's attempts have the rewards that ``rewards`` gives n."""

    def __init__(self, rewards: dict[int, tuple[float | None, ...]]) -> None:
        self.rewards = rewards
        self.asked: list[list[str]] = []

    async def groups(self, items: Sequence[Item], step: int, **_: Any) -> list[Group]:
        self.asked.append([item.id for item in items])
        return [
            group(*(tree(call("0", 3), reward=reward) for reward in self.rewards.get(int(item.id), (1, 1))))
            for item in items
        ]


def work(canned: Canned, *, next_item: int = 0, **sample: Any) -> Work:
    task = SimpleTask("t", {"train": ITEMS}, lambda answer, item: 0.0)
    stage = Reinforce(
        4, Optim(), Loss(), task=task, items=ITEMS, rollouts=canned, algorithm=DrGRPO(),  # type: ignore[arg-type]
        sample=Sample(**sample), temperature=1.0,
    )  # fmt: skip
    return asyncio.run(stage.work(0, next_item))


def test_minibatches_share_rollouts_and_denominator() -> None:
    found = work(Canned({0: (1, 0, 0), 1: (1, 0)}), items=2, minibatches=2)
    assert [[round(float(row.advantages.max() + row.advantages.min()), 3) for row in part.rows] for part in found.parts] == [
        [0.667, -0.333, -0.5], [-0.333, 0.5],
    ]  # fmt: skip
    assert [part.denominators for part in found.parts] == [{"rl": 2.5}, {"rl": 2.5}]
    assert found.metrics["items"] == 2
    assert (found.next_item, found.silence) == (2, "")


def test_fewer_rollouts_than_minibatches() -> None:
    found = work(Canned({0: (1, 0)}), items=1, minibatches=5)
    assert [len(part.rows) for part in found.parts] == [1, 1]
    silent = work(Canned({}), items=2, minibatches=5)
    assert (silent.parts, silent.silence) == ([], "in each of 2 groups all rollouts did equally well")


def test_dynamic_sampling_tries_other_items() -> None:
    canned = Canned({3: (1, 0), 5: (0, 1)})
    found = work(canned, items=2, max_items=6)
    assert canned.asked == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert ([row for part in found.parts for row in part.rows] != [], len(found.groups), found.next_item) == (
        True,
        2,
        6,
    )
    assert [each.trajectories[0].rewards["correct"] for each in found.groups] == [1, 0]


def test_dynamic_sampling_gives_up_and_goes_round() -> None:
    canned = Canned({6: (1, 0)})
    found = work(canned, items=2, max_items=4, next_item=5)
    assert canned.asked == [["5", "6"], ["0", "1"]]
    assert len(found.groups) == 2
    assert found.next_item == 9


def test_a_step_whose_rollouts_all_failed() -> None:
    with pytest.raises(TrainError, match="all 2 rollouts of step 0 failed, the first with: no error was said"):
        work(Canned({0: (None, None)}), items=1)


def test_schedules_take_the_length_of_their_stage() -> None:
    warm = WarmUp(9, Optim(schedule="linear"), range(4, 20), 100, seed=0)
    assert warm.optim.num_steps == 9
    with pytest.raises(ConfigError, match="nothing to learn from"):
        Imitate([], Optim(), 100, 1, 0)
    rows = asyncio.run(warm.work(0, 0)).parts[0].rows
    imitate = Imitate(rows, Optim(schedule="cosine"), 2 * len(rows[0]), 3, 0)
    assert imitate.optim.num_steps == imitate.num_steps >= 3 * len(rows) // 2


@pytest.mark.parametrize(
    "options", [{"items": 0}, {"minibatches": 0}, {"max_staleness": -1}, {"items": 4, "max_items": 3}]
)
def test_sizes_that_allow_nothing(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rl: items="):
        Sample(**options)
