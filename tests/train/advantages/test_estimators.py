"""Every advantage estimator on one small batch, with all numbers worked out by hand.

item  rollout  reward             call 0           call 0.0 (own reward 0)
a     first    correct 1          turns of 2, 1    3 tokens
      second   correct 0          1 turn of 4
b     first    correct 1          1 turn of 5
      second   correct 1          1 turn of 5
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from ramify.errors import ConfigError, TrainError
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.base import (
    OptimizerStepAdvantages,
    finish_advantages,
    needs_of,
    with_saved_state,
)
from ramify.train.advantages.gdpo import GDPO
from ramify.train.advantages.group_estimators import (
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    Hierarchical,
    MaxRL,
    PassAtKEstimator,
    ReinforcePPBaseline,
)
from ramify.train.advantages.ppo import PPO
from ramify.train.advantages.rae import RAE
from ramify.train.advantages.reinforce_pp import ReinforcePP
from ramify.train.advantages.remax import ReMax
from ramify.train.data.rollout_sequences import token_sequences
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group, Trajectory
from tests.train.trees import call, cut, group, tree


def with_id(id: str, trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(trajectory, id=id)


def batch() -> list[Group]:
    a = group(
        with_id("a0", tree(call("0", 2, 1), call("0.0", 3, reward=0), reward=1)),
        with_id("a1", tree(call("0", 4), reward=0)),
    )
    b = group(*(with_id(f"b{index}", tree(call("0", 5), reward=1)) for index in range(2)))
    b.task = "b"
    return [a, b]


def roots(*rewards: float) -> list[Group]:
    """Return one group of single calls of one token each."""
    return [
        group(
            *(
                with_id(f"{index}", tree(call("0", 1), reward=reward))
                for index, reward in enumerate(rewards)
            )
        )
    ]


def advantages(assigned: OptimizerStepAdvantages) -> dict[str, list[float]]:
    """Rollout/call -> advantages of its tokens."""
    found: dict[str, list[float]] = {}
    for rollout in assigned.rollouts:
        for (id, _), credit in rollout.credits.items():
            found.setdefault(f"{rollout.trajectory.id}/{id}", []).extend(credit.advantages)
    return found


def whitened(*values: float) -> list[float]:
    centre = sum(values) / len(values)
    std = math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1) + 1e-8)
    return [(value - centre) / std for value in values]


HALF_STD = 0.5 / (math.sqrt(0.5) + 1e-6)  # normalised advantage for returns 1, 0


def test_grpo_and_dr_grpo_on_a_worked_example() -> None:
    """A right answer, and wrong ones with 0, 4 and 12 tool calls: rewards 1, -1.1, -0.9, -0.6
    with mean -0.4."""
    rewards = [1, -1.1, -0.9, -0.6]
    assert GRPO().compare(rewards) == pytest.approx(
        [1.464917, -0.732458, -0.523185, -0.209274], abs=2e-6
    )
    assert DrGRPO().compare(rewards) == pytest.approx([1.4, -0.7, -0.5, -0.2])
    assert GRPO().compare([0.3] * 4) == [0] * 4


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        (DrGRPO(), [0.75, -0.25, -0.25, -0.25]),
        (GRPO(), [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
        (RLOO(), [1, -1 / 3, -1 / 3, -1 / 3]),
        (MaxRL(), [3 / (1 + 4e-6), *[-1 / (1 + 4e-6)] * 3]),
        (PassAtKEstimator(), [1 / (0.5 + 1e-6), 0, 0, 0]),
        (OPO(), [0.75, -0.25, -0.25, -0.25]),
        (Hierarchical(), [0.75, -0.25, -0.25, -0.25]),
        (ReinforcePPBaseline(), whitened(0.75, -0.25, -0.25, -0.25)),
        (ReinforcePP(), whitened(1, 0, 0, 0)),
        (RAE(memory={"rlm@0": 0.4}), [0.6, -0.4, -0.4, -0.4]),
        (GDPO(), [1.5 * (1 - 1e-6), *[-0.5 * (1 - 1e-6)] * 3]),
        (GDPO(over="tokens"), whitened(1.5, -0.5, -0.5, -0.5)),
        (GDPO(normalise=False), [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_advantages_of_one_success_in_four(algorithm: Any, wanted: list[float]) -> None:
    found = [
        values[0]
        for values in advantages(
            algorithm.assign_advantages(roots(1, 0, 0, 0), {}, every_token=True)
        ).values()
    ]
    assert found == pytest.approx(wanted, abs=1e-6)


WHOLE = [1] * 6 + [0] * 4 + [1] * 10  # return per token; the child's is its own 0 + the root's 1


@pytest.mark.parametrize(
    ("algorithm", "a", "b"),
    [
        (DrGRPO(credit="root"), [0.5] * 6 + [-0.5] * 4, None),
        (GRPO(credit="root"), [HALF_STD] * 6 + [-HALF_STD] * 4, None),
        (RLOO(credit="root"), [1] * 6 + [-1] * 4, None),
        (MaxRL(credit="root"), [0.5 / (0.5 + 1e-6)] * 6 + [-0.5 / (0.5 + 1e-6)] * 4, None),
        (PassAtKEstimator(credit="root"), [2 * HALF_STD] * 6, None),
        (OPO(credit="root"), [0.4] * 6 + [-0.6] * 4, None),  # the mean by length is 6/10
        (
            OPO(credit="per_role"),
            [1 - 3 / 7] * 6 + [-3 / 7] * 4,
            None,
        ),  # roots of 3 and 4 tokens; the child gets its parent's advantage
        (
            Hierarchical(),
            [0.5] * 6 + [-0.5] * 4,
            None,
        ),  # only a0 has a child call; it gets its parent's advantage
        (
            ReinforcePPBaseline(credit="root"),
            whitened(*[0.5] * 6 + [-0.5] * 4 + [0] * 10)[:10],
            [0.0] * 10,
        ),
        (ReinforcePP(), whitened(*WHOLE)[:10], whitened(*WHOLE)[10:]),
        (
            RAE(memory={"rlm@0": 0.5, "rlm@1": 0.25}),
            [0.5] * 3 + [0.75] * 3 + [-0.5] * 4,
            [0.5] * 10,
        ),
        (
            RAE(),
            [1] * 6,
            [1] * 10,
        ),  # no baseline yet: advantages are returns, and a return of 0 has no gradient
        (GDPO(credit="root", normalise=False), [HALF_STD] * 6 + [-HALF_STD] * 4, None),
        (PPO(), [0] * 10, [0] * 10),  # 0 until the critic's values are in
    ],
    ids=lambda each: type(each).__name__,
)
def test_advantages_of_the_known_batch(
    algorithm: Any, a: list[float], b: list[float] | None
) -> None:
    found = advantages(algorithm.assign_advantages(batch(), {}))
    of_a = [value for name, values in found.items() if name[0] == "a" for value in values]
    of_b = [value for name, values in found.items() if name[0] == "b" for value in values]
    if isinstance(
        algorithm, ReinforcePPBaseline
    ):  # zero-variance groups are kept; the mean is 0.05
        b = whitened(*[0.5] * 6 + [-0.5] * 4 + [0] * 10)[10:]
    assert of_a == pytest.approx(a, abs=1e-6)
    assert of_b == pytest.approx(b or [], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("sft", "remax")])
def test_order_of_groups_and_rollouts_does_not_matter(name: str) -> None:
    algorithm = ALGORITHMS.resolve(name)()
    there, back = batch(), batch()[::-1]
    for each in back:
        each.trajectories.reverse()
    found, again = algorithm.assign_advantages(there, {}), algorithm.assign_advantages(back, {})
    assert advantages(again) == {
        key: pytest.approx(values, abs=1e-12) for key, values in advantages(found).items()
    }
    assert (again.denominators, again.memory) == (found.denominators, found.memory)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k", "opo", "gdpo", "hierarchical"]
)
def test_single_rollout_or_equal_rewards_give_no_signal(name: str) -> None:
    """Two public frameworks give a single rollout its raw reward instead."""
    for rewards in ((1.0,), (0.3, 0.3, 0.3)):
        found = ALGORITHMS.resolve(name)().assign_advantages(roots(*rewards), {}, every_token=True)
        assert [value for values in advantages(found).values() for value in values] == []
        assert found.no_signal


def test_maxrl_pass_at_k_and_opo_baselines() -> None:
    assert MaxRL().compare([3, 1, 1, 3]) == pytest.approx([0.5, -0.5, -0.5, 0.5], abs=1e-6)
    assert MaxRL().compare([-1, -3]) == [0, 0]
    assert PassAtKEstimator().compare([3, 1, 0, 0]) == pytest.approx(
        [2 / (math.sqrt(2) + 1e-6), 0, 0, 0]
    )
    assert PassAtKEstimator().compare([3, 3, 0]) == [0, 0, 0]
    assert OPO().compare([1, 0], [1, 3]) == [0.75, -0.25]
    assert OPO().compare([1, 0]) == [0.5, -0.5]
    for each in (MaxRL().compare, PassAtKEstimator().compare, OPO().compare):
        assert (each([7]), each([]), each([0.1, 0.1])) == ([0], [], [0, 0])


def test_gdpo_normalises_each_reward_separately() -> None:
    """correct 1, 0 and short 0, 0.1 with weight 0.5: 0.7071 - 0.3536 for the first rollout,
    although short is ten times smaller."""
    groups = roots(1, 0)
    groups[0].trajectories[0].rewards["short"], groups[0].trajectories[1].rewards["short"] = (
        0.0,
        0.1,
    )
    found = advantages(GDPO(normalise=False).assign_advantages(groups, {"short": 0.5}))
    small = 0.05 / (0.1 * math.sqrt(0.5) + 1e-6)
    assert found == {
        "0/0": pytest.approx([HALF_STD - 0.5 * small]),
        "1/0": pytest.approx([-HALF_STD + 0.5 * small]),
    }
    with pytest.raises(ConfigError, match="have the task score length as one of its"):
        GDPO(length_weight=0.1)


def test_rae_keeps_moving_average_of_returns_per_role() -> None:
    """In this batch the roots' mean return is 0.75 and the child's return is 1."""
    first = RAE(decay=0.9).assign_advantages(batch(), {})
    tokens = {"rollout_tokens": 5.0, "rollout_tokens_steps": 1.0}
    assert first.memory == pytest.approx({"rlm@0": 0.075, "rlm@1": 0.1, **tokens})
    again = with_saved_state(RAE(decay=0.9), first.memory).assign_advantages(batch(), {})
    assert advantages(again)["a0/0"] == pytest.approx([0.925] * 3)
    assert advantages(again)["a1/0"] == pytest.approx([-0.075] * 4)
    assert again.memory == pytest.approx(
        {
            "rlm@0": 0.9 * 0.075 + 0.075,
            "rlm@1": 0.9 * 0.1 + 0.1,
            **tokens,
            "rollout_tokens_steps": 2.0,
        }
    )


def test_remax_uses_greedy_rollout_as_baseline() -> None:
    groups = roots(1, 0)
    groups[0].greedy = tree(call("0", 2), reward=0.25)
    assert advantages(ReMax().assign_advantages(groups, {})) == {"0/0": [0.75], "1/0": [-0.25]}
    assert needs_of(ReMax()).greedy
    groups[0].greedy = msgspec.structs.replace(tree(call("0", 1)), errors=["the session died"])
    failed = ReMax().assign_advantages(groups, {})
    assert (failed.rollouts, len(failed.notes)) == ([], 1)
    assert failed.notes[0].endswith("its greedy rollout has no reward: the session died")


def rows_of(algorithm: Any, groups: list[Group], **streams: Any) -> list[TokenSequence]:
    rows = token_sequences(algorithm.assign_advantages(groups, {}).rollouts)
    for row in rows:
        for name, value in streams.items():
            row.streams[name] = np.where(row.rl != 0, value, 0).astype(np.float32)
    return rows


def trained_values(row: TokenSequence, name: str) -> list[float]:
    column = row.advantages if name == "advantages" else row.streams[name]
    values: list[float] = column[row.rl != 0].tolist()
    return values


def test_gae_skips_observation_tokens() -> None:
    """A call of turns of 2 and 1 tokens with an observation between them and return 1; V = 0.2,
    0.5, 0.6, γ = 0.9, λ = 0.5: δ = 0.9·0.5 - 0.2, 0.9·0.6 - 0.5, 1 - 0.6; Â_3 = 0.4, Â_2 = 0.04 +
    0.45·0.4, Â_1 = 0.25 + 0.45·Â_2."""
    algorithm = PPO(gamma=0.9, lam=0.5, normalise=False)
    (row,) = rows_of(algorithm, [group(tree(call("0", 2, 1), reward=1))])
    assert trained_values(row, "rewards") == [0, 0, 1]
    row.streams["values"] = np.zeros(len(row), np.float32)
    row.streams["values"][row.rl != 0] = [0.2, 0.5, 0.6]
    measured = finish_advantages(algorithm, [row])
    third, second = 0.4, 0.04 + 0.45 * 0.4
    first = 0.25 + 0.45 * second
    assert trained_values(row, "advantages") == pytest.approx([first, second, third], abs=1e-6)
    assert trained_values(row, "returns") == pytest.approx(
        [first + 0.2, second + 0.5, third + 0.6], abs=1e-6
    )
    assert row.advantages[row.rl == 0].tolist() == [0] * int((row.rl == 0).sum())
    returns = np.array([first + 0.2, second + 0.5, 1.0])
    assert measured["explained_variance"] == pytest.approx(
        1 - np.var([first, second, third]) / np.var(returns), abs=1e-5
    )


def test_ppo_over_turns_gives_all_tokens_of_a_turn_the_same_advantage() -> None:
    """Turns of 2 and 1 tokens with return 1, V = 0.2 and 0.6 at their first tokens, λ = 0.5:
    δ = 0.4, 0.4, Â = 0.6, 0.4, returns 0.8, 1. The value inside the first turn does not matter."""
    algorithm = PPO(lam=0.5, normalise=False, unit="turn")
    (row,) = rows_of(algorithm, [group(tree(call("0", 2, 1), reward=1))])
    row.streams["values"] = np.zeros(len(row), np.float32)
    row.streams["values"][row.rl != 0] = [0.2, 0.9, 0.6]
    finish_advantages(algorithm, [row])
    assert trained_values(row, "advantages") == pytest.approx([0.6, 0.6, 0.4], abs=1e-6)
    assert trained_values(row, "returns") == pytest.approx([0.8, 0.8, 1.0], abs=1e-6)


def test_ppo_normalises_over_the_step_and_gives_children_their_own_returns() -> None:
    algorithm = PPO()
    rows = rows_of(algorithm, batch(), values=0.0)
    assert {row.name: trained_values(row, "rewards")[-1] for row in rows} == {
        "a0/call=0": 1,
        "a0/call=0.0": 1,
        "a1/call=0": 0,
        "b0/call=0": 1,
        "b1/call=0": 1,
    }
    finish_advantages(algorithm, rows)
    found = [value for row in rows for value in trained_values(row, "advantages")]
    assert found == pytest.approx(whitened(*WHOLE), abs=1e-6)
    assert [value for row in rows for value in trained_values(row, "returns")] == pytest.approx(
        WHOLE
    )


def test_call_split_into_two_rows_gets_the_same_advantages() -> None:
    """Splitting a call into two rows changes nothing: KL, γ and λ still reach from the second
    part into the first."""
    for algorithm in (
        PPO(lam=0.5, kl_reward=0.1),
        ReinforcePP(gamma=0.9, kl_reward=0.1),
        DrGRPO(kl_reward=0.1),
    ):
        options = {"values": 0.3, "old_logprobs": -1.0, "ref_logprobs": -1.5}
        whole = rows_of(algorithm, batch(), **options)
        parts = []
        for row in rows_of(algorithm, batch(), **options):
            (first,) = np.flatnonzero(row.rl)[:1]
            for keeps in (np.arange(len(row)) <= first, np.arange(len(row)) > first):
                streams = {name: each.copy() for name, each in row.streams.items()}
                copy = {
                    "rl": row.rl * keeps,
                    "advantages": row.advantages.copy(),
                    "streams": streams,
                }
                parts.append(msgspec.structs.replace(row, **copy))
        finish_advantages(algorithm, whole)
        finish_advantages(algorithm, parts)
        assert [
            value for row in parts for value in trained_values(row, "advantages")
        ] == pytest.approx(
            [value for row in whole for value in trained_values(row, "advantages")], abs=1e-6
        )


def test_reward_kl_is_charged_to_each_token_and_the_tokens_before_it() -> None:
    """old - ref = 0.5 at each of 3 tokens, β = 0.1: -0.15, -0.1, -0.05 on top of the rollout's
    advantage."""
    algorithm = DrGRPO(kl_reward=0.1)
    assert needs_of(algorithm).streams == {"old_logprobs", "ref_logprobs"}
    groups = [group(*(with_id(f"{r}", tree(call("0", 2, 1), reward=r)) for r in (1, 0)))]
    rows = rows_of(algorithm, groups, old_logprobs=-1.0, ref_logprobs=-1.5)
    measured = finish_advantages(algorithm, rows)
    assert trained_values(rows[0], "advantages") == pytest.approx(
        [0.5 - 0.15, 0.5 - 0.1, 0.5 - 0.05]
    )
    assert trained_values(rows[1], "advantages") == pytest.approx([-0.65, -0.6, -0.55])
    assert measured == {"reward_kl": pytest.approx(0.5)}
    discounted = ReinforcePP(gamma=0.5, kl_reward=0.1, normalise=False)
    (row,) = rows_of(discounted, groups[:1], old_logprobs=-1.0, ref_logprobs=-1.5)[:1]
    finish_advantages(discounted, [row])
    assert trained_values(row, "advantages") == pytest.approx(
        [0.25 - 0.0875, 0.5 - 0.075, 1 - 0.05]
    )
    del row.streams["ref_logprobs"]
    with pytest.raises(TrainError, match="has no stream 'ref_logprobs', which the algorithm needs"):
        finish_advantages(discounted, [row])


def test_reward_kl_of_a_rollout_is_compared_in_its_group() -> None:
    """old - ref = 0.5 at each token, β = 0.1: a rollout of 3 + 3 tokens in two calls is charged
    0.3, and one of 4 tokens 0.2. Of the rewards 1 - 0.3 and 0 - 0.2, each less the other: ±0.9."""
    rloo = RLOO(kl_reward=0.1, kl_over="rollout")
    groups = batch()[:1]
    rows = rows_of(rloo, groups, old_logprobs=-1.0, ref_logprobs=-1.5)
    measured = finish_advantages(rloo, rows)
    found = {row.name: set(np.round(trained_values(row, "advantages"), 6)) for row in rows}
    assert found == {"a0/call=0": {0.9}, "a0/call=0.0": {0.9}, "a1/call=0": {-0.9}}
    assert measured == {"reward_kl": pytest.approx(0.5)}


def test_rae_may_update_its_mean_after_each_rollout() -> None:
    """decay 0.5 from 0: rewards 1, 1, 0 are compared with 0, 0.5 and 0.75."""
    groups = roots(1, 1, 0)
    found = RAE(decay=0.5, update="rollout").assign_advantages(groups, {})
    values = [next(iter(each.credits.values())).advantages[0] for each in found.rollouts]
    assert values == pytest.approx([1, 0.5, -0.75])
    assert found.memory["rlm@0"] == pytest.approx(0.375)
    once = RAE(decay=0.5).assign_advantages(groups, {})
    assert once.memory["rlm@0"] == pytest.approx(1 / 3)


def test_critics_loss_may_weigh_tokens_in_another_way() -> None:
    """Rollouts of 6 and 4 tokens, one vote per token in the policy's loss and one per rollout in
    the critic's: of ten tokens in two rollouts, one counts 10 / (2 · 6) and 10 / (2 · 4)."""
    ppo = PPO(reduction="token", value_reduction="rollout")
    rows = rows_of(ppo, batch()[:1], values=0.0)
    found = {row.name: set(np.round(trained_values(row, "value_share"), 4)) for row in rows}
    assert found == {"a0/call=0": {0.8333}, "a0/call=0.0": {0.8333}, "a1/call=0": {1.25}}


