"""Credit on call trees. Expected numbers were worked out by hand, or are exact gradients.

Group of two rollouts of one task:

    first    0 (4) ─┬─ 0.0 (1) "north"        second   0 (0) ─┬─ 0.0 (1) "north"
                    └─ 0.1 (3) "south" ─ 0.1.0 (2) "x"        └─ 0.1 (5) "south"
"""

from __future__ import annotations

import itertools
import math

import pytest

from ramify.train.advantages.credit_assignment import (
    CREDITS,
    AdvantageFunction,
    CreditNode,
    inherited_returns,
    leave_one_child_out,
    per_role_credit,
    root_credit,
    subtask_credit,
)
from ramify.train.advantages.group_estimators import GRPO, RLOO, DrGRPO, MaxRL, PassAtKEstimator
from ramify.types.trajectory import CallForkOrigin, NewAgentCallReason, Trajectory
from tests.train import trees as made

mean = DrGRPO().compare
FIRST = {
    "0": CreditNode(None, 0, 4),
    "0.0": CreditNode("0", 1, 1, subtask="north"),
    "0.1": CreditNode("0", 1, 3, subtask="south"),
    "0.1.0": CreditNode("0.1", 2, 2, subtask="x"),
}
SECOND = {
    "0": CreditNode(None, 0, 0),
    "0.0": CreditNode("0", 1, 1, subtask="north"),
    "0.1": CreditNode("0", 1, 5, subtask="south"),
}
GROUP = [FIRST, SECOND]


def test_returns_add_discounted_rewards_of_descendants() -> None:
    assert inherited_returns(FIRST, 1) == {"0": 4, "0.0": 5, "0.1": 7, "0.1.0": 9}
    assert inherited_returns(FIRST, 0) == {"0": 4, "0.0": 1, "0.1": 3, "0.1.0": 2}
    assert inherited_returns(FIRST, 0.5) == {"0": 4, "0.0": 3, "0.1": 5, "0.1.0": 4.5}


def test_root_credit_gives_every_call_the_advantage_of_its_root() -> None:
    assert root_credit(GROUP, mean, 1) == [dict.fromkeys(FIRST, 2), dict.fromkeys(SECOND, -2)]


def test_per_role_compares_calls_at_the_same_depth_across_trees() -> None:
    # γ = 1: roots 4, 0; children 5, 7 (mean 6) | 1, 5 (mean 3). Only the first tree has a
    # grandchild; its return, 9, is compared with 3, what the second has in its parent's place.
    assert per_role_credit(GROUP, RLOO().compare, 1) == [
        {"0": 4, "0.0": 2, "0.1": 4, "0.1.0": 6},
        {"0": -4, "0.0": -5, "0.1": -1},
    ]
    assert per_role_credit(GROUP, mean, 1) == [
        {"0": 2, "0.0": 1, "0.1": 2, "0.1.0": 3},
        {"0": -2, "0.0": -2.5, "0.1": -0.5},
    ]
    # γ = 0: children 1, 3 (mean 2) | 1, 5 (mean 3)
    assert per_role_credit(GROUP, RLOO().compare, 0)[1] == {"0": -4, "0.0": -1, "0.1": 3}


@pytest.mark.parametrize(
    ("baseline", "number"), [(RLOO().compare, 1), (mean, 0.5), (GRPO().compare, 1 / 2**0.5)]
)
def test_per_role_counts_a_tree_once_however_many_children_it_has(
    baseline: AdvantageFunction, number: float
) -> None:
    """Reward 1 with nine children against reward 0 with one child: the roots' advantages."""
    nine = {"0": CreditNode(None, 0, 1), **{f"0.{i}": CreditNode("0", 1) for i in range(9)}}
    one = {"0": CreditNode(None, 0, 0), "0.0": CreditNode("0", 1)}
    first, second = per_role_credit([nine, one], baseline, 1)
    assert first == pytest.approx(dict.fromkeys(nine, number), rel=1e-5)
    assert second == pytest.approx(dict.fromkeys(one, -number), rel=1e-5)


