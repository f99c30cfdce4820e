"""Estimators over forks: numbers worked out by hand, and expected updates that are exact gradients.

rollout a   0: t0 ┬ t1 t2     reward 1        rollout b   0: t0 t1    reward 1/4
            0:1   └ t0 t1     reward 0
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.train.advantages.fork_estimators import (
    BranchEstimator,
    EntropyBranchEstimator,
    StateGroupEstimator,
    VineEstimator,
)
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.config import RlSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.types.fork_segment import first_segment, path_trajectory
from ramify.types.trajectory import Call, CallForkOrigin, CallSite, Group, Trajectory
from tests.train.trees import call, cut, tree

Places = dict[tuple[str, int], float]


def continuation(id: str, of: str, turn: int, *sampled: int) -> Call:
    made, _ = call(id, *sampled)
    return msgspec.structs.replace(made, fork=CallForkOrigin(of, turn), depth=0)


def forked(*calls: Call, rewards: Mapping[str, float], name: str = "a") -> Trajectory:
    """A rollout with the rewards of its lines, by their last calls."""
    lines = {
        end.id: share for end, share in first_segment(tree(*((c, None) for c in calls))).path_ends()
    }
    mean = sum(lines[id] * reward for id, reward in rewards.items())
    made = tree(*((each, None) for each in calls), reward=mean)
    made.id, made.call_rewards = name, {id: {"correct": value} for id, value in rewards.items()}
    return made


def pair() -> list[Trajectory]:
    first = forked(
        call("0", 1, 1, 1)[0],
        continuation("0:1", "0", 0, 1, 1),
        rewards={"0": 1.0, "0:1": 0.0},
    )
    return [first, forked(call("0", 1, 1)[0], rewards={"0": 0.25}, name="b")]


def numbers(
    estimator: BranchEstimator | StateGroupEstimator, group: list[Trajectory]
) -> list[tuple[Places, Places]]:
    """(advantages, weights times rollouts) by turn, for each rollout."""
    step = estimator.assign_advantages([Group("t", group)], {})
    return [
        (
            {place: credit.advantages[0] for place, credit in rollout.credits.items()},
            {place: credit.rl[0] for place, credit in rollout.credits.items()},
        )
        for rollout in step.rollouts
    ]


def test_branch_compares_continuations_of_a_fork_and_shares_the_weight_of_one_rollout() -> None:
    (advantages, weights), (other, _) = numbers(BranchEstimator(rollout_tokens=1), pair())
    assert advantages == {
        ("0", 0): 0.25,
        ("0", 1): 1,
        ("0", 2): 1,
        ("0:1", 0): -1,
        ("0:1", 1): -1,
    }
    assert weights == {("0", 0): 1, ("0", 1): 0.5, ("0", 2): 0.5, ("0:1", 0): 0.5, ("0:1", 1): 0.5}
    assert other == {("0", 0): -0.25, ("0", 1): -0.25}


def test_vine_teaches_the_first_line_and_entropy_branch_compares_whole_rollouts() -> None:
    (vine, weights), _ = numbers(VineEstimator(rollout_tokens=1), pair())
    assert vine == {("0", 0): 0.25, ("0", 1): 1, ("0", 2): 1}
    assert set(weights.values()) == {1}
    (entropy, _), _ = numbers(EntropyBranchEstimator(), pair())
    assert entropy == {
        ("0", 0): 0.25,
        ("0", 1): 0.75,
        ("0", 2): 0.75,
        ("0:1", 0): -0.25,
        ("0:1", 1): -0.25,
    }


def test_tokens_before_a_fork_count_once_in_the_mean_length() -> None:
    step = BranchEstimator().assign_advantages([Group("t", pair())], {})
    assert step.metrics["loss_rollout_tokens"] == (1 + 2 / 2 + 2 / 2 + 2) / 2
    assert step.metrics["calls_per_rollout"] == 1


def test_calls_have_the_advantage_of_the_turn_that_made_them() -> None:
    first, second = pair()
    made, _ = call("0:1.0", 1)
    first.calls.append(msgspec.structs.replace(made, parent=CallSite("0:1", 1, 0)))
    first.call_rewards["0:1.0"] = {"own": 3.0}
    (advantages, weights), _ = numbers(
        BranchEstimator(rollout_tokens=1, gamma_tree=0.5), [first, second]
    )
    assert (advantages["0:1.0", 0], weights["0:1.0", 0]) == (-0.5 + 3, 0.5)
    (advantages, _), _ = numbers(BranchEstimator(credit="root"), [first, second])
    assert advantages["0:1.0", 0] == -1


def test_mask_removes_only_the_line_that_was_cut() -> None:
    first, second = pair()
    cut_off = msgspec.structs.replace(cut("0:1", 1)[0], fork=CallForkOrigin("0", 0), depth=0)
    first.calls[1] = cut_off
    (advantages, _), _ = numbers(BranchEstimator(overlong="mask"), [first, second])
    assert set(advantages) == {("0", 0), ("0", 1), ("0", 2)}


def test_equal_states_form_groups() -> None:
    """Rewards 1, 0, 0; the first two rollouts say the same in turn 0."""
    made = [forked(call("0", 1, 1)[0], rewards={"0": reward}) for reward in (1.0, 0.0, 0.0)]
    for index, trajectory in enumerate(made):
        trajectory.id = str(index)
    other = msgspec.structs.replace(
        made[2].calls[0].turns[0].reply,
        message=msgspec.structs.replace(made[2].calls[0].turns[0].reply.message, content="else"),
    )
    made[2].calls[0].turns[0] = msgspec.structs.replace(made[2].calls[0].turns[0], reply=other)
    found = [advantages for advantages, _ in numbers(StateGroupEstimator(), made)]
    assert found == [
        {("0", 0): 1, ("0", 1): 1},
        {("0", 0): -0.5, ("0", 1): -1},
        {("0", 0): -0.5, ("0", 1): -0.5},
    ]
    by_observation = [
        advantages for advantages, _ in numbers(StateGroupEstimator(state="observation"), made)
    ]
    assert by_observation[1][("0", 1)] == -0.5


# --- exact gradients ------------------------------------------------------------------------------

STOP, RIGHT, HELPS = 0.4, 0.3, 0.6
"""Probabilities: of ending in turn 0, of the right choice in turn 1, and of a child that helps."""
REWARD = {(True, True): 1.0, (True, False): 0.5, (False, True): 0.2, (False, False): 0.0}
ENDED = 0.3
"""Reward of ending in turn 0."""
Outcome = tuple[float, Trajectory, list[tuple[str, str, float]]]
"""(probability, rollout, (logit, call of its turn/index, score) for each choice)."""
LINES = [
    (
        (RIGHT if right else 1 - RIGHT) * (HELPS if helps else 1 - HELPS),
        right,
        helps,
    )
    for right in (True, False)
    for helps in (True, False)
]


def exact() -> dict[str, float]:
    """The gradient of the expected reward in the three logits."""
    mean = sum(chance * REWARD[right, helps] for chance, right, helps in LINES)

    def given(place: int, value: bool) -> float:
        chosen = [line for line in LINES if line[place] == value]
        total = sum(chance for chance, *_ in chosen)
        return sum(chance * REWARD[right, helps] for chance, right, helps in chosen) / total

    return {
        "stop": STOP * (1 - STOP) * (ENDED - mean),
        "right": (1 - STOP) * RIGHT * (1 - RIGHT) * (given(1, True) - given(1, False)),
        "helps": (1 - STOP) * HELPS * (1 - HELPS) * (given(2, True) - given(2, False)),
    }


def outcomes(num_lines: int) -> Iterator[Outcome]:
    """Each rollout: it ends in turn 0, or forks into ``num_lines`` lines before turn 1, each of
    which makes one child. Lines with more tokens are the wrong ones."""
    yield STOP, forked(call("0", 2)[0], rewards={"0": ENDED}), [("stop", "0/0", 1 - STOP)]
    for lines in itertools.product(LINES, repeat=num_lines):
        probability = 1 - STOP
        calls, rewards, choices = [], {}, [("stop", "0/0", -STOP)]
        for index, (chance, right, helps) in enumerate(lines):
            probability *= chance
            id, turn = (f"0:{index}", 0) if index else ("0", 1)
            num = 1 if right else 4
            calls.append(continuation(id, "0", 0, num) if index else call("0", 2, num)[0])
            child, _ = call(f"{id}.0", 3)
            calls.append(msgspec.structs.replace(child, parent=CallSite(id, turn, 0), depth=1))
            rewards[id] = REWARD[right, helps]
            choices.append(("right", f"{id}/{turn}", float(right) - RIGHT))
            choices.append(("helps", f"{id}.0/0", float(helps) - HELPS))
        yield probability, forked(*calls, rewards=rewards), choices


@pytest.mark.parametrize(
    ("estimator", "num_lines"),
    [
        (BranchEstimator(rollout_tokens=1), 2),
        (BranchEstimator(rollout_tokens=1), 1),
        (VineEstimator(rollout_tokens=1), 2),
        (EntropyBranchEstimator(rollout_tokens=1), 2),
        (StateGroupEstimator(rollout_tokens=1), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else str(value),
)
def test_expected_update_is_the_exact_gradient(
    estimator: BranchEstimator | StateGroupEstimator, num_lines: int
) -> None:
    """Over all groups of two rollouts. Whether a rollout forks depends on its turn 0."""
    update: dict[str, float] = defaultdict(float)
    whole = 0.0
    for group in itertools.product(list(outcomes(num_lines)), repeat=2):
        chance = group[0][0] * group[1][0]
        whole += chance
        trajectories = [msgspec.structs.replace(each[1], id=str(i)) for i, each in enumerate(group)]
        step = estimator.assign_advantages([Group("t", trajectories)], {}, every_token=True)
        by_id = {rollout.trajectory.id: rollout.credits for rollout in step.rollouts}
        for index, (_, _, choices) in enumerate(group):
            for logit, place, score in choices:
                id, _, turn = place.rpartition("/")
                if (credit := by_id.get(str(index), {}).get((id, int(turn)))) is not None:
                    signal = credit.rl[0] * credit.advantages[0] / 2
                    update[logit] += chance * signal * score
    assert whole == pytest.approx(1)
    assert dict(update) == pytest.approx(exact(), abs=1e-12)


# --- bad input, and lines -------------------------------------------------------------------------


def test_options_without_a_meaning_for_lines_are_refused() -> None:
    with pytest.raises(ConfigError, match="credit=hierarchical"):
        BranchEstimator(credit="hierarchical")
    with pytest.raises(ConfigError, match="length_weight"):
        VineEstimator(length_weight=0.1)
    assert RlSpec(algorithm="vine").algorithm == VineEstimator()
    assert RolloutOptions().branch is None
    assert DrGRPO() != BranchEstimator()


def test_a_line_is_a_run_of_its_own() -> None:
    first, _ = pair()
    for id, parent in (("0.0", CallSite("0", 0, 0)), ("0:1.0", CallSite("0:1", 1, 0))):
        made, _ = call(id, 1)
        first.calls.append(msgspec.structs.replace(made, parent=parent))
    line = path_trajectory(first, first.call("0:1"))
    assert [(each.id, len(each.turns), each.parent) for each in line.calls] == [
        ("0", 3, None),
        ("0.0", 1, CallSite("0", 0, 0)),
        ("0:1.0", 1, CallSite("0", 2, 0)),
    ]
    assert (line.rewards, line.root.fork) == ({}, None)
