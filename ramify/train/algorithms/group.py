"""The shape that nearly all estimators share: rollouts of one task are compared, each call gets a
number, each token a weight. They differ in the baseline, so that all options of credit, length and
weight go with each.

    scored group ── length ──> rewards ── judge: credit(baseline) ──> a number per call ── weight ──> streams per token

Decides which rollouts count (one without a reward, or with one that is no number, is named and left
out; its group goes on), which groups teach nothing, and that whatever is normalised over a step is
so before weights. Leaves out what is done with the streams: the loss, clipping and the anchor are
the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.algorithms import token_arithmetic as row_math
from ramify.train.algorithms.base import AlgorithmNeeds, AssignedStep
from ramify.train.optional_fields import check_optional
from ramify.train.signals import filters
from ramify.train.signals.baseline import Baseline
from ramify.train.signals.credit import CREDITS, CreditNode, Numbers
from ramify.train.signals.length import (
    LengthLimits,
    Overlong,
    RolloutLength,
    length_penalty,
    soft_overlong,
)
from ramify.train.signals.rollout_trees import (
    length_of,
    num_sampled,
    sampled,
    tree_of,
    was_cut_off,
    why_unscored,
)
from ramify.train.signals.weight import ALSO, Reduction, Share, Weights
from ramify.train.signals.weight import weights as token_weights
from ramify.train.token_credit import AssignedRollout, Stamps, TokenCredit
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Call, Group, Trajectory

_MOST_NAMED = 3
"""Rollouts of a step that are named where they cannot be learnt from."""


class GroupOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of every algorithm with a group baseline."""

    credit: str = "per_role"
    """How a tree's reward reaches its calls: a name of ``signals/credit.py``, or a dotted path."""
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
    drop_zero_variance: bool = True
    """Leave groups without any advantage out of the step (the zero-variance filter)."""
    overlong: Overlong = "punish"
    """A cut-off call counts as what it scored, or carries no loss (``mask``)."""
    max_rollout_tokens: int | None = None
    """Sampled tokens of a rollout at which the soft punishment is full, and the constant of
    ``reduction=constant``; None: no punishment."""
    overlong_buffer: int | None = None
    """Tokens before ``max_rollout_tokens`` over which the punishment grows from 0 to -1;
    None: no punishment."""
    length_weight: float = 0.0
    """Of the length penalty, relative to the group's mean reward; 0: none."""
    normalise: bool = False
    """Bring the advantages of all tokens of a step to mean 0 and standard deviation 1."""
    kl_reward: float = 0.0
    """What each token is charged of its k1 to the reference policy (o - ref), taken off its
    advantage and those of the tokens before it in its call; 0: nothing. ``loss.kl_beta`` is the KL
    in the loss."""

    def __post_init__(self) -> None:
        CREDITS.of(self.credit)
        if ALSO.get(self.reduction, self.reduction) == "constant" and not self.max_rollout_tokens:
            raise ConfigError(
                f"reduction={self.reduction} divides by max_rollout_tokens: give it, the most that "
                "a rollout samples"
            )
        lengths = {"overlong_buffer": self.overlong_buffer}
        lengths |= {"max_rollout_tokens": self.max_rollout_tokens}
        check_optional("algorithm", "no punishment", **lengths)
        if min(self.gamma_tree, self.length_weight, self.kl_reward) < 0:
            raise ConfigError("gamma_tree, length_weight and kl_reward cannot be negative")

    @property
    def has_group_baseline(self) -> bool:
        return True

    @property
    def needs(self) -> AlgorithmNeeds:
        return AlgorithmNeeds(
            streams=frozenset({"old_logprobs", "ref_logprobs"} if self.kl_reward else ())
        )

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        """The KL in the reward, and what had to wait for it."""
        return row_math.add_kl(rows, self.kl_reward, 1.0, normalise=self.normalise)


Judge = Callable[[Group, Sequence[Mapping[str, CreditNode]]], Sequence[Numbers]]
"""(a group of usable rollouts, their trees) -> a number for each call."""


