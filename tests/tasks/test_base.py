"""Properties of every task: reproducible items, disjoint splits, numeric rewards, and
self-validation."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import (
    SPLITS,
    DatasetTask,
    GeneratedSplit,
    Item,
    Score,
    Task,
    TrajectoryRewardFunction,
    generated,
    items_of,
    score_trajectory,
    total,
)
from ramify.tasks.batch_scoring import score_batch_with_timeout
from ramify.tasks.scoring import exact, f1, normalised, numeric
from ramify.tasks.scoring.batched import BatchedReward
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.types.trajectory import Trajectory


def make(rng: random.Random) -> Item:
    words = rng.choices(["teal", "coral", "mint"], k=20)
    return Item("How often does 'teal' occur?", " ".join(words), gold=words.count("teal"))


TEAL = DatasetTask("teal", generated("teal", make), numeric)


def test_simple_task_implements_the_task_protocol() -> None:
    assert isinstance(TEAL, Task)
    start = asyncio.run(TEAL.prepare(TEAL.splits["train"][0]))
    assert (start.context, start.tools, start.manifest()) == (
        TEAL.splits["train"][0].context,
        {},
        "",
    )


def test_generated_items_are_reproducible_and_unique_to_their_split() -> None:
    train = TEAL.splits["train"]
    assert train[17] == generated("teal", make)["train"][17]
    assert train[17].id == "teal/train/17"
    assert train[:3] == [train[0], train[1], train[2]]
    assert next(iter(train)) == train[0]
    contexts = {TEAL.splits[split][index].context for split in SPLITS for index in range(200)}
    assert len(contexts) == 600
    assert generated("teal", make, seed=1)["train"][17] != train[17]
    assert generated("other", make)["train"][17].context != train[17].context


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (slice(5, None), "5:"),
        (slice(None), ":"),
        (slice(-3, None), "-3:"),
        (slice(0, -1), "0:-1"),
        (-1, "-1"),
        (slice(None, 3, -1), ":3"),
    ],
)
def test_endless_split_rejects_indices_from_its_end(index: Any, shown: str) -> None:
    train = TEAL.splits["train"]
    with pytest.raises(ConfigError) as caught:
        train[index]
    assert str(caught.value) == (
        f"teal/train is endless, and [{shown}] counts from its end: give both bounds of "
        "at least 0, as in [0:100], or give the task a size"
    )
    assert train[4:0:-2] == [train[4], train[2]]
    assert train[1::-1] == [train[1], train[0]]


def test_generated_split_with_a_size_ends() -> None:
    stream = GeneratedSplit("teal", "test", make, size=3)
    assert len(stream) == 3
    assert [item.id for item in stream] == ["teal/test/0", "teal/test/1", "teal/test/2"]
    assert stream[-1] == stream[2]
    with pytest.raises(IndexError, match="teal/test has 3 items; item 3 does not exist"):
        stream[3]
    assert TEAL.splits["train"][10**11].id == "teal/train/100000000000"


def test_item_that_cannot_be_generated_is_named() -> None:
    def make(rng: random.Random) -> Item:
        return Item("?", rng.choice([]))

    with pytest.raises(ConfigError, match=r"^item bad/test/3 cannot be made: IndexError: "):
        generated("bad", make)["test"][3]


def test_unknown_split_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="task 'teal' has no split 'tset': did you mean 'test'"):
        items_of(TEAL, "tset")


def test_total_is_the_weighted_sum_of_rewards() -> None:
    assert total({"correct": 1.0, "short": 0.5}, {"short": 0.2}) == pytest.approx(1.1)
    assert total({}, {"short": 0.2}) == 0.0


# --- scores

ITEM = Item("?", gold=7, id="t/test/0")


@pytest.mark.parametrize(
    ("worth", "rewards", "metrics"),
    [
        (0.5, {"correct": 0.5}, {}),
        (True, {"correct": 1.0}, {}),
        (np.float32(0.5), {"correct": 0.5}, {}),
        ({"a": np.int64(1), "b": torch.tensor([0.5])}, {"a": 1.0, "b": 0.5}, {}),
        ({"a": 1.0, "b": 0}, {"a": 1.0, "b": 0}, {}),
        (Score({"a": 1.0}, metrics={"m": 2.0}), {"a": 1.0}, {"m": 2.0}),
    ],
)
def test_reward_function_may_return_number_mapping_or_score(
    worth: Any, rewards: Mapping[str, float], metrics: Mapping[str, float]
) -> None:
    trajectory = score_trajectory(
        DatasetTask("t", {"test": [ITEM]}, lambda answer, item: worth),
        ITEM,
        answer_only_trajectory(ITEM, 7),
    )
    assert (trajectory.rewards, trajectory.metrics) == (rewards, metrics)


def test_whole_trajectory_reward_gets_the_trajectory() -> None:
    task = DatasetTask(
        "t",
        {"test": [ITEM]},
        TrajectoryRewardFunction(lambda item, trajectory: float(len(trajectory.calls))),
    )
    assert score_trajectory(task, ITEM, answer_only_trajectory(ITEM, None)).rewards == {
        "correct": 1.0
    }


@pytest.mark.parametrize(
    ("worth", "message"),
    [
        (float("nan"), "reward 'correct' is nan; it must be a finite number"),
        ({"a": float("inf")}, "reward 'a' is inf"),
        ({"a": "1"}, "reward 'a' is '1'"),
        (None, "reward 'correct' is None; it must be a finite number"),
        ([1.0], r"reward 'correct' is \[1.0\]"),
        (np.array([1.0, 0.0]), r"reward 'correct' is array\(\[1., 0.\]\)"),
        ({}, "its score has no reward"),
        (
            Score({"a": 1.0}, calls={"0.7": {"a": 1.0}}),
            "a reward for call '0.7', which the trajectory does not have",
        ),
        (Score({"a": 1.0}, calls={"0": {"a": float("nan")}}), "reward 'a' is nan"),
    ],
)
def test_invalid_reward_names_task_and_item(worth: Any, message: str) -> None:
    with pytest.raises(RamifyError, match=f"task 't', item t/test/0: .*{message}"):
        score_trajectory(
            DatasetTask("t", {"test": [ITEM]}, lambda answer, item: worth),
            ITEM,
            answer_only_trajectory(ITEM, 7),
        )


def test_misspelled_weight_is_named_by_the_first_score() -> None:
    item = Item("?", gold=3, id="two/test/0")

    def two(answer: Any, item: Item) -> dict[str, float]:
        return {"close": 1.0, "len": 0.5}

    def of(weights: dict[str, float], reward: Any = two) -> DatasetTask:
        return DatasetTask("two", {"test": [item]}, reward, weights)

    message = "weights of task 'two': no reward 'lenn': did you mean 'len'. known: close, len; a re"
    with pytest.raises(ConfigError, match=message):
        validate(of({"close": 0.5, "lenn": 0.5}))
    with pytest.raises(RamifyError, match=message):  # also without the check before a run
        score_trajectory(of({"close": 0.5, "lenn": 0.5}), item, answer_only_trajectory(item, 1))

    def together(completions: list[str]) -> list[Any]:
        return [{"close": 1.0, "len": 0.5} for _ in completions]

    error = score_batch_with_timeout(
        of({"lenn": 0.5}, BatchedReward(together)), [(item, answer_only_trajectory(item, 1))], 30
    )[0]
    assert "no reward 'lenn': did you mean 'len'?" in str(error)
    # Rewards that only some items have may have weights.
    for weights in ({"close": 0.5, "len": 0.5, "lenn": 1.0}, {"close": 0.5, "steps": 1.0}):
        scored = score_trajectory(of(weights), item, answer_only_trajectory(item, 1))
        assert scored.rewards == {"close": 1.0, "len": 0.5}


def test_async_reward_is_awaited_on_one_loop_for_all_answers() -> None:
    loops = []

    async def late(answer: Any, item: Item) -> float:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return float(answer == item.gold)

    async def whole(item: Item, trajectory: Trajectory) -> Score:
        return Score({"correct": 0.5}, metrics={"calls": len(trajectory.calls)})

    task = DatasetTask("t", {"test": [ITEM]}, late)
    assert validate(task) == ""
    assert [
        score_trajectory(task, ITEM, answer_only_trajectory(ITEM, answer)).rewards
        for answer in (7, 8)
    ] == [
        {"correct": 1.0},
        {"correct": 0.0},
    ]
    assert len(loops) == 5
    assert len(set(loops)) == 1
    found = score_trajectory(
        DatasetTask("t", {"test": [ITEM]}, TrajectoryRewardFunction(whole)),
        ITEM,
        answer_only_trajectory(ITEM, 7),
    )
    assert (found.rewards, found.metrics) == ({"correct": 0.5}, {"calls": 1})


def test_coroutine_inside_a_score_is_rejected() -> None:
    async def late() -> float:
        return 1.0

    task: Any = DatasetTask("t", {"test": [ITEM]}, lambda answer, item: {"late": late()})
    with pytest.raises(RamifyError, match=r"reward 'late' is a coroutine: await it"):
        score_trajectory(task, ITEM, answer_only_trajectory(ITEM, 7))


def test_score_that_calls_sys_exit_is_reported_as_failed() -> None:
    task = DatasetTask("t", {"test": [ITEM]}, lambda answer, item: sys.exit(3))
    with pytest.raises(RamifyError, match="item t/test/0: its score raised SystemExit: 3"):
        score_trajectory(task, ITEM, answer_only_trajectory(ITEM, 7))


@pytest.mark.parametrize("gold", [np.int64(7), np.float64(7.0), np.array(7), torch.tensor(7)])
@pytest.mark.parametrize("reward", [numeric, f1, normalised])
def test_numpy_and_torch_golds_are_compared_by_value(gold: Any, reward: Any) -> None:
    item = Item("How many?", gold=gold, id="t/test/0")
    assert isinstance(item.gold, int | float)
    validate(DatasetTask("t", {"test": [item]}, reward))


def test_failing_score_names_task_and_item() -> None:
    task = DatasetTask("t", {"test": [ITEM]}, lambda answer, item: answer["x"])
    with pytest.raises(RamifyError, match="task 't', item t/test/0: its score raised TypeError"):
        score_trajectory(task, ITEM, answer_only_trajectory(ITEM, 7))


# --- validate


def of(*items: Item, reward: Any = exact, **more: Any) -> DatasetTask:
    return DatasetTask("t", {"test": items}, reward, **more)


def test_validate_accepts_correct_tasks() -> None:
    validate(TEAL)
    validate(of(msgspec.structs.replace(ITEM, gold=["seven", "7"], right="7", wrong=8)))
    both = {"correct": 0.5, "brief": 0.5}
    validate(
        of(ITEM, reward=lambda answer, item: dict.fromkeys(both, exact(answer, item)), weights=both)
    )


def test_validate_skips_and_counts_items_without_gold_answer() -> None:
    assert validate(of(ITEM)) == ""
    open_ended = Item("what do you see?", id="t/test/1")
    assert validate(of(ITEM, open_ended)) == (
        "task 't': 1 of the 2 items checked have no gold answer; the check of their "
        "scores was skipped"
    )
    unreached = of(
        msgspec.structs.replace(ITEM, gold=8, id="t/test/2"), reward=lambda answer, item: 0.0
    )
    with pytest.raises(ConfigError, match="the right answer 8 scores 0 and not 1"):
        validate(unreached)
    assert (
        validate(unreached, gold=False)
        == "task 't': the check of its scores with gold answers is switched off"
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            of(msgspec.structs.replace(ITEM, gold=["seven", "7"])),
            "t/test/0: the right answer \\['seven', '7'\\] scores 0",
        ),
        (of(ITEM, weights={"correct": 0.5}), "t/test/0: the right answer 7 scores 0.5 and not 1"),
        (
            of(ITEM, reward=lambda answer, item: 100 * exact(answer, item)),
            "scores 100 and not 1; .*if the score has another scale, such as 0 to 100 .*validate=f",
        ),
        (
            of(ITEM, reward=lambda answer, item: 1.0),
            "t/test/0: the wrong answer .* scores 1; the score accepts any answer",
        ),
        (
            of(ITEM, reward=lambda answer, item: answer in (7, None)),
            "t/test/0: the wrong answer None scores 1",
        ),
        (of(msgspec.structs.replace(ITEM, wrong="7.")), None),
        (
            of(msgspec.structs.replace(ITEM, wrong="7.", gold=7), reward=numeric),
            "the wrong answer '7.' scores 1",
        ),
        (of(Item("  ", gold=7, id="t/test/0")), "t/test/0: an item needs an id and a question"),
        (of(Item("?", gold=7)), r"item \(without an id\): an item needs an id"),
        (of(), "its split 'test' is empty"),
        (
            DatasetTask(
                "t",
                {"train": [msgspec.structs.replace(ITEM, id="t/train/4")], "test": [ITEM]},
                exact,
            ),
            "t/test/0 of split 'test' is the same item as t/train/4 of split 'train'",
        ),
    ],
)
def test_validate_names_the_item_that_is_wrong(task: DatasetTask, message: str | None) -> None:
    if message is None:
        validate(task)
        return
    with pytest.raises(ConfigError, match=message):
        validate(task)


def test_task_without_splits_or_reward_function_is_rejected() -> None:
    with pytest.raises(ConfigError, match="needs a name and at least one split"):
        DatasetTask("t", {}, exact)
    with pytest.raises(ConfigError, match="its reward is a str; give a function"):
        DatasetTask("t", {"test": [ITEM]}, "exact")  # type: ignore[arg-type]
