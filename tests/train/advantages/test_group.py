"""GRPO, Dr.GRPO and RLOO on a small known batch, with every stream worked out by hand.

group A (signal)        first   reward 1   0: turns of 2 and 1 tokens   0.0: one turn of 3 tokens
                        second  reward 0   0: one turn of 4 tokens
group B (zero variance) both    reward 1
"""

from __future__ import annotations

from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.train.advantages.base import OptimizerStepAdvantages
from ramify.train.advantages.group_estimators import GRPO, RLOO, DrGRPO
from ramify.train.advantages.token_loss_weights import RolloutTokenDivisor
from ramify.types.trajectory import Group, Stop, Trajectory
from tests.train.trees import call, cut, group, tree

STEEP = 0.5 / (0.5**0.5 + 1e-6)


def known_batch() -> list[Group]:
    first = tree(call("0", 2, 1), call("0.0", 3), reward=1)
    return [
        group(first, tree(call("0", 4), reward=0)),
        group(*(tree(call("0", 5), reward=1) for _ in range(2))),
    ]


def streams(
    assigned: OptimizerStepAdvantages,
) -> list[dict[tuple[str, int], tuple[list[float], list[float]]]]:
    """Return (advantages, rl) per rollout, call and turn."""
    return [
        {key: (s.advantages, s.rl) for key, s in each.credits.items()} for each in assigned.rollouts
    ]


@pytest.mark.parametrize(
    ("algorithm", "up", "down"), [(DrGRPO, 0.5, -0.5), (RLOO, 1.0, -1.0), (GRPO, STEEP, -STEEP)]
)
def test_streams_and_metrics_of_the_known_batch(algorithm: Any, up: float, down: float) -> None:
    found = algorithm(credit="root", reduction="rollout").assign_advantages(known_batch(), {})
    assert streams(found) == [
        {
            ("0", 0): ([up] * 2, [1 / 6] * 2),
            ("0", 1): ([up], [1 / 6]),
            ("0.0", 0): ([up] * 3, [1 / 6] * 3),
        },
        {("0", 0): ([down] * 4, [1 / 4] * 4)},
    ]
    assert found.denominators == {"rl": 2}
    assert found.metrics == {
        "reward": 0.75,
        "groups_with_signal": 1,
        "zero_variance": 0.5,
        "failed_rollouts": 0,
        "calls_per_rollout": 1.25,
        "child_reward": 0,
        "loss_rollout_tokens": 5,
    }
    assert found.no_signal == ""


def test_zero_variance_groups_can_stay_in_the_denominator() -> None:
    found = DrGRPO(drop_zero_variance=False).assign_advantages(known_batch(), {})
    assert (found.denominators, len(found.rollouts)) == ({"rl": 4}, 2)


def test_token_constant_and_per_call_reductions() -> None:
    batch = known_batch()
    token = DrGRPO(credit="root", reduction="token").assign_advantages(batch, {})
    assert (token.denominators, token.rollouts[0].credits["0", 0].rl) == ({"rl": 10}, [1, 1])
    constant = DrGRPO(credit="root", rollout_tokens=20).assign_advantages(batch, {})
    assert (constant.denominators, constant.rollouts[0].credits["0", 0].rl) == (
        {"rl": 2},
        pytest.approx([0.05, 0.05]),
    )
    by_call = DrGRPO(credit="root", reduction="rollout", share="call").assign_advantages(batch, {})
    assert [s.rl[0] for s in by_call.rollouts[0].credits.values()] == pytest.approx(
        [1 / 6, 1 / 6, 1 / 6]
    )


def test_excluded_children_carry_no_weight() -> None:
    found = DrGRPO(credit="root", reduction="rollout", children=False).assign_advantages(
        known_batch(), {}
    )
    assert streams(found)[0] == {("0", 0): ([0.5] * 2, [1 / 3] * 2), ("0", 1): ([0.5], [1 / 3])}


def test_lm_calls_are_trained_only_with_llm_calls() -> None:
    batch = [
        group(tree(call("0", 2), call("0.0", 3, kind="lm"), reward=1), tree(call("0", 4), reward=0))
    ]
    assert list(DrGRPO(credit="root").assign_advantages(batch, {}).rollouts[0].credits) == [
        ("0", 0)
    ]
    assert list(
        DrGRPO(credit="root", llm_calls=True).assign_advantages(batch, {}).rollouts[0].credits
    ) == [
        ("0", 0),
        ("0.0", 0),
    ]