def test_per_role_advantage_does_not_depend_on_siblings() -> None:
    """Only the call's own return and the other tree's children count."""
    other = {"0": CreditNode(None, 0, 0), "0.0": CreditNode("0", 1, 2)}
    for num in (1, 8):
        tree = {
            "0": CreditNode(None, 0, 1),
            "0.0": CreditNode("0", 1, 5),
            **{f"0.{i}": CreditNode("0", 1, -i) for i in range(1, num)},
        }
        assert per_role_credit([tree, other], RLOO().compare, 1)[0]["0.0"] == 6 - 2


def test_per_role_does_not_compare_lm_calls_with_rlm_calls() -> None:
    trees = [
        {"0": CreditNode(None, 0, 2), "0.0": CreditNode("0", 1, 8, "lm")},
        {"0": CreditNode(None, 0, 0), "0.0": CreditNode("0", 1, 1)},
    ]
    assert per_role_credit(trees, RLOO().compare, 0) == [{"0": 2, "0.0": 8}, {"0": -2, "0.0": 1}]
    assert per_role_credit(trees, RLOO().compare, 1) == [{"0": 2, "0.0": 10}, {"0": -2, "0.0": -1}]


@pytest.mark.parametrize(
    "baseline", [mean, RLOO().compare, GRPO().compare, MaxRL().compare, PassAtKEstimator().compare]
)
@pytest.mark.parametrize("num", [1, 2, 3, 7, 8])
def test_scale_does_not_depend_on_how_many_trees_recursed(
    baseline: AdvantageFunction, num: int
) -> None:
    """Eight trees, of which ``num`` have a child without its own reward: what the tree's
    reward says about the root, it says about the child."""
    rewards = (1, 0, 0, 1, 1, 0, 1, 0)
    trees = [
        {"0": CreditNode(None, 0, reward), **({"0.0": CreditNode("0", 1)} if i < num else {})}
        for i, reward in enumerate(rewards)
    ]
    wanted = baseline(rewards)
    for credit in (per_role_credit, subtask_credit, leave_one_child_out):
        found = credit(trees, baseline, 1)
        assert found == [dict.fromkeys(tree, wanted[i]) for i, tree in enumerate(trees)]


RECURSES, DIRECT, RIGHT, WRONG = 0.3, 0.4, 0.9, 0.2
"""How likely the root has a child, and success without a child, with a right and with a wrong one.
A child is right with probability ½."""
OUTCOMES = [
    *(
        (False, False, success, (1 - RECURSES) * (DIRECT if success else 1 - DIRECT))
        for success in (0, 1)
    ),
    *(
        (True, right, success, RECURSES / 2 * (p if success else 1 - p))
        for right, p in ((True, RIGHT), (False, WRONG))
        for success in (0, 1)
    ),
]
"""(whether the root has a child, whether that is right, the tree's reward, the probability)"""


@pytest.mark.parametrize(("baseline", "scale"), [(mean, 2 / 3), (RLOO().compare, 1)])
@pytest.mark.parametrize("own", [0.0, 0.5])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("name", CREDITS)
def test_expected_update_of_three_trees_is_the_gradient_of_the_expected_reward(
    name: str, num: int, own: float, baseline: AdvantageFunction, scale: float
) -> None:
    """Over all groups of three trees: root and child both decide the tree's reward, and a right
    child also has the reward ``own``. A recursing tree has ``num`` children, all alike except
    that only the first one counts."""
    if name == "root" and own:
        pytest.skip("this credit ignores rewards of calls")
    update = [0.0, 0.0]
    for group in itertools.product(OUTCOMES, repeat=3):
        trees: list[dict[str, CreditNode]] = []
        for recurses, right, success, _ in group:
            children = {
                f"0.{i}": CreditNode("0", 1, own * (right if i == 0 else 0.5)) for i in range(num)
            }
            trees.append({"0": CreditNode(None, 0, success), **(children if recurses else {})})
        probability = math.prod(outcome[3] for outcome in group)
        for (recurses, right, *_), numbers in zip(
            group, CREDITS[name](trees, baseline, 1), strict=True
        ):
            update[0] += probability * numbers["0"] * (recurses - RECURSES)
            update[1] += probability * numbers.get("0.0", 0) * (right - 0.5)
    of_root = RECURSES * (1 - RECURSES) * ((RIGHT + WRONG) / 2 - DIRECT)
    of_child = RECURSES * 0.25 * (RIGHT - WRONG + own)
    assert update == pytest.approx([3 * scale * of_root, 3 * scale * of_child], abs=1e-12)


