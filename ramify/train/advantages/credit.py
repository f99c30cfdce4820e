"""Tree credit: from rewards per call to one advantage per call, for the rollouts of one task; and
the bridge from trajectories to it: the tree of a rollout, its tokens and its lengths.

Decides what each call's return is and which calls are compared with each other, on a small tree
without tokens or tensors:

    root 0: reward 4          return of a call = its own reward + γ · its parent's return
    ├── 0.0: reward 1             γ = 1:  0 -> 4,  0.0 -> 5,  0.1 -> 7
    └── 0.1: reward 3             γ = 0:  0 -> 4,  0.0 -> 1,  0.1 -> 3

``tree_of`` decides what a call's own reward is (the weighted sum of its named rewards; the root's
is the task's), which calls attempt the same sub-task (the same question over the same context), and
that a continuation of a call (``Call.fork``) counts as its sibling, under the same parent.

``Overlong`` decides how a call is treated whose last reply was cut at its token limit, which says
little about the answer it would have given. ``punish`` (the default) keeps its score. ``mask``
keeps it in the baseline but removes its tokens from the loss (DAPO's overlong filtering). A call
that used up its turns, calls, tokens or dollars is a failure of the policy: it keeps its score with
both. The soft overlong penalty and the length penalty change the reward before any comparison.

Not here: the comparison itself (see group_estimators.py), and how much each token weighs (see
weight.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Literal, NamedTuple, Protocol

from ramify.plugins import Registry
from ramify.tasks.base import total
from ramify.types.trajectory import Call, Trajectory, Turn


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
    """Compare a call's return with the calls of the same role and depth in the *other* trees: a
    call is good if it did better than its peers at the same position. If no other tree has such a
    call, it gets γ · its parent's advantage + its own reward.

    child returns 5, 7 in one tree and 0, 0 in the other, less the others' mean: 5, 7, -6, -6."""
    return _against_other_trees(trees, baseline, gamma, _role)


def hierarchical(trees: Sequence[Tree], baseline: Baseline, gamma: float = 1.0) -> list[Numbers]:
    """Compare returns among attempts at the same sub-task: the same question over the same context,
    asked by other trees of the group. This has less variance than ``per_role`` if parents split
    their work alike. A sub-task that no other tree attempted is compared with the attempts of its
    own tree by own rewards, or else as in ``per_role``."""
    numbers = _against_other_trees(trees, baseline, gamma, _role, _subtask)
    num_trees = Counter(key for tree in trees for key in set(map(_subtask, tree.values())))
    for tree, own in zip(trees, numbers, strict=True):
        attempts: dict[Hashable, list[str]] = defaultdict(list)
        for id, node in tree.items():
            attempts[_subtask(node)].append(id)
        for key, ids in attempts.items():
            if len(ids) > 1 and num_trees[key] == 1:
                rewards = baseline(
                    [tree[id].reward for id in ids], [tree[id].num_tokens for id in ids]
                )
                for id, value in zip(ids, rewards, strict=True):
                    own[id] = gamma * own.get(tree[id].parent or "", 0.0) + value
    return numbers


def leave_one_child_out(
    trees: Sequence[Tree], baseline: Baseline, gamma: float = 1.0
) -> list[Numbers]:
    """A(child) = γ·A(parent) + r(child) - mean of r over its siblings; roots get their advantage
    from ``baseline``.

    A parent's success is passed to all its children, and better children get more. An only child
    is compared with the calls of its role and depth in other trees. Unbiased if siblings do not
    depend on each other, as in one batch. Parent's A = 2, γ = 1, children's rewards 1, 3, 5:
    2 + (1-4) = -1, 2 + (3-3) = 2, 2 + (5-2) = 5."""
    numbers = root(trees, baseline, gamma)
    by_role = _against_other_trees(trees, _less_others, 0.0, _role)
    for tree, own, alone in zip(trees, numbers, by_role, strict=True):
        children: dict[str | None, list[str]] = defaultdict(list)
        for id, node in tree.items():
            children[node.parent].append(id)
        for id, node in tree.items():
            if node.parent is not None:
                others = [tree[other].reward for other in children[node.parent] if other != id]
                better = node.reward - sum(others) / len(others) if others else alone[id]
                own[id] = gamma * own[node.parent] + better
    return numbers


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
works.