def test_lm_root_is_always_trained() -> None:
    batch = [
        group(tree(call("0", 2, kind="lm"), reward=1), tree(call("0", 4, kind="lm"), reward=0))
    ]
    assert [list(each.credits) for each in DrGRPO().assign_advantages(batch, {}).rollouts] == [
        [("0", 0)],
        [("0", 0)],
    ]


def test_per_role_credits_the_calls_that_earned_the_reward() -> None:
    batch = [
        group(
            tree(call("0", 1), call("0.0", 1, reward=1), call("0.1", 1, reward=0), reward=0),
            tree(call("0", 1), call("0.0", 1, reward=1), call("0.1", 1, reward=1), reward=0),
        )
    ]
    assert (
        DrGRPO(credit="root").assign_advantages(batch, {}).no_signal
        == "in each of 1 groups all rollouts did equally well"
    )
    found = DrGRPO(credit="per_role").assign_advantages(batch, {})
    assert [
        {key[0]: s.advantages for key, s in each.credits.items()} for each in found.rollouts
    ] == [
        {"0.1": [-0.5]},  # relative to the other tree's 1, halved: two trees
        {"0.0": [0.25], "0.1": [0.25]},  # relative to the other tree's 0.5
    ]


def test_rewards_are_weighted_by_name() -> None:
    first, second = tree(call("0", 1), reward=0), tree(call("0", 1), reward=0)
    first.rewards["short"] = 4.0
    found = DrGRPO().assign_advantages([group(first, second)], {"short": 0.5})
    assert [each.credits["0", 0].advantages for each in found.rollouts] == [[1], [-1]]


def test_failed_rollout_is_left_out_of_its_group() -> None:
    batch = [group(tree(call("0", 1), reward=1), tree(reward=None), tree(call("0", 1), reward=0))]
    found = DrGRPO().assign_advantages(batch, {})
    assert [each.credits["0", 0].advantages for each in found.rollouts] == [[0.5], [-0.5]]
    assert found.metrics["failed_rollouts"] == 1


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (
            [group(tree(call("0", 1), reward=1))],
            "no group has two rollouts, so no rollout can be compared with another",
        ),
        ([group(tree(reward=None), tree(reward=None))], "none of 2 rollouts has a reward"),
        (
            [group(tree(call("0"), reward=1), tree(call("0"), reward=0))],
            "all calls with an advantage were masked",
        ),
    ],
)
@pytest.mark.parametrize("algorithm", [DrGRPO, GRPO, RLOO])
def test_step_without_signal_gives_the_reason(algorithm: Any, batch: list[Group], why: str) -> None:
    found = algorithm().assign_advantages(batch, {})
    assert found.rollouts == []
    assert found.no_signal.startswith(why)


def masked(*rollouts: Trajectory, **options: Any) -> list[set[str]]:
    """The calls of each rollout that carry loss with ``overlong=mask``."""
    algorithm = DrGRPO(credit="root", overlong="mask", **options)
    found = algorithm.assign_advantages([group(*rollouts)], {}).rollouts
    return [{key[0] for key in each.credits} for each in found]


def test_cut_replies_are_masked_with_overlong_mask() -> None:
    wrong = tree(call("0", 4), reward=0)
    batch = [group(tree(call("0", 2), cut("0.0", 3), reward=1), wrong)]
    assert [
        key[0] for key in DrGRPO(credit="root").assign_advantages(batch, {}).rollouts[0].credits
    ] == ["0", "0.0"]
    found = DrGRPO(credit="root", overlong="mask", reduction="rollout")
    credits = found.assign_advantages(batch, {}).rollouts[0].credits
    assert {key[0]: s.rl for key, s in credits.items()} == {"0": [0.5, 0.5]}
    root_is_cut = tree(cut("0", 2, stop=Stop.NO_CODE), call("0.0", 3), reward=1)
    assert masked(root_is_cut, wrong) == [{"0"}]


@pytest.mark.parametrize(
    "stop", [Stop.MAX_TURNS, Stop.MAX_CALLS, Stop.MAX_TOKENS, Stop.MAX_COST, Stop.DEADLINE]
)
def test_used_up_limits_are_not_masked(stop: Stop) -> None:
    """One right rollout, six that a limit ended (the last reply of three was cut, too) and a wrong
    one: all eight teach."""
    ended = [tree(call("0", 2, stop=stop), call("0.0", 3), reward=0) for _ in range(3)]
    ended += [tree(cut("0", 2, stop=stop), reward=0) for _ in range(3)]
    found = masked(tree(call("0", 2), reward=1), *ended, tree(call("0", 4), reward=0))
    assert found == [{"0"}, *[{"0", "0.0"}] * 3, *[{"0"}] * 4]