def test_normalisation_may_add_to_the_standard_deviation() -> None:
    """±0.5 has the standard deviation 0.7071; with 1 added to it, ±0.5 / 1.7071."""
    one, groups = 0.5 / 1.7071068, roots(1, 0)
    found = DrGRPO(normalise=True, normalise_epsilon=1.0).assign_advantages(groups, {})
    values = [next(iter(each.credits.values())).advantages[0] for each in found.rollouts]
    assert values == pytest.approx([one, -one])
    with pytest.raises(ConfigError, match="normalise_epsilon cannot be negative"):
        DrGRPO(normalise_epsilon=-1.0)


def test_reinforce_pp_discounts_by_sampled_tokens() -> None:
    found = ReinforcePP(gamma=0.5).assign_advantages(
        [
            group(
                with_id("x", tree(call("0", 2, 1), reward=1)),
                with_id("y", tree(call("0", 1), reward=0)),
            )
        ],
        {},
    )
    assert [value for values in advantages(found).values() for value in values] == pytest.approx(
        whitened(0.25, 0.5, 1, 0), abs=1e-6
    )


def test_non_finite_or_missing_reward_is_noted_and_left_out_of_its_group() -> None:
    groups = roots(1, 0, math.nan, 0)
    groups[0].trajectories[3].rewards.clear()
    groups[0].trajectories[3].errors.append("the grader is down")
    found = DrGRPO().assign_advantages(groups, {})
    assert advantages(found) == {"0/0": [0.5], "1/0": [-0.5]}
    assert found.notes == [
        "2 is left out of its group: it has the reward correct=nan",
        "3 is left out of its group: it has no reward: the grader is down",
    ]
    assert found.metrics["failed_rollouts"] == 2
    child = group(
        with_id("x", tree(call("0", 1), call("0.0", 1, reward=math.inf), reward=1)),
        *roots(0, 1)[0].trajectories,
    )
    assert DrGRPO().assign_advantages([child], {}).notes == [
        "x is left out of its group: it has the reward own=inf of call 0.0"
    ]


