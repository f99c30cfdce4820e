"""The shape that GRPO, Dr.GRPO and RLOO share: rollouts of one task are compared, each call gets a number, each token a
weight. They differ in the baseline alone, so that all options of credit, length and weight go with each.

    scored group ── length ──> rewards ── credit(baseline) ──> a number per call ── weight ──> streams per token

Leaves out what is done with the streams: the loss, clipping and the anchor are the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.train.algorithms.base import Stamping
from ramify.train.signals import filters
from ramify.train.signals.baseline import Baseline
from ramify.train.signals.credit import CREDITS, Node, Numbers
from ramify.train.signals.length import Length, Most, Overlong, length_penalty, soft_overlong
from ramify.train.signals.trees import is_scored, length_of, sampled, tree_of, was_cut_off
from ramify.train.signals.weight import Reduction, Share, Weights
from ramify.train.signals.weight import weights as token_weights
from ramify.train.stamps import Stamp, Stamped, Stamps
from ramify.types.trajectory import Call, Group, Trajectory

CreditName = Literal["root", "per_role", "hierarchical", "leave_one_child_out"]


class GroupOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of every algorithm with a group baseline."""

    credit: CreditName = "per_role"
    """How a tree's reward reaches its calls; see ``signals/credit.py``."""
    gamma_tree: float = 1.0
    """What a call is paid of its parent's return, on top of its own reward."""
    children: bool = True
    """Train the tokens of calls below the root."""
    llm_calls: bool = False
    """Train ``llm_query`` calls that the policy itself answered."""
    reduction: Reduction = "rollout"
    """What each token weighs; see ``signals/weight.py``."""
    share: Share = "token"
    """How a rollout's weight is shared among its calls."""
    drop_silent: bool = True
    """Leave groups without any advantage out of the step (the zero-variance filter)."""
    overlong: Overlong = "punish"
    """A cut-off call counts as what it scored, or carries no loss (``mask``)."""
    max_rollout_tokens: int = 0
    """Sampled tokens of a rollout at which the soft punishment is full, and the constant of ``reduction=constant``; 0:
    no punishment."""
    overlong_buffer: int = 0
    """Tokens before ``max_rollout_tokens`` over which the punishment grows from 0 to -1."""
    length_weight: float = 0.0
    """Of the length penalty, relative to the group's mean reward; 0: none."""

    def __post_init__(self) -> None:
        if self.credit not in CREDITS:
            raise ConfigError(f"unknown credit '{self.credit}': {nearest(self.credit, CREDITS)}")
        if self.reduction == "constant" and self.max_rollout_tokens < 1:
            raise ConfigError(
                "reduction=constant divides by max_rollout_tokens: give it, the most that a rollout samples"
            )
        if self.gamma_tree < 0 or self.length_weight < 0 or self.overlong_buffer < 0:
            raise ConfigError("gamma_tree, length_weight and overlong_buffer cannot be negative")

    @property
    def has_group_baseline(self) -> bool:
        return True


class _Rollout(NamedTuple):
    trajectory: Trajectory
    tree: dict[str, Node]
    numbers: Numbers
    """Call id -> advantage."""


def stamped(
    groups: Sequence[Group],
    task_weights: Mapping[str, float],
    options: GroupOptions,
    baseline: Baseline,
    every_token: bool,
) -> Stamping:
    """The streams of one step: the whole of every algorithm of this kind."""
    usable = [[each for each in group.trajectories if is_scored(each)] for group in groups]
    judged = [_judged(trajectories, task_weights, options, baseline) for trajectories in usable]
    loud = [group for group in judged if filters.has_signal([each.numbers for each in group])]
    kept = loud if options.drop_silent else judged
    counts = [[_counts(each, options) for each in group] for group in kept]
    weights, denominator = token_weights(counts, options.reduction, options.share, max(options.max_rollout_tokens, 1))
    rollouts = [
        _stamp(rollout, weight, every_token)
        for group, weighed in zip(kept, weights, strict=True)
        for rollout, weight in zip(group, weighed, strict=True)
    ]
    stamped_ones = [rollout for rollout in rollouts if rollout.stamps]
    return Stamping(
        stamped_ones,
        {"rl": denominator},
        _metrics(groups, judged, loud),
        _silence(groups, usable, loud, stamped_ones),
    )