def test_overlong_and_length_penalties_lower_the_reward() -> None:
    batch = [group(tree(call("0", 10), reward=1), tree(call("0", 6), reward=1))]
    soft = DrGRPO(max_rollout_tokens=10, overlong_buffer=4).assign_advantages(
        batch, {}
    )  # rewards 0 and 1
    assert [each.credits["0", 0].advantages[0] for each in soft.rollouts] == [-0.5, 0.5]
    brief = DrGRPO(length_weight=0.5).assign_advantages(
        batch, {}
    )  # 1 - (0.5 + 0.1 + 0.1) and 1 - (0.3 + 0.1 + 0.1)
    assert [each.credits["0", 0].advantages[0] for each in brief.rollouts] == pytest.approx(
        [-0.1, 0.1]
    )


def test_every_token_keeps_calls_with_zero_advantage() -> None:
    """A child whose return equals that of the other tree's child has advantage 0 but keeps its
    weight."""
    batch = [
        group(
            tree(call("0", 1), call("0.0", 2, reward=0), reward=1),
            tree(call("0", 1), call("0.0", 2, reward=1), reward=0),
        )
    ]
    found = DrGRPO(credit="per_role").assign_advantages(batch, {}, every_token=True)
    assert found.rollouts[0].credits["0.0", 0].advantages == [0, 0]
    assert ("0.0", 0) not in DrGRPO().assign_advantages(batch, {}).rollouts[0].credits


def test_constant_reduction_divides_by_mean_tokens_of_earlier_steps() -> None:
    """The mean number of trained tokens per rollout of the steps before, not that of this step."""
    history = {"rollout_tokens": 8.0, "rollout_tokens_steps": 1.0}
    again = DrGRPO(credit="root", drop_zero_variance=False, memory=history)
    second = again.assign_advantages(known_batch(), {}, every_token=True)
    assert second.rollouts[0].credits["0", 0].rl == pytest.approx([1 / 8] * 2)
    # (8 + (6 + 4 + 5 + 5) / 4) / 2
    assert second.memory == {"rollout_tokens": 6.5, "rollout_tokens_steps": 2}


@pytest.mark.parametrize(
    "memory",
    [{}, {"rollout_tokens": 1000.0, "rollout_tokens_steps": 0.0}],
    ids=["new", "of an earlier version that had learnt nothing yet"],
)
def test_first_step_divides_by_its_own_mean_tokens(memory: dict[str, float]) -> None:
    """Trees of 6 and 4 tokens, and the same trees 100 times as long: the same loss."""
    for times in (1, 100):
        first = tree(call("0", 2 * times, times), call("0.0", 3 * times), reward=1)
        batch = [group(first, tree(call("0", 4 * times), reward=0))]
        step = DrGRPO(credit="root", memory=memory).assign_advantages(batch, {})
        assert step.rollouts[0].credits["0", 0].rl == pytest.approx([0.2 / times] * 2 * times)
        assert step.memory == {"rollout_tokens": 5 * times, "rollout_tokens_steps": 1}
    equal = [group(tree(call("0", 4), reward=1), tree(call("0", 4), reward=1))]
    nothing = DrGRPO(memory=memory).assign_advantages(equal, {})
    assert (nothing.rollouts, nothing.memory["rollout_tokens_steps"]) == ([], 0)


def test_fixed_rollout_tokens_divide_every_step() -> None:
    first = DrGRPO(credit="root").assign_advantages(known_batch(), {})
    fixed = DrGRPO(credit="root", rollout_tokens=20, memory=first.memory)
    assert fixed.assign_advantages(known_batch(), {}).rollouts[0].credits[
        "0", 0
    ].rl == pytest.approx([0.05] * 2)


def test_mean_tokens_is_a_slow_moving_average() -> None:
    """Starts as the plain mean (of 100 and 300); later steps weigh a tenth."""
    mean = RolloutTokenDivisor()
    for tokens in (100, 300):
        mean = mean.updated_with_step([[{"0": tokens}, {"0": 0}]])
    assert mean == RolloutTokenDivisor(200, 2)
    assert RolloutTokenDivisor(200, 50).updated_with_step([[{"0": 300}]]) == RolloutTokenDivisor(
        210, 51
    )
    assert RolloutTokenDivisor(200, 50).updated_with_step([[{"0": 0}]]) == RolloutTokenDivisor(
        200, 50
    )


@pytest.mark.parametrize(
    "options", [{"credit": "rout"}, {"rollout_tokens": 0}, {"gamma_tree": -1.0}]
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DrGRPO(**options)