def test_hierarchical_compares_calls_with_the_same_subtask() -> None:
    # γ = 1: north 5 | 1; south 7 | 5; the grandchild as in per_role_credit
    assert subtask_credit(GROUP, RLOO().compare, 1) == [
        {"0": 4, "0.0": 4, "0.1": 2, "0.1.0": 4},
        {"0": -4, "0.0": -4, "0.1": -2},
    ]


def test_hierarchical_compares_repeated_subtasks_of_one_parent() -> None:
    """Rewards 6, 0, 3 of one sub-task, less the mean of the other two attempts. In a group of two
    trees the estimator's scale, here ½, and the parent's advantage of ½ are the same as elsewhere.
    """
    tree = {
        "0": CreditNode(None, 0, 1),
        **{f"0.{i}": CreditNode("0", 1, r, subtask="same") for i, r in enumerate((6, 0, 3))},
    }
    assert subtask_credit([tree], mean, 1) == [{"0": 0, "0.0": 4.5, "0.1": -4.5, "0.2": 0}]
    other = {"0": CreditNode(None, 0, 0)}
    assert subtask_credit([tree, other], mean, 1) == [
        {"0": 0.5, "0.0": 0.5 + 2.25, "0.1": 0.5 - 2.25, "0.2": 0.5},
        {"0": -0.5},
    ]


def test_leave_one_child_out_compares_each_child_with_its_siblings() -> None:
    # first: 4 + (1-3), 4 + (3-1); the grandchild has neither siblings nor peers: 6 + 2
    baseline = RLOO().compare
    assert leave_one_child_out(GROUP, baseline, 1) == [
        {"0": 4, "0.0": 2, "0.1": 6, "0.1.0": 8},
        {"0": -4, "0.0": -8, "0.1": 0},
    ]
    assert leave_one_child_out(GROUP, mean, 1)[0] == {"0": 2, "0.0": 1, "0.1": 3, "0.1.0": 4}
    assert leave_one_child_out(GROUP, baseline, 0)[0] == {"0": 4, "0.0": -2, "0.1": 2, "0.1.0": 2}
    # an only child is compared with the other tree's children, whose mean is 3
    only = {"0": CreditNode(None, 0, 4), "0.0": CreditNode("0", 1, 5)}
    assert leave_one_child_out([only, SECOND], baseline, 1)[0] == {"0": 4, "0.0": 4 + (5 - 3)}
    # in a group of one tree, the siblings are all there is to compare with
    assert leave_one_child_out([FIRST], mean, 1) == [{"0": 0, "0.0": -2, "0.1": 2, "0.1.0": 2}]


@pytest.mark.parametrize("name", CREDITS)
def test_single_tree_without_siblings_has_zero_advantage(name: str) -> None:
    alone = {"0": CreditNode(None, 0, 4), "0.0": CreditNode("0", 1, 1)}
    assert CREDITS[name]([alone], mean, 1) == [{"0": 0, "0.0": 0}]