def test_notes_on_failed_rollouts_are_one_line_for_each_reason() -> None:
    """A step of a run reports its rollouts within a line that names the step."""
    failed = [with_id(f"step=4/group=2/rollout={n}", tree(reward=None)) for n in range(20)]
    for number, each in enumerate(failed[10:]):
        each.errors.append(f"reason {min(number, 4)}")
    found = DrGRPO().assign_advantages([group(*failed, *roots(1, 0)[0].trajectories)], {})
    assert len(found.rollouts) == 2
    assert found.notes == [
        "10 rollouts are left out of their groups, such as group=2/rollout=0: it has no call",
        "group=2/rollout=10 is left out of its group: it has no call: reason 0",
        "group=2/rollout=11 is left out of its group: it has no call: reason 1",
        "8 more are left out for other reasons",
    ]


def test_every_estimator_can_mask_cut_replies() -> None:
    groups = [
        group(
            with_id("x", tree(cut("0", 2), reward=1)),
            with_id("y", tree(call("0", 2), reward=0)),
        )
    ]
    for name in ALGORITHMS:
        if name in ("sft", "remax", "hybrid", "by_task"):  # the last two wrap other algorithms
            continue
        found = ALGORITHMS.resolve(name)(overlong="mask").assign_advantages(
            groups, {}, every_token=True
        )
        assert "x" not in {each.trajectory.id for each in found.rollouts}, name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"lam": 1.5}),
        ("reinforce_pp", {"gamma": -0.1}),
        ("rae", {"decay": 1.0}),
        ("grpo", {"kl_reward": -1.0}),
        ("grpo", {"rollout_tokens": 0}),
    ],
)
def test_invalid_algorithm_options_are_rejected(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ALGORITHMS.resolve(name)(**options)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_algorithm_round_trips_through_json(name: str) -> None:
    made = ALGORITHMS.resolve(name)()
    stored = msgspec.json.decode(msgspec.json.encode(made))
    assert stored["name"] == name
    assert ALGORITHMS.build(stored) == made
    if name != "hybrid":  # lives in train/signals
        home = type(made).__module__.removeprefix("ramify.train.advantages.")
        assert home in (name, "group_estimators", "fork_estimators")
