"""Metrics over everything that a step sampled, in steps with and without signal."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.config import RlSpec, TaskSpec
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.metrics import read_metrics
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.sampling_metrics import (
    advantage_metrics,
    advantage_reward_correlation,
    entropy_and_control_metrics,
    kl,
    num_sampled_tokens,
    rollout_sampling_metrics,
    select_probe_sequences,
    store_logprob_gaps,
    within_group_correlation,
)
from ramify.types.trajectory import Group, Stop
from tests.shown import train
from tests.train import trees
from tests.train.small import small

EVERY_STEP = {
    "entropy", "mismatch", "mismatch_max", "mismatch_kl", "post_kl", "lr", "grad_norm", "masked",
    "length_mean", "length_min", "length_max", "reward", "reward_std", "reward_min", "reward_max",
    "reward_error",
    "advantage_mean", "advantage_std", "advantage_min", "advantage_max", "truncated_rollouts",
}  # fmt: skip


def two_groups() -> list[Group]:
    """Two right and one wrong attempt; two attempts that failed alike, one of them cut."""
    groups = [
        Group(
            "a",
            [
                trees.tree(trees.call("0", 4), reward=1.0),
                trees.tree(trees.call("0", 2, 2), reward=1.0),
                trees.tree(trees.call("0", 8), reward=0.0),
            ],
        ),
        Group(
            "b",
            [
                trees.tree(trees.call("0", 2), reward=0.0),
                trees.tree(trees.call("0", 6, stop=Stop.MAX_TURNS), reward=0.0),
            ],
        ),
    ]
    for index, tree in enumerate(each for group in groups for each in group.trajectories):
        tree.id = f"rollout {index}"
    return groups


def test_rollout_metrics_cover_groups_without_signal() -> None:
    found = rollout_sampling_metrics(two_groups(), {})
    assert (found["length_min"], found["length_max"], found["length_finished"]) == (2, 8, 4.5)
    assert (found["reward_min"], found["reward_max"]) == (0, 1)
    assert found["reward_std"] == pytest.approx(math.sqrt(0.24))
    # The mean is 0.4; the groups' sums differ from three and two times that by 0.8 and -0.8.
    assert found["reward_error"] == pytest.approx(math.sqrt(2 * (0.8**2 + 0.8**2)) / 5)
    assert (found["solve_all"], found["solve_none"]) == (0, 0.5)
    assert (found["truncated_rollouts"], found["failed_share"]) == (0.2, 0)
    assert found["reward_length_corr"] < -0.7


def test_advantage_metrics_count_tokens_without_credit_as_zero() -> None:
    groups = two_groups()
    assigned = DrGRPO().assign_advantages(groups, {})
    rows = token_sequences(assigned.rollouts)
    found = advantage_metrics(rows, num_sampled_tokens(groups))
    assert num_sampled_tokens(groups) == 24
    assert found["masked"] == pytest.approx(8 / 24)
    assert (found["advantage_min"], found["advantage_max"]) == pytest.approx((-2 / 3, 1 / 3))
    values = np.array([1 / 3] * 8 + [-2 / 3] * 8 + [0.0] * 8)
    assert found["advantage_mean"] == pytest.approx(values.mean())
    assert found["advantage_std"] == pytest.approx(values.std())
    assert advantage_reward_correlation(groups, assigned.rollouts, {})[
        "advantage_reward_corr"
    ] == pytest.approx(1)
    for rollout in assigned.rollouts:
        for credit in rollout.credits.values():
            credit.advantages = [-value for value in credit.advantages]
    assert advantage_reward_correlation(groups, assigned.rollouts, {})[
        "advantage_reward_corr"
    ] == pytest.approx(-1)


def test_entropy_is_over_all_sampled_tokens_but_those_of_judges() -> None:
    groups = two_groups()
    tree = groups[0].trajectories[0]
    judge, _ = trees.call("0.0", 50, kind="judge")
    sure = msgspec.structs.replace(judge.turns[0].reply, logprobs=(0.0,) * 50)
    judge.turns[0] = msgspec.structs.replace(judge.turns[0], reply=sure)
    tree.calls.append(judge)
    assert entropy_and_control_metrics(groups) == {"entropy": 0.5, "control_tokens": 0}
    assert (
        entropy_and_control_metrics(groups, [11, 99])["control_tokens"] == 1
    )  # each reply has tokens 10, 11, …
    assert entropy_and_control_metrics([]) == {}


def test_correlation_is_within_groups() -> None:
    """Between groups both rise together; within each one falls."""
    assert within_group_correlation([[(0.0, 1.0), (1.0, 0.0)], [(10.0, 11.0), (11.0, 10.0)]]) == -1
    assert within_group_correlation([[(1.0, 1.0), (1.0, 2.0)]]) is None
    assert within_group_correlation([]) is None


def test_kl_estimate_is_that_of_two_distributions() -> None:
    rng = np.random.default_rng(7)
    first, second = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    drawn = rng.choice(3, 200_000, p=first)
    exact = float((first * np.log(first / second)).sum())
    logs = np.log(first)[drawn].astype(np.float32), np.log(second)[drawn].astype(np.float32)
    assert kl(*logs) == pytest.approx(exact, rel=0.03)
    assert kl(logs[0], logs[0]) == 0


def test_sample_is_a_small_share_and_does_not_depend_on_the_order() -> None:
    groups = [
        Group(f"{index}", [trees.tree(trees.call("0", 20), reward=1.0) for _ in range(16)])
        for index in range(16)
    ]
    for index, tree in enumerate(each for group in groups for each in group.trajectories):
        tree.id = f"rollout {index}"
    rows = select_probe_sequences(groups, 1.0, 3)
    assert len(rows) == 4
    assert all((row.rl == row.mask).all() for row in rows)
    assert {row.name for row in rows} == {
        row.name for row in select_probe_sequences(groups[::-1], 1.0, 3)
    }
    assert {row.name for row in rows} != {
        row.name for row in select_probe_sequences(groups, 1.0, 4)
    }


def test_sample_of_short_replies_has_enough_tokens_for_a_mean() -> None:
    def step(num: int) -> list[Group]:
        rollouts = [trees.tree(trees.call("0", 2), reward=1.0) for _ in range(num)]
        for index, tree in enumerate(rollouts):
            tree.id = f"rollout {index}"
        return [Group("short", rollouts)]

    for num, probed in ((64, 32), (4, 8)):  # a small step is probed as a whole
        rows = select_probe_sequences(step(num), 1.0, 3)
        assert sum(row.rl.sum() for row in rows) == probed


def test_gap_of_each_scored_token_is_noted_in_its_rollout() -> None:
    tree = trees.tree(trees.call("0", 2, 3), reward=1.0)
    tree.id = "step=1/group=0"
    groups = [Group("a", [tree])]
    (row,) = select_probe_sequences(groups, 1.0, 1)
    store_logprob_gaps(groups, [row])
    assert "logprob_gaps" not in tree.metadata  # not scored
    row.streams["old_logprobs"] = row.sampler_logprobs + np.where(row.mask, 0.25, 0.0)
    store_logprob_gaps(groups, [row])
    assert tree.metadata["logprob_gaps"] == {"0/0": [0.25, 0.25], "0/1": [0.25] * 3}
    row.rl[row.mask.nonzero()[0][0]] = 0.0  # a token without loss has no entry, so no value
    tree.metadata.clear()
    store_logprob_gaps(groups, [row])
    assert tree.metadata["logprob_gaps"] == {"0/1": [0.25] * 3}


@pytest.mark.parametrize("task", ["zero_variance", "even"])
def test_each_step_has_every_metric_with_and_without_signal(tmp_path: Path, task: str) -> None:
    run = small(
        task=TaskSpec(name=f"tests.train.small:{task}"),
        warmup=None,
        rl=RlSpec(
            steps=2,
            sample=RolloutBatchSpec(items=2),
            rollout=RolloutOptions(group=3, concurrency=1),
        ),
    )
    train(run, tmp_path)
    steps = [row.values for row in read_metrics(tmp_path) if row.stage == "rl"]
    learning = [values for values in steps if "learn_s" in values]
    assert len(learning) == 2
    for values in learning:
        assert values.keys() >= EVERY_STEP
        assert values["entropy"] > 1
        assert 0 <= values["mismatch_kl"] < 1e-6
        has_signal = task == "even"
        assert (values.get("no_signal"), values["grad_norm"] > 0, values["post_kl"] > 0) == (
            None if has_signal else 1.0,
            has_signal,
            has_signal,
        )
        assert values["lr"] > 0
        assert values["masked"] == (pytest.approx(0, abs=0.7) if has_signal else 1)