def _judged(
    trajectories: Sequence[Trajectory], task_weights: Mapping[str, float], options: GroupOptions, baseline: Baseline
) -> list[_Rollout]:
    trees = [tree_of(trajectory, task_weights) for trajectory in trajectories]
    lengths = [length_of(trajectory) for trajectory in trajectories]
    roots = [next(iter(tree)) for tree in trees]
    rewards = _for_length([tree[root].reward for tree, root in zip(trees, roots, strict=True)], lengths, options)
    for tree, root, reward in zip(trees, roots, rewards, strict=True):
        tree[root] = tree[root]._replace(reward=reward)
    numbers = CREDITS[options.credit](trees, baseline, options.gamma_tree)
    return [_Rollout(*each) for each in zip(trajectories, trees, numbers, strict=True)]


def _for_length(rewards: list[float], lengths: Sequence[Length], options: GroupOptions) -> list[float]:
    """Rewards with what length takes off them."""
    if options.length_weight and lengths:
        most = Most(*(max(1, *(each[index] for each in lengths)) for index in range(3)))
        rewards = length_penalty(rewards, lengths, most, options.length_weight)
    if options.max_rollout_tokens and options.overlong_buffer:
        limit, buffer = options.max_rollout_tokens, options.overlong_buffer
        rewards = [r + soft_overlong(n.output, limit, buffer) for r, n in zip(rewards, lengths, strict=True)]
    return rewards


def _is_trained(call: Call, options: GroupOptions, cut_off_root: bool) -> bool:
    if options.overlong == "mask" and (cut_off_root or was_cut_off(call)):
        return False
    if call.kind == "judge":
        return False
    if call.parent is None:  # the root, also where it is one plain call
        return True
    return options.children if call.kind == "rlm" else options.llm_calls


def _counts(rollout: _Rollout, options: GroupOptions) -> dict[str, int]:
    """Call id -> tokens that may carry loss."""
    trajectory = rollout.trajectory
    cut_off = was_cut_off(trajectory.root)
    return {
        call.id: sum(num for _, _, num in sampled(call)) if _is_trained(call, options, cut_off) else 0
        for call in trajectory.calls
    }


def _stamp(rollout: _Rollout, weights: Weights, every_token: bool) -> Stamped:
    """Streams for every call that has both a weight and an advantage, or that has a weight alone."""
    stamps: Stamps = {}
    for call in rollout.trajectory.calls:
        weight, advantage = weights[call.id], rollout.numbers.get(call.id, 0.0)
        if weight and (every_token or abs(advantage) > filters.EPSILON):
            for index, _, num in sampled(call):
                stamps[call.id, index] = Stamp(advantages=[advantage] * num, rl=[weight] * num)
    return Stamped(rollout.trajectory, stamps)


def _metrics(
    groups: Sequence[Group], judged: Sequence[Sequence[_Rollout]], loud: Sequence[Sequence[_Rollout]]
) -> dict[str, float]:
    rollouts = [each for group in judged for each in group]
    rewards = [next(iter(each.tree.values())).reward for each in rollouts]
    children = [node.reward for each in rollouts for node in each.tree.values() if node.parent is not None]
    found = {
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "groups_with_signal": float(len(loud)),
        "failed_rollouts": float(sum(len(group.trajectories) for group in groups) - len(rollouts)),
        "calls_per_rollout": 1 + len(children) / len(rollouts) if rollouts else 0.0,
    }
    if children:
        found["child_reward"] = sum(children) / len(children)
    return found


def _silence(
    groups: Sequence[Group], usable: Sequence[Sequence[Trajectory]], loud: Sequence[object], stamped: Sequence[Stamped]
) -> str:
    if stamped:
        return ""
    if not any(usable):
        failed = sum(len(group.trajectories) for group in groups)
        return f"none of {failed} rollouts came to a reward; their errors are in the trajectories"
    if all(len(group) < 2 for group in usable):
        return "no group has two rollouts, so none has anything to be compared with"
    if not loud:
        return f"in each of {len(groups)} groups all rollouts did equally well"
    return "all calls with an advantage were masked, or came without token ids and log-probabilities"
