"""Supervised fine-tuning on a small known batch."""

from __future__ import annotations

from ramify.train.advantages.sft import SFT
from tests.train.trees import call, group, tree


def test_every_sampled_token_has_weight_one() -> None:
    found = SFT().assign_advantages(
        [group(tree(call("0", 2, 1), call("0.0", 3)), tree(call("0", 4), reward=0))], {}
    )
    assert [{key: s.ce for key, s in each.credits.items()} for each in found.rollouts] == [
        {("0", 0): [1, 1], ("0", 1): [1], ("0.0", 0): [1, 1, 1]}, {("0", 0): [1, 1, 1, 1]},
    ]  # fmt: skip
    assert (found.denominators, found.metrics) == ({"ce": 10}, {"kept": 1, "reward": 0})


def test_min_reward_keeps_only_rollouts_that_reach_it() -> None:
    batch = [group(*(tree(call("0", 2), reward=value) for value in (1, 0, None, 1)))]
    found = SFT(min_reward=1).assign_advantages(batch, {})
    assert [each.trajectory.rewards for each in found.rollouts] == [{"correct": 1}, {"correct": 1}]
    assert (found.denominators, found.metrics) == ({"ce": 4}, {"kept": 0.5, "reward": 2 / 3})
    assert (
        SFT(min_reward=2).assign_advantages(batch, {}).no_signal
        == "none of 4 trajectories qualifies for training, with min_reward=2: the best reward is 1"
    )


def test_min_call_reward_filters_children_by_their_own_reward() -> None:
    batch = [
        group(
            tree(
                call("0", 1),
                call("0.0", 1, reward=1),
                call("0.1", 1, reward=0),
                call("0.2", 1),
                reward=1,
            )
        )
    ]
    learnt = [
        key[0] for key in SFT(min_call_reward=1).assign_advantages(batch, {}).rollouts[0].credits
    ]
    assert learnt == ["0", "0.0", "0.2"]
    assert [
        key[0] for key in SFT(children=False).assign_advantages(batch, {}).rollouts[0].credits
    ] == ["0"]


def test_lm_calls_are_trained_only_with_llm_calls() -> None:
    batch = [group(tree(call("0", 1), call("0.0", 1, kind="lm")))]
    assert [key[0] for key in SFT().assign_advantages(batch, {}).rollouts[0].credits] == ["0"]
    assert [
        key[0] for key in SFT(llm_calls=True).assign_advantages(batch, {}).rollouts[0].credits
    ] == ["0", "0.0"]
