"""Scoring all rollouts of a step with one call: which errors concern which rollout, time limits,
and tasks that wrap others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.mcp_task import TaskWithMcpTools
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.batch_scoring import is_batch_scored, score_batch_with_timeout
from ramify.tasks.mixture import mixture
from ramify.tasks.scoring.batched import BatchedReward
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.types.trajectory import Trajectory

ITEMS = [Item(f"{n}?", gold=str(n), id=f"t/train/{n}") for n in range(4)]


def task_with(function: Any, **options: Any) -> DatasetTask:
    return DatasetTask("t", {"train": ITEMS}, BatchedReward(function, **options))


def score_all(task: Any, answers: Sequence[Any], timeout_s: float = 60) -> list[Any]:
    """The rewards of ``answers`` to the first items, or the texts of their errors."""
    rollouts: list[tuple[Item, Trajectory]] = [
        (item, answer_only_trajectory(item, answer))
        for item, answer in zip(task.splits["train"], answers, strict=False)
    ]
    errors = score_batch_with_timeout(task, rollouts, timeout_s)
    return [
        trajectory.rewards if error is None else str(error)
        for (_, trajectory), error in zip(rollouts, errors, strict=True)
    ]


def test_reward_may_compare_the_answers_of_a_step() -> None:
    """The longest answer of the step is right."""
    task = task_with(
        lambda completions: [float(len(text) == max(map(len, completions))) for text in completions]
    )
    assert score_all(task, ["a", "abc", "ab"]) == [{"correct": r} for r in (0.0, 1.0, 0.0)]


def test_only_rewards_without_a_batch_size_wait_for_their_step() -> None:
    def one(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    assert is_batch_scored(task_with(one), ITEMS[0])
    assert not is_batch_scored(task_with(one, max_batch=8), ITEMS[0])
    assert not is_batch_scored(DatasetTask("t", {"train": ITEMS}, lambda a, i: 1.0), ITEMS[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda completions: [1.0],
            "task 't': its score of 2 rollouts: reward function '<lambda>' returned 1 rewards for "
            "2 completions",
        ),
        (lambda completions: None, "returned None: return a list with one reward for each"),
        (lambda completions: 0.5, "returned 0.5: return a list"),
        (lambda completions: "ab", "returned 'ab': return a list"),
        (lambda completions: {"a": [1.0, 1.0]}, "returned {'a': [1.0, 1.0]}: return a list"),
        (
            lambda completions, solution: [1.0, 1.0],
            "needs the column 'solution', which no item has: the columns are completions, gold, "
            "kind, prompts; rename or remove the parameter",
        ),
        (lambda completions: 1 / 0, "its score of 2 rollouts raised ZeroDivisionError"),
        (lambda completions: exit(3), "its score of 2 rollouts raised SystemExit(3), at "),
        (lambda completions: [float("nan")] * 2, "reward 'correct' is nan; it must be a finite"),
    ],
)
def test_error_of_the_call_concerns_every_rollout(function: Any, message: str) -> None:
    found = score_all(task_with(function), ["0", "1"])
    assert len(found) == 2
    assert all(message in each for each in found), found


def test_answer_without_a_reward_concerns_only_its_rollout() -> None:
    first, second = score_all(task_with(lambda completions: [1.0, None]), ["0", "1"])
    assert first == {"correct": 1.0}
    assert second.endswith("returned None for item t/train/1: an answer needs a number")


def test_reward_that_hangs_is_stopped_and_its_line_is_named() -> None:
    def slow(completions: list[str]) -> list[float]:
        while True:
            time.sleep(0.01)

    found = score_all(task_with(slow), ["0", "1"], timeout_s=0.2)
    assert len(set(found)) == 1
    assert "took more than 0.2 s, at " in found[0]
    assert "test_step_scoring.py:" in found[0]


def parts(function: Any) -> Any:
    """A mixture of a task that is scored by step and of one that is not."""
    return mixture(
        parts={
            "a": {"task": f"{__name__}:{function}"},
            "b": {"task": f"{__name__}:same"},
            "c": {"task": f"{__name__}:single"},
        }
    )


def splits() -> dict[str, Sequence[Item]]:
    return dict.fromkeys(("train", "validation", "test"), ITEMS)


seen: list[list[str]] = []


def _noted(completions: list[str], gold: list[str]) -> list[float]:
    seen.append(completions)
    return [float(text == right) for text, right in zip(completions, gold, strict=True)]


same = DatasetTask("same", splits(), BatchedReward(_noted))
broken = DatasetTask("broken", splits(), BatchedReward(lambda completions: 1 / 0))
single = DatasetTask("single", splits(), lambda answer, item: 1.0)


def test_mixture_calls_each_part_once_and_contains_its_errors() -> None:
    task = parts("broken")
    items = [item for item in task.splits["train"][:9] if is_batch_scored(task, item)]
    assert {item.id[0] for item in items} == {"a", "b"}
    rollouts = [(item, answer_only_trajectory(item, item.gold)) for item in items]
    errors = score_batch_with_timeout(task, rollouts, 60)
    seen_now, seen[:] = list(seen), []
    assert [len(each) for each in seen_now] == [sum(item.id[0] == "b" for item in items)]
    for (item, trajectory), error in zip(rollouts, errors, strict=True):
        if item.id.startswith("b"):
            assert (error, trajectory.rewards) == (None, {"b.correct": 1.0})
        else:
            assert isinstance(error, RamifyError)
            assert "task 'broken'" in str(error)


def test_task_with_mcp_servers_is_scored_as_the_task_itself() -> None:
    pytest.importorskip("mcp")
    wrapped = TaskWithMcpTools(same, "no-such-server")
    assert is_batch_scored(wrapped, ITEMS[0])
    assert score_all(wrapped, ["0", "x"]) == [{"correct": 1.0}, {"correct": 0.0}]
    seen.clear()


def test_the_check_of_a_task_calls_the_reward_with_several_answers() -> None:
    """A reward that returns one number whatever it gets passes any check of one answer."""

    def first(completions: list[str], gold: list[str]) -> list[float]:
        return [float(completions[0] == gold[0])]

    with pytest.raises(ConfigError, match="first' returned 1 rewards for 8 completions"):
        validate(task_with(first))