class _Rollout(NamedTuple):
    trajectory: Trajectory
    tree: dict[str, CreditNode]
    numbers: Numbers
    """Call id -> advantage."""


def assigned_rollout(
    groups: Sequence[Group],
    task_weights: Mapping[str, float],
    options: GroupOptions,
    baseline: Baseline,
    every_token: bool,
) -> AssignedStep:
    """The streams of one step: the whole of every algorithm that has a baseline over a group and
    nothing else."""

    def judge(group: Group, trees: Sequence[Mapping[str, CreditNode]]) -> Sequence[Numbers]:
        found: Sequence[Numbers] = CREDITS.of(options.credit)(trees, baseline, options.gamma_tree)
        return found

    return judged(groups, task_weights, options, judge, every_token)


def judged(
    groups: Sequence[Group],
    task_weights: Mapping[str, float],
    options: GroupOptions,
    judge: Judge,
    every_token: bool,
    *,
    gamma: float = 1.0,
    has_baseline: bool = True,
) -> AssignedStep:
    """The streams of one step, by what ``judge`` says of each call. ``gamma``: what a token gets of
    its call's number is discounted by it, once for each token that was sampled after.
    ``has_baseline``: numbers of 0 teach nothing."""
    usable = [_usable(group) for group in groups]
    rollouts = [_rollouts(group, task_weights, options, judge) for group in usable]
    with_signal = [
        group
        for group in rollouts
        if not has_baseline or filters.has_signal([each.numbers for each in group])
    ]
    kept = with_signal if options.drop_zero_variance and has_baseline else rollouts
    counts = [[_counts(each, options) for each in group] for group in kept]
    weights, denominator = token_weights(
        counts, options.reduction, options.share, options.max_rollout_tokens or 1
    )
    spread = [
        [_spread(each.numbers, count, gamma) for each, count in zip(group, counted, strict=True)]
        for group, counted in zip(kept, counts, strict=True)
    ]
    if options.normalise and not options.kl_reward:
        row_math.whiten_all(
            [values for group in spread for each in group for values in each.values()]
        )
    every_token = every_token or options.normalise or bool(options.kl_reward) or not has_baseline
    stamped_ones = [
        _stamp(rollout, weight, values, every_token)
        for group, weighed, valued in zip(kept, weights, spread, strict=True)
        for rollout, weight, values in zip(group, weighed, valued, strict=True)
    ]
    stamped_ones = [rollout for rollout in stamped_ones if rollout.credits]
    return AssignedStep(
        stamped_ones,
        {"rl": denominator},
        _metrics(groups, rollouts, with_signal),
        _no_signal(groups, usable, with_signal, stamped_ones, options.has_group_baseline),
        _notes(groups),
    )


def _usable(group: Group) -> Group:
    """Without the rollouts that cannot be learnt from."""
    kept = [each for each in group.trajectories if not why_unscored(each)]
    return msgspec.structs.replace(group, trajectories=kept)


def _notes(groups: Sequence[Group]) -> list[str]:
    """Which rollouts had no reward, or one that is no number; the first by name, further ones
    counted."""
    found = [
        f"{each.id} is left out of its group: it {why}"
        for group in groups
        for each in group.trajectories
        if (why := why_unscored(each))
    ]
    more = len(found) - _MOST_NAMED
    return (
        [*found[:_MOST_NAMED], f"{more} further rollouts are left out likewise"]
        if more > 1
        else found
    )


def _rollouts(
    group: Group, task_weights: Mapping[str, float], options: GroupOptions, judge: Judge
) -> list[_Rollout]:
    trajectories = group.trajectories
    trees = [tree_of(trajectory, task_weights) for trajectory in trajectories]
    lengths = [length_of(trajectory) for trajectory in trajectories]
    roots = [next(iter(tree)) for tree in trees]
    rewards = _for_length(
        [tree[root].reward for tree, root in zip(trees, roots, strict=True)], lengths, options
    )
    for tree, root, reward in zip(trees, roots, rewards, strict=True):
        tree[root] = tree[root]._replace(reward=reward)
    numbers = judge(group, trees) if trees else []
    return [_Rollout(*each) for each in zip(trajectories, trees, numbers, strict=True)]


