"""Turns the rewards in a call tree into one advantage per call, by comparing the rollouts of the
same task item.

Also builds that tree from a trajectory, and counts its tokens and turns.

The functions work on a small tree without tokens or tensors:

    root 0: reward 4          return of a call = its own reward + γ · its parent's return
    ├── 0.0: reward 1             γ = 1:  0 -> 4,  0.0 -> 5,  0.1 -> 7
    └── 0.1: reward 3             γ = 0:  0 -> 4,  0.0 -> 1,  0.1 -> 3

``tree_of`` decides what a call's own reward is (the weighted sum of its named rewards; the root's
is the task's), which calls attempt the same sub-task (the same question over the same context), and
that a continuation of a call (``Call.fork``) counts as its sibling, under the same parent.

``Overlong`` decides how to treat a call whose last reply was cut off at its token limit, which says
little about the answer it would have given. ``punish`` (the default) keeps its score. ``mask``
keeps it in the baseline but removes its tokens from the loss (DAPO's overlong filtering). A call
that used up its turns, calls, tokens or dollars is a failure of the policy: it keeps its score with
both. The soft overlong penalty and the length penalty change the reward before any comparison.

The comparison itself is in ``group_estimators.py``, and the weights of tokens are computed in
``token_loss_weights.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Literal, NamedTuple, Protocol

from ramify.errors import ConfigError
from ramify.plugins import PluginRegistry
from ramify.tasks.base import total
from ramify.types.trajectory import Call, Trajectory, Turn


class CreditNode(NamedTuple):
    """A call in the call tree of a rollout, reduced to what credit assignment needs."""

    parent: str | None
    """Id of the parent call; None for the root."""
    depth: int
    reward: float = 0.0
    """The call's own reward. For the root, it is the reward of the task."""
    role: str = "rlm"
    subtask: Hashable = None
    """Identifies the call's question and context. Calls with equal values attempt the same
    sub-task.
    """
    num_tokens: int = 0
    """Number of tokens sampled in the call."""
    is_agent: bool = False
    """Whether the call is one of several agents of the rollout, each of which has a separate
    reward.
    """


