"""Rewards over many answers at once, in TRL's form."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import DatasetTask, Item, score_trajectory
from ramify.tasks.data import dataset
from ramify.tasks.scoring.batched import BatchedReward
from ramify.tasks.validation import answer_only_trajectory, validate
from tests.evaluate.helpers import evaluated, plan

ITEMS = [
    Item(f"{n} + 1?", gold=str(n + 1), id=f"t/test/{n}", metadata={"level": n}) for n in range(40)
]


def test_function_gets_lists_of_the_columns_that_it_names() -> None:
    seen: list[dict[str, list[Any]]] = []

    def same(completions: list[str], gold: list[str], level: list[int]) -> list[float]:
        seen.append({"completions": completions, "gold": gold, "level": level})
        return [float(text == right) for text, right in zip(completions, gold, strict=True)]

    task = DatasetTask("t", {"test": ITEMS}, BatchedReward(same))
    assert validate(task) == ""
    assert seen[:3] == [
        {"completions": ["1"], "gold": ["1"], "level": [0]},
        {"completions": ["(no answer of this task looks like this: qzxvkj)"], "gold": ["1"], "level": [0]},
        {"completions": [""], "gold": ["1"], "level": [0]},
    ]  # fmt: skip


def test_all_columns_for_a_function_of_keywords() -> None:
    seen: dict[str, list[Any]] = {}

    async def reward(**columns: list[Any]) -> list[float]:
        seen.update(columns)
        return [1.0]

    score_trajectory(
        DatasetTask("t", {"test": ITEMS}, BatchedReward(reward)),
        ITEMS[3],
        answer_only_trajectory(ITEMS[3], 4),
    )
    assert seen == {
        "prompts": ["3 + 1?"],
        "completions": ["4"],
        "gold": ["4"],
        "kind": [""],
        "level": [3],
    }


def test_function_of_completions_needs_no_wrapper() -> None:
    """As the reward of rows, for which TRL's functions are brought unchanged."""

    def same(prompts: list[str], completions: list[str], gold: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, gold, strict=True)]

    rows = [{"question": item.question, "answer": item.gold} for item in ITEMS]
    task = dataset({"test": rows}, reward=same)
    validate(task)
    assert isinstance(task.reward, BatchedReward)
    with pytest.raises(
        ConfigError, match=r"cannot be called with one answer: give BatchedReward\(same\)"
    ):
        DatasetTask("t", {"test": ITEMS}, same)  # type: ignore[arg-type]


def test_function_with_other_parameters_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"reward narrow\(answer\) cannot be called with \(answer,"
    ):
        DatasetTask("t", {"test": ITEMS}, narrow)  # type: ignore[arg-type]


def narrow(answer):  # type: ignore[no-untyped-def]
    return 1.0


def test_waiting_answers_form_batches_within_the_bounds() -> None:
    """The first two batches hold both places; the other answers wait and are scored ten at a time."""
    sizes: list[int] = []
    both, others_wait = threading.Barrier(2), threading.Event()
    lock, at_once = threading.Lock(), []

    def reward(completions: list[str], gold: list[str]) -> list[float]:
        with lock:
            sizes.append(len(completions))
            at_once.append(len(completions))
            first = len(sizes) <= 2
            assert len(at_once) <= 2
        if first:
            both.wait(60)
            assert others_wait.wait(60)
        with lock:
            at_once.pop()
        return [float(text == right) for text, right in zip(completions, gold, strict=True)]

    batched = BatchedReward(reward, max_batch=10, concurrency=2)

    def ask(item: Item) -> float:
        return batched(item.gold if int(item.gold) % 2 else "wrong", item)

    with ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(ask, item) for item in ITEMS]
        while len(batched) + sum(sizes) < 40:
            assert not any(future.done() and future.exception() for future in asked)
        others_wait.set()
        assert [future.result() for future in asked] == [1.0, 0.0] * 20
    assert (sum(sizes), max(sizes)) == (40, 10)
    assert len(sizes) == 2 + -(-(40 - sizes[0] - sizes[1]) // 10)


def test_rewards_of_an_evaluation_are_batched() -> None:
    def same(completions: list[str], gold: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, gold, strict=True)]

    task = DatasetTask("t", {"test": ITEMS}, BatchedReward(same))
    found = evaluated(lambda messages: "FINAL('3')", task, of=plan(items=6, task="t"))
    assert [each.rewards for each in found.outcomes] == [
        {"correct": float(n == 2)} for n in range(6)
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0, 2.0], "returned 2 rewards for 1 completions"),
        (lambda completions: [None], "returned None for item t/test/0: an answer needs a number"),
        (lambda completions: 1 / 0, "its score raised ZeroDivisionError"),
        (lambda completions, rubric: [1.0], "needs the column 'rubric', which no item has"),
        (lambda completions: exit(3), "was stopped: SystemExit"),
    ],
)
def test_a_batch_that_fails_names_the_function(function: Any, message: str) -> None:
    task = DatasetTask("t", {"test": ITEMS}, BatchedReward(function))
    for _ in range(2):  # and it does not block the next
        with pytest.raises(RamifyError, match=message):
            score_trajectory(task, ITEMS[0], answer_only_trajectory(ITEMS[0], "1"))


def test_wrong_functions_and_bounds_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="has the parameters answer, item; it needs `completions`"
    ):
        BatchedReward(lambda answer, item: [1.0])
    with pytest.raises(ConfigError, match="max_batch=0"):
        BatchedReward(lambda completions: [1.0], max_batch=0)
