"""Tree credit: from rewards per call to one advantage per call, for the rollouts of one task.

Decides what each call's return is and which calls are compared with each other. All functions are
pure and work on the same small tree, without tokens or tensors:

    root 0: reward 4          return of a call = its own reward + γ · its parent's return
    ├── 0.0: reward 1             γ = 1:  0 -> 4,  0.0 -> 5,  0.1 -> 7
    └── 0.1: reward 3             γ = 0:  0 -> 4,  0.0 -> 1,  0.1 -> 3

Not here: the comparison itself (see group_estimators.py), and how much each token weighs (see
weight.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ramify.plugins import Registry


class CreditNode(NamedTuple):
    """The facts about one call that credit assignment needs."""

    parent: str | None
    """Id of the parent call; None for the root."""
    depth: int
    reward: float = 0.0
    """The call's own reward; the root's is the task's."""
    role: str = "rlm"
    subtask: Hashable = None
    """The call's question and context: calls with an equal value attempt the same thing."""
    num_tokens: int = 0
    """Number of tokens sampled in the call."""


class Baseline(Protocol):
    """A function from the returns of several attempts at the same thing to their advantages."""

    def __call__(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        """``lengths``: sampled tokens of each attempt; empty if unknown."""
        ...


Tree = Mapping[str, CreditNode]
"""Call id -> node, with each parent before its children. The first is the root."""
Numbers = dict[str, float]
"""Call id -> advantage."""
Credit = Callable[[Sequence[Tree], Baseline, float], list[Numbers]]
"""(trees of one group, baseline, γ of the tree) -> a number per call, for each tree."""


def root(trees: Sequence[Tree], baseline: Baseline, gamma: float = 1.0) -> list[Numbers]:
    """Give every call its root's advantage. Rewards of other calls, and γ, are ignored. This is
    what trainers without call trees do.

    roots 4 and 0, mean baseline: every call of the first tree gets 2, of the second -2."""
    lengths = [sum(node.num_tokens for node in tree.values()) for tree in trees]
    advantages = baseline([tree[_root(tree)].reward for tree in trees], lengths)
    return [dict.fromkeys(tree, value) for tree, value in zip(trees, advantages, strict=True)]


def per_role(trees: Sequence[Tree], baseline: Baseline, gamma: float = 1.0) -> list[Numbers]:
    """Compare returns among all calls of the same role and depth in the group: a call is good if it
    did better than its peers at the same position.

    child returns 5, 7 in one tree and 0, 0 in the other, mean baseline: 2, 4, -3, -3."""
    return _compared(trees, baseline, gamma, lambda node: (node.role, node.depth))


def hierarchical(trees: Sequence[Tree], baseline: Baseline, gamma: float = 1.0) -> list[Numbers]:
    """Compare returns among attempts at the same sub-task: the same question over the same context,
    asked by any rollout of the group. This is finer than ``per_role`` if parents split their work
    alike. A sub-task that only one call attempted gives that call advantage 0."""
    return _compared(trees, baseline, gamma, _same_subtask)


def leave_one_child_out(
    trees: Sequence[Tree], baseline: Baseline, gamma: float = 1.0
) -> list[Numbers]:
    """A(child) = γ·A(parent) + r(child) - mean of r over its siblings; roots get their advantage
    from ``baseline``.

    A parent's success is passed to all its children, and better children get more. An only child
    gets its parent's share alone. Parent's A = 2, γ = 1, children's rewards 1, 3, 5:
    2 + (1-4) = -1, 2 + (3-3) = 2, 2 + (5-2) = 5."""
    roots = [tree[_root(tree)] for tree in trees]
    advantages = baseline([node.reward for node in roots], [node.num_tokens for node in roots])
    return [
        _shared_out(tree, advantage, gamma)
        for tree, advantage in zip(trees, advantages, strict=True)
    ]


CREDITS = Registry(
    "credit",
    "ramify.credits",
    {
        "root": root,
        "per_role": per_role,
        "hierarchical": hierarchical,
        "leave_one_child_out": leave_one_child_out,
    },
)
"""Name -> credit function. ``@CREDITS.register("mine")`` adds one; a dotted path to a function also
works."""


def _same_subtask(node: CreditNode) -> Hashable:
    return (node.role, node.depth, None if node.parent is None else node.subtask)


def _root(tree: Tree) -> str:
    return next(iter(tree))


def returns_of(tree: Tree, gamma: float) -> Numbers:
    """R(call) = own reward + γ · R(parent)."""
    returns: Numbers = {}
    for id, node in tree.items():
        returns[id] = node.reward + (
            gamma * returns[node.parent] if node.parent is not None else 0.0
        )
    return returns


def _compared(
    trees: Sequence[Tree], baseline: Baseline, gamma: float, peers: Callable[[CreditNode], Hashable]
) -> list[Numbers]:
    returns = [returns_of(tree, gamma) for tree in trees]
    cohorts: dict[Hashable, list[tuple[int, str]]] = defaultdict(list)
    for index, tree in enumerate(trees):
        for id, node in tree.items():
            cohorts[peers(node)].append((index, id))
    advantages_by_tree: list[Numbers] = [dict.fromkeys(tree, 0.0) for tree in trees]
    for members in cohorts.values():
        lengths = [trees[index][id].num_tokens for index, id in members]
        advantages = baseline([returns[index][id] for index, id in members], lengths)
        for (index, id), value in zip(members, advantages, strict=True):
            advantages_by_tree[index][id] = value
    return advantages_by_tree


def _shared_out(tree: Tree, advantage: float, gamma: float) -> Numbers:
    children: dict[str | None, list[str]] = defaultdict(list)
    for id, node in tree.items():
        children[node.parent].append(id)
    advantages: Numbers = {_root(tree): advantage}
    for id, node in tree.items():
        if node.parent is None:
            continue
        others = [tree[sibling].reward for sibling in children[node.parent] if sibling != id]
        better = node.reward - sum(others) / len(others) if others else 0.0
        advantages[id] = gamma * advantages[node.parent] + better
    return advantages
