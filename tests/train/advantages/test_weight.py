"""Loss weights and length penalties, worked out by hand."""

from __future__ import annotations

import pytest

from ramify.train.advantages.advantage_pipeline import has_signal
from ramify.train.advantages.credit_assignment import (
    GroupLengthMaxima,
    RolloutTokenCounts,
    soft_overlong,
    subtract_length_penalty,
)
from ramify.train.advantages.token_loss_weights import Reduction, Share, weights
from ramify.train.rollouts.group_queue import num_replacement_groups

ONE_GROUP = [[{"0": 4}, {"0": 4, "0.0": 4, "0.1": 4}]]


@pytest.mark.parametrize(
    ("reduction", "first", "second", "denominator"),
    [
        ("rollout", 1 / 4, 1 / 12, 2),
        ("call", 1 / 4, 1 / 4, 4),
        ("token", 1.0, 1.0, 16),
        ("constant", 1 / 100, 1 / 100, 2),
        ("group", 1 / 8, 1 / 24, 1),
        ("prompt", 1 / 16, 1 / 16, 1),
        ("sum", 1.0, 1.0, 1),
        ("seq_mean_token_mean", 1 / 4, 1 / 12, 2),
        ("token_mean", 1.0, 1.0, 16),
        ("seq_mean_token_sum_norm", 1 / 100, 1 / 100, 2),
        ("prompt_mean", 1 / 16, 1 / 16, 1),
        ("token_sum", 1.0, 1.0, 1),
    ],
)
def test_token_weights_and_denominator_per_reduction(
    reduction: Reduction, first: float, second: float, denominator: int
) -> None:
    found, divided_by = weights(ONE_GROUP, reduction, rollout_tokens=100)
    assert found == [[{"0": first}, dict.fromkeys(("0", "0.0", "0.1"), pytest.approx(second))]]
    assert divided_by == denominator


@pytest.mark.parametrize("share", ["token", "call"])
def test_rollout_weight_does_not_depend_on_number_of_calls(share: Share) -> None:
    groups = [[{"0": 3, "0.0": 5, "0.1": 0}, {"0": 40}, {"0": 0}], [{"0": 1, "0.0": 9}]]
    found, divided_by = weights(groups, "rollout", share)
    masses = [
        sum(weight[id] * count for id, count in counts.items())
        for group, weighed in zip(groups, found, strict=True)
        for counts, weight in zip(group, weighed, strict=True)
    ]
    assert masses == pytest.approx([1, 1, 0, 1])
    assert divided_by == 3


@pytest.mark.parametrize("share", ["token", "call"])
def test_call_reduction_gives_each_call_one_vote(share: Share) -> None:
    groups = [[{"0": 3, "0.0": 5, "0.1": 0}, {"0": 40}, {"0": 0}], [{"0": 1, "0.0": 9}]]
    found, divided_by = weights(groups, "call", share)
    votes = [
        weight[id] * num
        for group, weighed in zip(groups, found, strict=True)
        for counts, weight in zip(group, weighed, strict=True)
        for id, num in counts.items()
        if num
    ]
    assert votes == pytest.approx([1.0] * 5)
    assert divided_by == 5


def test_prompt_mean_weighs_every_prompt_equally() -> None:
    """Two groups, of 4 + 12 tokens and of 2: the mean over prompts of each prompt's mean over its
    tokens."""
    found, divided_by = weights([*ONE_GROUP, [{"0": 2}, {"0": 0}]], "prompt_mean")
    assert found[0] == [[{"0": 1 / 16}, dict.fromkeys(("0", "0.0", "0.1"), 1 / 16)]][0]
    assert (found[1], divided_by) == ([{"0": 1 / 2}, {"0": 0}], 2)


def test_share_by_call_and_by_token() -> None:
    assert weights([[{"0": 2, "0.0": 8}]], "rollout", "call")[0] == [[{"0": 0.25, "0.0": 0.0625}]]
    assert weights([[{"0": 2, "0.0": 8}]], "rollout", "token")[0] == [[{"0": 0.1, "0.0": 0.1}]]


def test_soft_overlong_penalty_grows_linearly_in_the_buffer() -> None:
    assert [soft_overlong(n, 100, 20) for n in (0, 80, 90, 100, 150)] == [0, 0, -0.5, -1, -1]
    assert [soft_overlong(n, 100, 0) for n in (100, 101)] == [0, -1]


def test_length_penalty_scales_with_the_mean_reward() -> None:
    # mean 0.5; first: 0.5·10/100 + 0.1·50/100 + 0.1·1/10 = 0.11;  second: 0.25 + 0.1 + 0.1 = 0.45
    lengths, most = (
        [RolloutTokenCounts(10, 50, 1), RolloutTokenCounts(50, 100, 10)],
        GroupLengthMaxima(100, 100, 10),
    )
    assert subtract_length_penalty([1, 0], lengths, most, 0.5) == pytest.approx([1 - 0.055, -0.225])
    assert subtract_length_penalty([0, 0], lengths, most, 0.5) == [0, 0]


def test_length_penalty_never_rewards_length() -> None:
    """Rewards may be negative, as `outcome` gives them: if their mean is not above 0 they stay as
    they are; with mean 0.25 the longer rollout loses 0.25 · 0.45."""
    lengths, most = (
        [RolloutTokenCounts(10, 50, 1), RolloutTokenCounts(50, 100, 10)],
        GroupLengthMaxima(100, 100, 10),
    )
    for rewards in ([-1.1, -1.1], [-1.1, 1.0], [-0.6, 0.6]):
        assert subtract_length_penalty(rewards, lengths, most, 0.5) == rewards
    assert subtract_length_penalty([1.0, -0.5], lengths, most, 0.5) == pytest.approx(
        [1 - 0.25 * 0.11, -0.5 - 0.25 * 0.45]
    )


def test_has_signal_needs_a_nonzero_advantage() -> None:
    assert has_signal([{"0": 0, "0.0": 0.5}])
    assert not has_signal([{"0": 0.0, "0.0": 1e-12}, {}])
    assert not has_signal([])


def test_num_more_groups_to_request() -> None:
    assert [
        num_replacement_groups(8, 8, 8, 32),
        num_replacement_groups(8, 2, 8, 32),
        num_replacement_groups(8, 6, 8, 32),
    ] == [0, 24, 3]
    assert [
        num_replacement_groups(8, 0, 8, 32),
        num_replacement_groups(8, 1, 30, 32),
        num_replacement_groups(8, 0, 32, 32),
    ] == [8, 2, 0]