@pytest.mark.parametrize("name", CREDITS)
def test_every_call_gets_an_advantage(name: str) -> None:
    assert [list(numbers) for numbers in CREDITS[name](GROUP, mean, 1)] == [
        list(FIRST),
        list(SECOND),
    ]


def test_mean_grpo_and_rloo_baselines() -> None:
    assert mean([3, 1, 1, 3]) == [1, -1, -1, 1]
    assert GRPO().compare([3, 1, 1, 3]) == pytest.approx(
        [0.8660246, -0.8660246, -0.8660246, 0.8660246]
    )  # std 2/sqrt(3)
    assert RLOO().compare([3, 0, 0]) == pytest.approx([3, -1.5, -1.5])
    for baseline in (mean, GRPO().compare, RLOO().compare):
        assert (baseline([7]), baseline([]), baseline([0.1, 0.1, 0.1])) == ([0], [], [0, 0, 0])


def test_agents_of_a_rollout_are_compared_by_their_own_rewards() -> None:
    """Zero-sum self-play: the rollouts have equal means, and their agents do not."""
    won = {"0": CreditNode(None, 0, 1, is_agent=True), "1": CreditNode(None, 0, -1, is_agent=True)}
    drew = {"0": CreditNode(None, 0, 0, is_agent=True), "1": CreditNode(None, 0, 0, is_agent=True)}
    for credit in CREDITS:
        function = CREDITS.resolve(credit)
        assert function([won, drew], mean, 1) == [
            {"0": 1.0, "1": -1.0},
            {"0": 0.0, "1": 0.0},
        ]


def advantages(*played: Trajectory) -> list[dict[str, float]]:
    """The advantage of the first sampled token of each call, by rollout."""
    step = DrGRPO(drop_zero_variance=False).assign_advantages([made.group(*played)], {})
    return [
        {id: credit.advantages[0] for (id, _), credit in rollout.credits.items()}
        for rollout in step.rollouts
    ]


def test_agents_of_a_trajectory_have_own_rewards_and_other_conversations_do_not() -> None:
    def agents(first: float, second: float) -> Trajectory:
        return made.tree(
            made.call("0", 2, reward=first), made.call("1", 2, reward=second), reward=0.0
        )

    assert advantages(agents(1, -1), agents(0.5, -0.5)) == [
        {"0": 1.0, "1": -1.0},
        {"0": 0.5, "1": -0.5},
    ]
    one = [made.tree(made.call("0", 2), made.call("1", 2), reward=r) for r in (1.0, 0.0)]
    assert advantages(*one) == [{"0": 0.5, "1": 0.5}, {"0": -0.5, "1": -0.5}]


def test_a_fork_of_an_agents_call_has_the_advantage_of_that_agent() -> None:
    def agents(first: float, second: float) -> Trajectory:
        return made.tree(
            made.call("0", 2, reward=first),
            made.call("1", 2, reward=second),
            made.call("1:1", 2, fork=CallForkOrigin("1", 0)),
            made.call("1:1:1", 2, fork=CallForkOrigin("1:1", 0)),
            reward=0.0,
        )

    assert advantages(agents(1, -1), agents(0.5, -0.5)) == [
        {"0": 1.0, "1": -1.0, "1:1": -1.0, "1:1:1": -1.0},
        {"0": 0.5, "1": -0.5, "1:1": -0.5, "1:1:1": -0.5},
    ]


def test_each_of_several_replies_to_an_agent_can_have_its_own_reward() -> None:
    def replies(first: float, second: float) -> Trajectory:
        fork = CallForkOrigin("0", -1)
        return made.tree(
            made.call("0", 2, reward=first, cause=NewAgentCallReason.NEW),
            made.call("0:1", 2, reward=second, cause=NewAgentCallReason.SAMPLE, fork=fork),
            reward=0.0,
        )

    assert advantages(replies(1, -1), replies(0.5, -0.5)) == [
        {"0": 1.0, "0:1": -1.0},
        {"0": 0.5, "0:1": -0.5},
    ]