Example:
    rl.algorithm.credit=per_role            # in a recipe, by name
"""


def _less_others(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """R_i - mean of the others."""
    total, num = fsum(returns), len(returns) - 1
    return [value - (total - value) / num for value in returns]


def _role(node: CreditNode) -> Hashable:
    return (node.role, node.depth)


def _subtask(node: CreditNode) -> Hashable:
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


def _against_other_trees(
    trees: Sequence[Tree],
    baseline: Baseline,
    gamma: float,
    *peers: Callable[[CreditNode], Hashable],
) -> list[Numbers]:
    """Compare each call with its peers in other trees, by the last of ``peers`` that finds some.

    The call stands for its own tree, and the mean of its peers for each other tree."""
    returns = [returns_of(tree, gamma) for tree in trees]
    numbers: list[Numbers] = [{} for _ in trees]
    for peer in peers:
        for ids in _cohorts(trees, peer):
            means = [fmean(returns[index][id] for id in ids[index]) for index in ids]
            lengths = [sum(trees[index][id].num_tokens for id in ids[index]) for index in ids]
            for place, index in enumerate(ids):
                for id in ids[index]:
                    compared = [*means[:place], returns[index][id], *means[place + 1 :]]
                    numbers[index][id] = baseline(compared, lengths)[place]
    return [
        _completed(tree, own, gamma, is_compared=len(trees) > 1)
        for tree, own in zip(trees, numbers, strict=True)
    ]


def _cohorts(
    trees: Sequence[Tree], peer: Callable[[CreditNode], Hashable]
) -> list[dict[int, list[str]]]:
    """Index of the tree -> ids of its calls, for all calls with an equal key that at least two
    trees have."""
    cohorts: dict[Hashable, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for index, tree in enumerate(trees):
        for id, node in tree.items():
            cohorts[peer(node)][index].append(id)
    return [cohort for cohort in cohorts.values() if len(cohort) > 1]


def _completed(tree: Tree, numbers: Numbers, gamma: float, is_compared: bool) -> Numbers:
    """``numbers`` in the order of ``tree``, with a number for each call without peers: nothing but
    its parent's advantage says how good its parent's return was, and its own reward counts as it
    is. All 0 in a group of one tree."""
    completed: Numbers = {}
    for id, node in tree.items():
        if id in numbers:
            completed[id] = numbers[id]
        elif node.parent is None or not is_compared:
            completed[id] = 0.0
        else:
            completed[id] = gamma * completed[node.parent] + node.reward
    return completed


Overlong = Literal["punish", "mask"]


class RolloutLength(NamedTuple):
    """The length of one rollout."""

    output: int
    """Sampled tokens."""
    input: int
    """Prompt tokens."""
    turns: int


class LengthLimits(NamedTuple):
    """The maximum lengths that the length penalty divides by."""

    output: int
    input: int
    turns: int


def soft_overlong(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO (2503.14476) eq. 13: 0 up to max_tokens - buffer, then a linear fall to -1 at
    max_tokens, and -1 beyond.

    max_tokens 100, buffer 20:  80 -> 0,  90 -> -0.5,  100 -> -1,  150 -> -1."""
    if buffer <= 0:
        return -1.0 if num_tokens > max_tokens else 0.0
    return min(0.0, max(-1.0, (max_tokens - buffer - num_tokens) / buffer))


def length_penalty(
    rewards: Sequence[float], lengths: Sequence[RolloutLength], most: LengthLimits, weight: float
) -> list[float]:
    """R'_i = R_i - max(0, mean(R)) · (w·out_i/max_out + 0.1·in_i/max_in + 0.1·turns_i/max_turns),
    for the rollouts of one group.

    The better a group does, the more brevity counts. A group whose mean is not above 0 is left
    unchanged: a negative mean would reward length."""
    centre = max(0.0, sum(rewards) / len(rewards)) if rewards else 0.0
    return [
        reward
        - centre
        * (
            weight * n.output / most.output
            + 0.1 * n.input / most.input
            + 0.1 * n.turns / most.turns
        )
        for reward, n in zip(rewards, lengths, strict=True)
    ]