def _for_length(
    rewards: list[float], lengths: Sequence[RolloutLength], options: GroupOptions
) -> list[float]:
    """Rewards with what length takes off them."""
    if options.length_weight and lengths:
        most = LengthLimits(*(max(1, *(each[index] for each in lengths)) for index in range(3)))
        rewards = length_penalty(rewards, lengths, most, options.length_weight)
    if options.max_rollout_tokens and options.overlong_buffer:
        limit, buffer = options.max_rollout_tokens, options.overlong_buffer
        rewards = [
            r + soft_overlong(n.output, limit, buffer)
            for r, n in zip(rewards, lengths, strict=True)
        ]
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
        call.id: num_sampled(call) if _is_trained(call, options, cut_off) else 0
        for call in trajectory.calls
    }


def _spread(numbers: Numbers, counts: Mapping[str, int], gamma: float) -> dict[str, list[float]]:
    """Call id -> the advantage of each of its tokens that may carry loss."""
    return {
        id: [numbers[id] * gamma ** (num - 1 - index) for index in range(num)]
        for id, num in counts.items()
        if num
    }


def _stamp(
    rollout: _Rollout,
    weights: Weights,
    values: Mapping[str, list[float]],
    every_token: bool,
) -> AssignedRollout:
    """Streams for every turn that has both a weight and an advantage, or that has a weight
    alone."""
    credits: Stamps = {}
    for call in rollout.trajectory.calls:
        weight, start = weights[call.id], 0
        for index, _, num in sampled(call) if weight else ():
            advantages = values[call.id][start : start + num]
            start += num
            if every_token or any(abs(value) > filters.EPSILON for value in advantages):
                credits[call.id, index] = TokenCredit(advantages=advantages, rl=[weight] * num)
    return AssignedRollout(rollout.trajectory, credits)


def _metrics(
    groups: Sequence[Group],
    by_group: Sequence[Sequence[_Rollout]],
    with_signal: Sequence[Sequence[_Rollout]],
) -> dict[str, float]:
    rollouts = [each for group in by_group for each in group]
    rewards = [next(iter(each.tree.values())).reward for each in rollouts]
    children = [
        node.reward for each in rollouts for node in each.tree.values() if node.parent is not None
    ]
    found = {
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "groups_with_signal": float(len(with_signal)),
        "zero_variance": _zero_variance(by_group),
        "failed_rollouts": float(sum(len(group.trajectories) for group in groups) - len(rollouts)),
        "calls_per_rollout": 1 + len(children) / len(rollouts) if rollouts else 0.0,
    }
    if children:
        found["child_reward"] = sum(children) / len(children)
    return found


def _zero_variance(groups: Sequence[Sequence[_Rollout]]) -> float:
    """The share of groups whose rollouts all came to the same reward."""
    rewards = [
        [next(iter(each.tree.values())).reward for each in group] for group in groups if group
    ]
    return sum(min(each) == max(each) for each in rewards) / len(rewards) if rewards else 0.0


def _no_signal(
    groups: Sequence[Group],
    usable: Sequence[Group],
    with_signal: Sequence[object],
    assigned_rollout: Sequence[AssignedRollout],
    has_baseline: bool,
) -> str:
    if assigned_rollout:
        return ""
    if not any(group.trajectories for group in usable):
        failed = sum(len(group.trajectories) for group in groups)
        return f"none of {failed} rollouts came to a reward; their errors are in the trajectories"
    if has_baseline and all(len(group.trajectories) < 2 for group in usable):
        return "no group has two rollouts, so none has anything to be compared with"
    if not with_signal:
        return f"in each of {len(groups)} groups all rollouts did equally well"
    return (
        "all calls with an advantage were masked, or came without token ids and log-probabilities"
    )