class AdvantageFunction(Protocol):
    """A function that turns the returns of several attempts at the same task into their
    advantages.
    """

    def __call__(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        """Return the advantage of each attempt.

        ``returns`` has one return per attempt. ``lengths`` has the number of tokens sampled in
        each, or is empty if unknown.
        """
        ...


Tree = Mapping[str, CreditNode]
"""Call id -> node. The first node is the root, and each parent comes before its children."""
Numbers = dict[str, float]
"""Call id -> advantage."""
Credit = Callable[[Sequence[Tree], AdvantageFunction, float], list[Numbers]]
"""Credit function: (trees of one group, baseline, γ of the tree) -> the advantage of each call, for
each tree.
"""


def root_credit(
    trees: Sequence[Tree], baseline: AdvantageFunction, gamma: float = 1.0
) -> list[Numbers]:
    """Give every call the advantage of the root call of its tree, as trainers without call trees
    do.

    The rewards of other calls, and γ, are ignored.

    roots 4 and 0, mean baseline: every call of the first tree gets 2, of the second -2.

    If a rollout has several agents with own rewards (self-play, best of n), each of them is an
    attempt: agents 1 and -1 in each of two trees: every 1 gets 1, every -1 gets -1.
    """
    lengths = [sum(node.num_tokens for node in tree.values()) for tree in trees]
    if any(len(compared_call_ids(tree)) > 1 for tree in trees):
        return _by_agent(trees, baseline)
    rewards = [tree[_root(tree)].reward for tree in trees]
    advantages = validate_advantages(baseline, rewards, baseline(rewards, lengths))
    return [dict.fromkeys(tree, value) for tree, value in zip(trees, advantages, strict=True)]


def _by_agent(trees: Sequence[Tree], baseline: AdvantageFunction) -> list[Numbers]:
    """Return each call's advantage, found by comparing the agents of all call trees by reward.

    Agents are calls that the task rewards separately.

    A fork of an agent's call gets the advantage of that agent. Any other call gets the advantage of
    the first agent in its tree.
    """
    places = [(index, id) for index, tree in enumerate(trees) for id in compared_call_ids(tree)]
    agents = [trees[index][id] for index, id in places]
    rewards = [node.reward for node in agents]
    values = validate_advantages(
        baseline, rewards, baseline(rewards, [node.num_tokens for node in agents])
    )
    by_place = dict(zip(places, values, strict=True))
    numbers: list[Numbers] = []
    for index, tree in enumerate(trees):
        first = by_place[index, compared_call_ids(tree)[0]]
        numbers.append({})
        for id, node in tree.items():
            above = first if node.parent is None else numbers[-1][node.parent]
            numbers[-1][id] = by_place.get((index, id), above)
    return numbers


def per_role_credit(
    trees: Sequence[Tree], baseline: AdvantageFunction, gamma: float = 1.0
) -> list[Numbers]:
    """Compare each call's own reward with the rewards of calls of the same role and depth in the
    *other* trees, and add the difference to the parent's advantage.

    If no other tree has such a call, the call's own reward is added in full.

    For example, with γ = 1 and the mean of the others as baseline: the roots have rewards 4 and 0,
    and the children have rewards 1, 3 in one tree and 1, 5 in the other. The roots get ±4, and the
    children 4 + (1-3), 4 + (3-3), -4 + (1-2) and -4 + (5-2).
    """
    by_role = _Peers(trees, _role)
    return _advantages(trees, baseline, gamma, by_role.across)


def subtask_credit(
    trees: Sequence[Tree], baseline: AdvantageFunction, gamma: float = 1.0
) -> list[Numbers]:
    """Compare each call's reward with attempts at the same sub-task (same question and context) in
    other trees, and add the difference to the parent's advantage.

    This has less variance than ``per_role`` if parents split their work alike.

    If no other tree attempted the sub-task, the call is compared with other attempts in its own
    tree. If there are none either, it is compared as in ``per_role``.
    """
    if len(trees) == 1:
        return [_single_tree(trees[0], gamma, _subtask)]
    by_subtask, by_role = _Peers(trees, _subtask), _Peers(trees, _role)

    def rewards(index: int, id: str) -> list[float] | None:
        return (
            by_subtask.across(index, id)
            or by_subtask.within(index, id, by_role)
            or by_role.across(index, id)
        )

    return _advantages(trees, baseline, gamma, rewards)


def leave_one_child_out(
    trees: Sequence[Tree], baseline: AdvantageFunction, gamma: float = 1.0
) -> list[Numbers]:
    """Compare each call's own reward with those of its siblings, the other children of its parent,
    and add the difference to the parent's advantage.

    A parent's success is passed to all its children, and better children get more. An only child is
    compared with the calls of its role and depth in other trees. This is unbiased if siblings do
    not depend on each other, as in one batch.

    For example, a parent has the advantage 2, γ is 1, the baseline is the mean of the others, and
    the children have rewards 1, 3 and 5. They get 2 + (1-4) = -1, 2 + (3-3) = 2 and 2 + (5-2) =
    5."""
    if len(trees) == 1:
        return [_single_tree(trees[0], gamma, _parent)]
    siblings, by_role = _Peers(trees, _parent), _Peers(trees, _role)

    def rewards(index: int, id: str) -> list[float] | None:
        return siblings.within(index, id, by_role) or by_role.across(index, id)

    return _advantages(trees, baseline, gamma, rewards)


CREDITS = PluginRegistry(
    "credit",
    "ramify.credits",
    {
        "root": root_credit,
        "per_role": per_role_credit,
        "hierarchical": subtask_credit,
        "leave_one_child_out": leave_one_child_out,
    },
)
"""Name -> credit function. ``@CREDITS.register("mine")`` adds one; a dotted path to a function also
works.

Example:
    rl.algorithm.credit=per_role            # in a recipe, by name
"""


def _role(node: CreditNode) -> Hashable:
    return (node.role, node.depth)


def _subtask(node: CreditNode) -> Hashable:
    return (node.role, node.depth, node.subtask)


def _parent(node: CreditNode) -> Hashable:
    return node.parent


def _root(tree: Tree) -> str:
    return next(iter(tree))


def compared_call_ids(tree: Tree) -> list[str]:
    """Return the ids of the calls whose rewards are compared directly: the root or, in a rollout
    with several agents, each agent's call.
    """
    return [id for id, node in tree.items() if node.is_agent] or [_root(tree)]


def inherited_returns(tree: Tree, gamma: float) -> Numbers:
    """Compute the RL return of each call: its own reward plus γ times its parent's return."""
    returns: Numbers = {}
    for id, node in tree.items():
        returns[id] = node.reward + (
            gamma * returns[node.parent] if node.parent is not None else 0.0
        )
    return returns


OwnRewards = Callable[[int, str], list[float] | None]
"""Function that gets the index of a tree and the id of a call below its root. It returns one
reward per tree, with which the call is compared, or None if nothing is comparable. The entry for
the call's own tree is the call's own reward.
"""


def _advantages(
    trees: Sequence[Tree], baseline: AdvantageFunction, gamma: float, own_rewards: OwnRewards
) -> list[Numbers]:
    """Compute each call's advantage by comparing its return with one return from every other tree.

    A call's return is its own reward plus γ times its parent's return. In the other trees,
    ``own_rewards`` gives the reward that replaces the call's own.

    So a call is compared with as many returns as its root, even if the other trees did not recurse,
    and its advantage has the same scale as the root's. With ``rloo``, a call's advantage is γ times
    the parent's advantage plus the difference between its own reward and the mean of the others.
    With ``dr_grpo`` this difference is multiplied by (n-1)/n. Trees with several agents are
    compared as by ``root``, since agents make no calls.
    """
    if any(len(compared_call_ids(tree)) > 1 for tree in trees):
        return _by_agent(trees, baseline)
    rewards = [tree[_root(tree)].reward for tree in trees]
    lengths = [tree[_root(tree)].num_tokens for tree in trees]
    numbers: list[Numbers] = []
    for index, tree in enumerate(trees):
        returns: dict[str, list[float]] = {}
        for id, node in tree.items():
            if node.parent is None:
                returns[id] = rewards
                continue
            own = own_rewards(index, id) or [
                node.reward if place == index else 0.0 for place in range(len(trees))
            ]
            returns[id] = [
                gamma * of_parent + reward
                for of_parent, reward in zip(returns[node.parent], own, strict=True)
            ]
        numbers.append(
            {
                id: validate_advantages(baseline, row, baseline(row, lengths))[index]
                for id, row in returns.items()
            }
        )
    return numbers


def validate_advantages(
    baseline: Callable[..., object], returns: Sequence[float], advantages: Sequence[float]
) -> Sequence[float]:
    """Check that advantages are finite and that there is one per return, and return them.

    Raises ConfigError otherwise. The check is needed because ``baseline``, which computed them, may
    come from a plug-in.
    """
    if len(advantages) != len(returns) or not all(map(math.isfinite, advantages)):
        owner = type(getattr(baseline, "__self__", baseline)).__name__
        raise ConfigError(
            f"{owner}.compare() gave {list(advantages)!r:.80} for the returns "
            f"{list(returns)!r:.80}: give a finite number for each"
        )
    return advantages


def own_advantages(
    trees: Sequence[Tree],
    compare: Callable[[Sequence[float], Sequence[int]], Sequence[float]],
) -> list[Numbers]:
    """Return an advantage for each non-root call that does not depend on its parent's advantage.

    It depends on the call's own reward. The reward is compared with those of calls of the same role
    and depth in other trees.
    """
    by_role = _Peers(trees, _role)
    numbers: list[Numbers] = []
    for index, tree in enumerate(trees):
        lengths = [other[_root(other)].num_tokens for other in trees]
        numbers.append({})
        for id, node in tree.items():
            if node.parent is None or not node.depth:
                continue
            own = by_role.across(index, id) or [
                node.reward if place == index else 0.0 for place in range(len(trees))
            ]
            numbers[-1][id] = validate_advantages(compare, own, compare(own, lengths))[index]
    return numbers


class _Peers:
    """The rewards of all calls below the roots of a rollout group, keyed for example by role and
    depth.

    Calls with equal keys are peers, whose rewards are comparable.
    """

    def __init__(self, trees: Sequence[Tree], key: Callable[[CreditNode], Hashable]) -> None:
        self._trees, self._key = trees, key
        self._rewards: dict[Hashable, dict[int, list[float]]] = {}
        for index, tree in enumerate(trees):
            for node in tree.values():
                if node.parent is not None:
                    by_tree = self._rewards.setdefault(key(node), {})
                    by_tree.setdefault(index, []).append(node.reward)
        self._means = {
            shared: {index: fmean(rewards) for index, rewards in by_tree.items()}
            for shared, by_tree in self._rewards.items()
        }

    def across(self, index: int, id: str) -> list[float] | None:
        """Return rewards for comparing a call with its peers in other call trees, one reward per
        tree.

        The call's own tree gets the call's own reward. Each other tree gets the mean reward of its
        peers. A tree without peers gets the mean over the other trees that have some. Returns None
        if no other tree has any.
        """
        node = self._trees[index][id]
        means = self._means[self._key(node)]
        others = [mean for place, mean in means.items() if place != index]
        if not others:
            return None
        expected = fmean(others)
        by_tree = [means.get(place, expected) for place in range(len(self._trees))]
        by_tree[index] = node.reward
        return by_tree

    def within(self, index: int, id: str, spread: _Peers) -> list[float] | None:
        """Return rewards for comparing a call with its peers in its own call tree.

        The rewards for the other trees are constructed. Returns one reward per tree, with the
        call's own reward for its own tree. The constructed rewards average to the mean reward of
        the peers in the call's tree. Their variation is that of the rewards that ``spread`` finds
        in the other trees, since an estimator that divides by the standard deviation needs some
        variation. Returns None if the call has no peers in its tree.
        """
        expected = self.mean_within(index, id)
        if expected is None:
            return None
        others = spread.across(index, id) or [0.0] * len(self._trees)
        del others[index]
        centre = fmean(others)
        by_tree = [expected + other - centre for other in others]
        by_tree.insert(index, self._trees[index][id].reward)
        return by_tree

    def mean_within(self, index: int, id: str) -> float | None:
        """Return the mean reward of the call's peers in its own tree, or None if it has
        none there.
        """
        node = self._trees[index][id]
        rewards = self._rewards[self._key(node)][index]
        num = len(rewards) - 1
        return (fsum(rewards) - node.reward) / num if num else None


def _single_tree(tree: Tree, gamma: float, key: Callable[[CreditNode], Hashable]) -> Numbers:
    """Return the advantages of the calls in a rollout group that has only one call tree.

    The root's advantage is 0. The root has nothing to be compared with. Each other call gets γ
    times its parent's advantage, plus the difference between its own reward and the mean of its
    peers in the tree.
    """
    peers, numbers = _Peers([tree], key), dict[str, float]()
    for id, node in tree.items():
        if node.parent is None:
            numbers[id] = 0.0
            continue
        expected = peers.mean_within(0, id)
        better = 0.0 if expected is None else node.reward - expected
        numbers[id] = gamma * numbers[node.parent] + better
    return numbers


Overlong = Literal["punish", "mask"]


class RolloutTokenCounts(NamedTuple):
    """The length of one rollout, in tokens and turns."""

    output: int
    """Number of sampled tokens."""
    input: int
    """Number of prompt tokens."""
    turns: int


class GroupLengthMaxima(NamedTuple):
    """The maximum numbers of sampled tokens, prompt tokens and turns in a group.

    The length penalty measures each rollout relative to them.
    """

    output: int
    input: int
    turns: int


def soft_overlong(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return the soft overlong penalty of DAPO (2503.14476, eq. 13).

    It is 0 up to ``max_tokens`` - ``buffer`` tokens, then falls linearly to -1 at ``max_tokens``,
    and is -1 beyond.

    For example, with ``max_tokens`` 100 and ``buffer`` 20, rollouts of 80, 90, 100 and 150 tokens
    get 0, -0.5, -1 and -1.
    """
    if buffer <= 0:
        return -1.0 if num_tokens > max_tokens else 0.0
    return min(0.0, max(-1.0, (max_tokens - buffer - num_tokens) / buffer))


def subtract_length_penalty(
    rewards: Sequence[float],
    lengths: Sequence[RolloutTokenCounts],
    most: GroupLengthMaxima,
    weight: float,
) -> list[float]:
    """Subtract a length penalty from the rewards of one group's rollouts, and return the results.

    For rollout i: R'_i = R_i - max(0, mean(R)) · (w·out_i/max_out + 0.1·in_i/max_in +
    0.1·turns_i/max_turns). Here out and in are sampled and prompt tokens, and w is the option
    ``length_weight``.

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


def has_usable_reward(trajectory: Trajectory) -> bool:
    """Return True if the rollout has a usable reward.

    A rollout that failed for external reasons has none.
    """
    return not why_unusable(trajectory)


def why_unusable(trajectory: Trajectory) -> str:
    """Return why a rollout cannot be learned from, as a predicate such as "has no reward".

    Returns an empty string if the rollout is usable.
    """
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
    """Return the call tree of a rollout as a mapping from call id to node, with each parent before
    its children.

    ``weights`` maps each reward name to the task's weight for it.
    """
    tree: dict[str, CreditNode] = {}
    agents = _agents(trajectory)
    for call in calls_parent_first(trajectory):
        is_agent = call.id in agents
        is_whole = not tree and not is_agent
        rewards = trajectory.rewards if is_whole else trajectory.call_rewards.get(call.id, {})
        subtask = (call.question, call.context.digest if call.context else None)
        own, num = total(rewards, weights), num_sampled_tokens(call)
        tree[call.id] = CreditNode(
            parent_id_of(trajectory, call), call.depth, own, call.kind, subtask, num, is_agent
        )
    return tree


def _agents(trajectory: Trajectory) -> set[str]:
    """Return the ids of the root calls that the task rewarded separately, if there are several.

    A fork counts only if an outside agent's request began it.
    """
    agents = {
        call.id
        for call in trajectory.calls
        if call.parent is None
        and (call.fork is None or call.cause is not None)
        and call.id in trajectory.call_rewards
    }
    return agents if len(agents) > 1 else set()


def calls_parent_first(trajectory: Trajectory) -> list[Call]:
    """Return the calls of a trajectory, with the root first and each other call after its parent.

    Calls to judge models are left out.
    """
    calls = [call for call in trajectory.calls if call.kind != "judge"]
    return sorted(calls, key=lambda call: (call.depth, call is not trajectory.root))


def parent_id_of(trajectory: Trajectory, call: Call) -> str | None:
    """Return the id of the parent of ``call``, or None for a root.

    A fork of a root call has no parent to share with it, and counts as a child of that root.
    """
    is_fork = False
    while call.parent is None and call.fork is not None:
        is_fork, call = True, trajectory.call(call.fork.call)
    if call.parent is None:
        return call.id if is_fork else None
    return call.parent.call


def sampled_turns(call: Call) -> Iterator[tuple[int, Turn, int]]:
    """Yield index, turn and number of sampled tokens for each turn of ``call`` with exact token ids
    and log-probabilities.
    """
    for index, turn in enumerate(call.turns):
        if turn.num_ids is not None and turn.reply.token_ids and turn.reply.logprobs is not None:
            yield index, turn, len(turn.reply.token_ids)


def num_sampled_tokens(call: Call) -> int:
    """Return the number of tokens of ``call`` that can contribute to a policy-gradient loss."""
    return sum(num for _, _, num in sampled_turns(call))


def was_cut_off(call: Call) -> bool:
    """Return True if a limit ended the call or cut off its last reply."""
    by_limit = call.stop is not None and call.stop.is_truncated()
    return by_limit or (bool(call.turns) and call.turns[-1].reply.finish == "length")


def ends_in_cut_reply(call: Call) -> bool:
    """Return True if the call's last reply hit its token limit and no run limit ended the call."""
    by_limit = call.stop is not None and call.stop.is_truncated()
    return bool(call.turns) and call.turns[-1].reply.finish == "length" and not by_limit


def rollout_token_counts(trajectory: Trajectory) -> RolloutTokenCounts:
    """Count the sampled tokens, the prompt tokens and the turns of the whole call tree."""
    turns = [turn for call in trajectory.calls for turn in call.turns]
    num_input = sum(len(turn.reply.prompt_ids or ()) for turn in turns)
    num_output = sum(len(turn.reply.token_ids or ()) for turn in turns)
    return RolloutTokenCounts(num_output, num_input, len(turns))