def is_scored(trajectory: Trajectory) -> bool:
    """Whether the rollout has a usable reward. One that failed for external reasons has none and
    gives no signal."""
    return not why_unscored(trajectory)


def why_unscored(trajectory: Trajectory) -> str:
    """Why a rollout cannot be learnt from, as a predicate ("has no reward"); empty if it can."""
    if not trajectory.calls:
        return "has no call" + _last_error(trajectory)
    if not trajectory.rewards:
        return "has no reward" + _last_error(trajectory)
    everywhere = {
        "": trajectory.rewards,
        **{f" of call {id}": own for id, own in trajectory.call_rewards.items()},
    }
    for where, rewards in everywhere.items():
        for name, value in rewards.items():
            if not math.isfinite(value):
                return f"has the reward {name}={value}{where}"
    return ""


def _last_error(trajectory: Trajectory) -> str:
    return f": {trajectory.errors[-1]}" if trajectory.errors else ""


def tree_of(trajectory: Trajectory, weights: Mapping[str, float]) -> dict[str, CreditNode]:
    """Call id -> node, each parent before its children. ``weights`` are the task's, by reward
    name."""
    tree: dict[str, CreditNode] = {}
    for call in in_order(trajectory):
        rewards = trajectory.rewards if not tree else trajectory.call_rewards.get(call.id, {})
        subtask = (call.question, call.context.digest if call.context else None)
        own, num = total(rewards, weights), num_sampled(call)
        tree[call.id] = CreditNode(
            parent_of(trajectory, call), call.depth, own, call.kind, subtask, num
        )
    return tree


def in_order(trajectory: Trajectory) -> list[Call]:
    """The calls of a trajectory, the root first and every other call after its parent. Calls of
    judges are left out."""
    calls = [call for call in trajectory.calls if call.kind != "judge"]
    return sorted(calls, key=lambda call: (call.depth, call is not trajectory.root))


def parent_of(trajectory: Trajectory, call: Call) -> str | None:
    """Id of the parent of ``call``. A continuation of the root is put under the root, since the two
    have no common parent."""
    while call.parent is None and call.fork is not None:
        root = trajectory.root.id
        if call.fork.call == root:
            return root
        call = trajectory.call(call.fork.call)
    return call.parent.call if call.parent is not None else None


def sampled(call: Call) -> Iterator[tuple[int, Turn, int]]:
    """(index, turn, number of sampled tokens) for each turn of ``call`` whose exact ids and
    log-probabilities are known."""
    for index, turn in enumerate(call.turns):
        if turn.num_ids is not None and turn.reply.token_ids and turn.reply.logprobs is not None:
            yield index, turn, len(turn.reply.token_ids)


def num_sampled(call: Call) -> int:
    """Number of tokens of ``call`` that can carry policy-gradient weight."""
    return sum(num for _, _, num in sampled(call))


def was_cut_off(call: Call) -> bool:
    """Whether a limit ended the call or its last reply."""
    by_limit = call.stop is not None and call.stop.is_truncated()
    return by_limit or (bool(call.turns) and call.turns[-1].reply.finish == "length")


def ends_in_cut_reply(call: Call) -> bool:
    """True if the last reply of the call was cut at its token limit, and no limit of the run ended
    the call."""
    by_limit = call.stop is not None and call.stop.is_truncated()
    return bool(call.turns) and call.turns[-1].reply.finish == "length" and not by_limit


def length_of(trajectory: Trajectory) -> RolloutLength:
    """Sampled tokens, prompt tokens and turns of the whole tree."""
    turns = [turn for call in trajectory.calls for turn in call.turns]
    num_input = sum(len(turn.reply.prompt_ids or ()) for turn in turns)
    num_output = sum(len(turn.reply.token_ids or ()) for turn in turns)
    return RolloutLength(num_output, num_input, len(turns))
