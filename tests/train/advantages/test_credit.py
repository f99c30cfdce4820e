"""Credit on trees, by hand. Every number here was worked out on paper; all are integers under the
mean baseline.

Group of two rollouts of one task:

    first    0 (4) ─┬─ 0.0 (1) "north"        second   0 (0) ─┬─ 0.0 (1) "north"
                    └─ 0.1 (3) "south" ─ 0.1.0 (2) "x"        └─ 0.1 (5) "south"
"""

from __future__ import annotations

import pytest

from ramify.train.advantages.credit import (
    CREDITS,
    CreditNode,
    hierarchical,
    leave_one_child_out,
    per_role,
    returns_of,
    root,
)
from ramify.train.advantages.group_estimators import GRPO, RLOO, DrGRPO

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


def test_returns() -> None:
    assert returns_of(FIRST, 1) == {"0": 4, "0.0": 5, "0.1": 7, "0.1.0": 9}
    assert returns_of(FIRST, 0) == {"0": 4, "0.0": 1, "0.1": 3, "0.1.0": 2}
    assert returns_of(FIRST, 0.5) == {"0": 4, "0.0": 3, "0.1": 5, "0.1.0": 4.5}


def test_root_is_broadcast() -> None:
    assert root(GROUP, mean, 1) == [dict.fromkeys(FIRST, 2), dict.fromkeys(SECOND, -2)]


def test_per_role() -> None:
    # γ = 1: roots 4, 0 about 2; children 5, 7 | 1, 5 about 4.5; the grandchild is alone
    assert per_role(GROUP, mean, 1) == [
        {"0": 2, "0.0": 0.5, "0.1": 2.5, "0.1.0": 0},
        {"0": -2, "0.0": -3.5, "0.1": 0.5},
    ]
    # γ = 0: children 1, 3 | 1, 5 about 2.5
    assert per_role(GROUP, mean, 0)[1] == {"0": -2, "0.0": -1.5, "0.1": 2.5}


def test_roles_are_not_compared_with_each_other() -> None:
    trees = [
        {"0": CreditNode(None, 0, 2), "0.0": CreditNode("0", 1, 8, "lm")},
        {"0": CreditNode(None, 0, 0), "0.0": CreditNode("0", 1, 1)},
    ]
    assert per_role(trees, mean, 0) == [{"0": 1, "0.0": 0}, {"0": -1, "0.0": 0}]


def test_hierarchical() -> None:
    # γ = 1: north 5, 1 about 3; south 7, 5 about 6
    assert hierarchical(GROUP, mean, 1) == [
        {"0": 2, "0.0": 2, "0.1": 1, "0.1.0": 0},
        {"0": -2, "0.0": -2, "0.1": -1},
    ]


def test_attempts_under_one_parent_are_compared() -> None:
    tree = {
        "0": CreditNode(None, 0, 1),
        **{f"0.{i}": CreditNode("0", 1, r, subtask="same") for i, r in enumerate((6, 0, 3))},
    }
    assert hierarchical([tree], mean, 1) == [{"0": 0, "0.0": 3, "0.1": -3, "0.2": 0}]


def test_leave_one_child_out() -> None:
    # first: 2 + (1-3), 2 + (3-1), and the grandchild, an only child, its parent's 4
    assert leave_one_child_out(GROUP, mean, 1) == [
        {"0": 2, "0.0": 0, "0.1": 4, "0.1.0": 4},
        {"0": -2, "0.0": -6, "0.1": 2},
    ]
    assert leave_one_child_out(GROUP, mean, 0)[0] == {"0": 2, "0.0": -2, "0.1": 2, "0.1.0": 0}


@pytest.mark.parametrize("name", CREDITS)
def test_a_group_of_one_without_siblings_has_no_advantage(name: str) -> None:
    alone = {"0": CreditNode(None, 0, 4), "0.0": CreditNode("0", 1, 1)}
    assert CREDITS[name]([alone], mean, 1) == [{"0": 0, "0.0": 0}]


@pytest.mark.parametrize("name", CREDITS)
def test_every_call_gets_a_number(name: str) -> None:
    assert [list(numbers) for numbers in CREDITS[name](GROUP, mean, 1)] == [
        list(FIRST),
        list(SECOND),
    ]


def test_baselines() -> None:
    assert mean([3, 1, 1, 3]) == [1, -1, -1, 1]
    assert GRPO().compare([3, 1, 1, 3]) == pytest.approx(
        [0.8660246, -0.8660246, -0.8660246, 0.8660246]
    )  # std 2/sqrt(3)
    assert RLOO().compare([3, 0, 0]) == pytest.approx([3, -1.5, -1.5])
    for baseline in (mean, GRPO().compare, RLOO().compare):
        assert (baseline([7]), baseline([]), baseline([0.1, 0.1, 0.1])) == ([0], [], [0, 0, 0])
