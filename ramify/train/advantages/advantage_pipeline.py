"""Compute advantages as most RL estimators do: compare rollouts, credit calls, weight tokens.

    RlStage.assign_credit                                     (../stages.py)
    └── assign_advantages         the steps below, in this order
        ├── StepAdvantageBuilder  group, task weights ── length ──> a tree of rewards per rollout
        ├── credit                which calls are compared, as per_role  (credit_assignment.py)
        │   └── compare           returns ──> advantages         (group_estimators.py)
        └── spread_advantages_to_tokens number per call ── normalise, weight ──> streams per token

Most estimators differ only in ``compare``, so all options for credit, length and weight work with
each of them. Others have their own ``assign_advantages`` with their formula between the same two
ends (``remax.py``, ``rae.py``). A rollout without a reward, or with a non-finite reward, is
reported and left out, and the rest of its group is still used. Groups without signal are found
here too, and normalisation over the step comes before weighting. The loss, clipping and the KL
penalty in the loss are in ``losses/``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.advantages import token_arithmetic as row_math
from ramify.train.advantages.base import (
    AlgorithmNeeds,
    OptimizerStepAdvantages,
    RolloutAdvantages,
    Stamps,
    TokenCredit,
)
from ramify.train.advantages.credit_assignment import (
    CREDITS,
    CreditNode,
    GroupLengthMaxima,
    Numbers,
    Overlong,
    RolloutTokenCounts,
    compared_call_ids,
    ends_in_cut_reply,
    num_sampled_tokens,
    rollout_token_counts,
    sampled_turns,
    soft_overlong,
    subtract_length_penalty,
    tree_of,
    why_unusable,
)
from ramify.train.advantages.token_loss_weights import (
    Reduction,
    RolloutTokenDivisor,
    Share,
    Weights,
    relative_call_weights,
)
from ramify.train.advantages.token_loss_weights import weights as token_weights
from ramify.train.config_redaction import check_none_or_positive
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Call, Group, Trajectory

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""
NO_ADVANTAGE = 1e-9
"""Largest absolute value of an advantage that counts as zero."""
_MOST_REASONS = 3
"""Maximum number of reasons per step for which unusable rollouts are reported."""


_credit_of = functools.cache(CREDITS.resolve)
"""Resolves the name of a credit function. Called when the options are checked."""


class GroupAlgorithmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options shared by every RL algorithm that compares a rollout with a group: the other rollouts
    of the same task item."""

    credit: str = "per_role"
    """How a tree's reward reaches its calls: a name that ``ramify plugins credit`` lists, or
    a dotted path."""
    gamma_tree: float = 1.0
    """Share of its parent's return that a call receives, in addition to its own reward."""
    children: bool = True
    """Train on the replies of calls below the root."""
    llm_calls: bool = False
    """Train on the replies of ``llm_query`` calls that the policy itself answered."""
    reduction: Reduction = "constant"
    """How much each token counts in the loss; see ``docs/algorithms.md``. With ``rollout``,
    which divides by the number of tokens of a rollout, wide trees count less."""
    rollout_tokens: int | None = None
    """The constant L by which ``reduction=constant`` divides the loss, in tokens per rollout. None:
    the running mean over previous steps (in a run's first step, its own mean)."""
    share: Share = "token"
    """How a rollout's weight is divided. ``token``: evenly among its tokens. ``call``: evenly among
    its calls, so that tokens of long calls count less."""
    kl_reduction: Reduction | None = None
    """How much each token counts in the KL penalty in the loss (``loss.kl_beta``). None: the same
    as ``reduction``."""
    drop_zero_variance: bool | Literal["calls"] = True
    """Leave groups without any advantage out of the step (the zero-variance filter). ``calls``:
    also each call whose own advantage is 0."""
    overlong: Overlong = "punish"
    """How to treat a call whose last reply was cut off at its token limit: ``punish`` keeps its
    score, ``mask`` excludes it from the loss, or excludes the whole tree if it is the root. A call
    that used up its turns, calls, tokens or dollars keeps its score with both."""
    max_rollout_tokens: int | None = None
    """Sampled tokens per rollout at which the soft overlong penalty reaches -1; None: no
    penalty."""
    overlong_buffer: int | None = None
    """Tokens before ``max_rollout_tokens`` over which the penalty grows from 0 to -1; None: no
    penalty."""
    length_weight: float = 0.0
    """Weight of the length penalty, relative to the group's mean reward; 0: no penalty."""
    normalise: bool = False
    """Normalise the advantages of all tokens of a step to mean 0 and standard deviation 1."""
    normalise_epsilon: float | None = None
    """Number that is added to the standard deviation before ``normalise`` divides by it. None: 1e-8
    is added to the variance instead."""
    value_reduction: Reduction | None = None
    """How much each token counts in the critic's loss. None: the same as ``reduction``."""
    kl_reward: float = 0.0
    """Factor β of the KL penalty in the reward; 0 for no penalty. For each token, the
    log-probability of the policy minus that of the reference policy is an estimate (k1) of their
    KL. β times this estimate is subtracted from the advantages of the token and of the tokens
    before it in its call. ``loss.kl_beta`` is the KL penalty in the loss."""
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """State carried over from previous steps, such as running means; stored in checkpoints."""

    def __post_init__(self) -> None:
        _credit_of(self.credit)
        mine, ours = type(self), GroupAlgorithmOptions
        if (
            mine is not ours
            and mine.compare is ours.compare
            and mine.assign_advantages is ours.assign_advantages
        ):
            raise ConfigError(f"{mine.__name__} has no formula: define compare()")
        lengths = {"overlong_buffer": self.overlong_buffer}
        lengths |= {"max_rollout_tokens": self.max_rollout_tokens}
        check_none_or_positive("algorithm", "a running mean", rollout_tokens=self.rollout_tokens)
        check_none_or_positive("algorithm", "no punishment", **lengths)
        distances = (self.gamma_tree, self.length_weight, self.kl_reward)
        if min(*distances, self.normalise_epsilon or 0.0) < 0:
            raise ConfigError(
                "gamma_tree, length_weight, kl_reward and normalise_epsilon cannot be negative"
            )

    @property
    def has_group_baseline(self) -> bool:
        return True

    @property
    def needs(self) -> AlgorithmNeeds:
        return AlgorithmNeeds(
            streams=frozenset({"old_logprobs", "ref_logprobs"} if self.kl_reward else ())
        )

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        """Return the advantages of n comparable attempts, computed from their returns.

        Each estimator overrides this method with its own formula.

        ``returns``: [n]. ``lengths``: [n] sampled tokens of each attempt, empty if unknown.
        """
        raise NotImplementedError(f"{type(self).__name__} has no formula: define compare()")

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        """Turn the rewards of a step's rollouts into an advantage and a loss weight for each token.

        The function named by the option ``credit`` chooses which calls of a group are compared, and
        ``compare`` subtracts their baseline.
        """
        step = StepAdvantageBuilder(groups, weights, self)
        credit = _credit_of(self.credit)
        for group in step.groups:
            group.advantages = credit(group.trees, self.compare, self.gamma_tree)
            _check_numbers(self.credit, group)
        return step.spread_advantages_to_tokens(every_token)

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        """Complete a step's advantages by subtracting the KL penalty, if ``kl_reward`` is set.

        Then normalise them, if that had to wait for the penalty. Returns metrics.
        """
        return row_math.subtract_kl_penalty(
            rows, self.kl_reward, 1.0, normalise=self.normalise, epsilon=self.normalise_epsilon
        )


class TurnCredit(NamedTuple):
    """The advantage of one turn, and the factor by which the turn's loss weight is multiplied.

    A turn is one model reply. Used by estimators that give the turns of a call different
    advantages.
    """

    advantage: float
    share: float = 1.0
    """Factor by which the turn's weight is multiplied; 0 excludes the turn from training. The
    continuations of a fork share the weight of one rollout.
    """


TurnCredits = dict[tuple[str, int], TurnCredit]
"""(call id, index of the turn in ``Call.turns``) -> its credit. Turns that are not listed are not
trained on.
"""


class _Rollout(NamedTuple):
    trajectory: Trajectory
    tree: dict[str, CreditNode]
    numbers: Numbers
    """Call id -> advantage."""
    turns: TurnCredits | None
    """Advantages of single turns. None: all turns of a call share the call's advantage."""


@dataclasses.dataclass
class ScoredRolloutGroup:
    """The usable rollouts of one task item, and their rewards.

    The estimator fills in their advantages.
    """

    group: Group
    """The group, without unusable rollouts."""
    trees: list[dict[str, CreditNode]]
    """For each rollout, its calls with their rewards. The root's reward already includes the length
    penalties.
    """
    advantages: Sequence[Numbers] = ()
    """For each rollout, the advantage of each call."""
    turns: Sequence[TurnCredits] = ()
    """For each rollout, the credit of individual turns, which replaces ``advantages``. Empty if no
    turn has separate credit.
    """

    def rollouts(self) -> list[_Rollout]:
        turns: Sequence[TurnCredits | None] = self.turns or [None] * len(self.trees)
        rows = zip(self.group.trajectories, self.trees, self.advantages, turns, strict=True)
        return [_Rollout(*row) for row in rows]


class StepAdvantageBuilder:
    """Builds the advantages of one optimizer step.

    Create it from scored groups, let the estimator set ``advantages`` on each of ``groups``, and
    call ``spread_advantages_to_tokens``.

    The constructor computes the reward of each call. ``spread_advantages_to_tokens`` gives each
    token its advantage and its weight.
    """

    def __init__(
        self, groups: Sequence[Group], weights: Mapping[str, float], options: GroupAlgorithmOptions
    ) -> None:
        """Compute the reward of each call in the rollout groups, including length penalties.

        ``weights`` maps each reward name to the task's weight for it.
        """
        self._given = groups
        self._options = options
        self._scored = [_score_group(group, weights, options) for group in groups]

    @property
    def groups(self) -> list[ScoredRolloutGroup]:
        """The rollout groups of the step that have at least one usable rollout."""
        return [each for each in self._scored if each.trees]

    def spread_advantages_to_tokens(
        self,
        every_token: bool,
        *,
        gamma: float = 1.0,
        has_baseline: bool = True,
        rescale: Callable[[Sequence[Numbers]], Sequence[Numbers]] | None = None,
    ) -> OptimizerStepAdvantages:
        """Turn the advantages of calls into an advantage and a loss weight for each token.

        ``gamma`` is a discount per token: a token's advantage is the call's, times ``gamma`` for
        each token sampled later in the call. With ``has_baseline``, a group in which all advantages
        are 0 carries no signal. ``rescale`` changes the advantages of all calls of the step
        together. Without it, advantages are normalised by token if ``options.normalise`` is set."""
        options = self._options
        rollouts = [each.rollouts() for each in self._scored]
        teaches = [not has_baseline or _has_group_signal(group) for group in rollouts]
        if rescale is not None:
            rollouts = _rescale_groups(rollouts, rescale)
        with_signal = [group for group, does in zip(rollouts, teaches, strict=True) if does]
        kept = with_signal if options.drop_zero_variance and has_baseline else rollouts
        counts = [[_loss_token_counts(rollout, options) for rollout in group] for group in kept]
        mean_tokens = RolloutTokenDivisor.from_saved_state(options.memory)
        divisor = options.rollout_tokens or mean_tokens.divisor(counts)
        weights, denominator = token_weights(counts, options.reduction, options.share, divisor)
        shares: dict[str, Sequence[Sequence[Weights]]] = {}
        for stream, other in (
            ("kl_share", options.kl_reduction),
            ("value_share", options.value_reduction),
        ):
            if other is not None:
                of_other = token_weights(counts, other, options.share, divisor)
                shares[stream] = relative_call_weights(of_other, (weights, denominator))
        by_token = [
            [
                _per_token(rollout, count, gamma)
                for rollout, count in zip(group, counted, strict=True)
            ]
            for group, counted in zip(kept, counts, strict=True)
        ]
        # With a KL penalty in the reward, ``finish`` normalises after it has added the penalty.
        if options.normalise and rescale is None and not options.kl_reward:
            row_math.whiten_all(
                [values for group in by_token for calls in group for values in calls.values()],
                options.normalise_epsilon,
            )
        every_token = (
            every_token or options.normalise or bool(options.kl_reward) or not has_baseline
        )
        assigned = [
            _assign_advantages(
                rollout,
                weights[place][index],
                by_token[place][index],
                {name: each[place][index] for name, each in shares.items()},
                every_token,
            )
            for place, group in enumerate(kept)
            for index, rollout in enumerate(group)
        ]
        assigned = [rollout for rollout in assigned if rollout.credits]
        return OptimizerStepAdvantages(
            assigned,
            {"rl": denominator},
            {**_metrics(self._given, rollouts, with_signal), "loss_rollout_tokens": divisor},
            _no_signal(
                self._given, self._scored, with_signal, assigned, options.has_group_baseline
            ),
            _notes(self._given),
            {**options.memory, **mean_tokens.updated_with_step(counts).saved_state()},
        )


def _has_group_signal(group: Sequence[_Rollout]) -> bool:
    return has_signal(
        [
            rollout.numbers
            if rollout.turns is None
            else {f"{id}/{turn}": each.advantage for (id, turn), each in rollout.turns.items()}
            for rollout in group
        ]
    )


def _rescale_groups(
    groups: Sequence[Sequence[_Rollout]], rescale: Callable[[Sequence[Numbers]], Sequence[Numbers]]
) -> list[list[_Rollout]]:
    scaled = iter(rescale([rollout.numbers for group in groups for rollout in group]))
    return [[rollout._replace(numbers=next(scaled)) for rollout in group] for group in groups]


def has_signal(numbers: Sequence[Mapping[str, float]]) -> bool:
    """Return True if any call of a group's rollouts has a non-zero advantage.

    A group without one has no gradient, and would only dilute the weight of the other groups.
    """
    return any(abs(value) > NO_ADVANTAGE for tree in numbers for value in tree.values())


def _check_numbers(credit: str, group: ScoredRolloutGroup) -> None:
    """Raise ConfigError unless the credit function returned a finite advantage for each call.

    The function may come from a plug-in.
    """
    trees, numbers = group.trees, group.advantages
    if len(numbers) != len(trees):
        raise ConfigError(f"credit '{credit}' gave {len(numbers)} results for {len(trees)} trees")
    for tree, own in zip(trees, numbers, strict=True):
        for id in tree:
            if id not in own or not math.isfinite(own[id]):
                raise ConfigError(
                    f"credit '{credit}' gave call {id} the advantage {own.get(id)}: give each call "
                    "of a tree a finite number"
                )


def _usable_rollouts(group: Group) -> Group:
    """Return a copy of ``group`` without the rollouts that cannot be learned from."""
    kept = [trajectory for trajectory in group.trajectories if not why_unusable(trajectory)]
    return msgspec.structs.replace(group, trajectories=kept)


def _notes(groups: Sequence[Group]) -> list[str]:
    """Return messages for the user about rollouts that were left out, one for each reason.

    Each message has a count and an example. The first few reasons are given.

    Rollouts that the task could not score are reported by the stage (``score_failure_counts.py``).
    """
    by_reason: dict[str, list[str]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            if not trajectory.score_error and (why := why_unusable(trajectory)):
                by_reason.setdefault(why, []).append(_short_name(trajectory.id))
    notes = [
        f"{names[0]} is left out of its group: it {why}"
        if len(names) == 1
        else f"{len(names)} rollouts are left out of their groups, such as {names[0]}: it {why}"
        for why, names in by_reason.items()
    ]
    more = sum(len(names) for names in list(by_reason.values())[_MOST_REASONS:])
    others = [f"{more} more are left out for other reasons"] if more else []
    return [*notes[:_MOST_REASONS], *others]


def _short_name(id: str) -> str:
    """Return the name of a rollout within its training step, without the step's number.

    The message about it names the step, which is counted through all stages, while the rollout's id
    counts those of its stage.
    """
    step, _, name = id.partition("/")
    return name if name and step.startswith("step=") else id


def _score_group(
    group: Group, task_weights: Mapping[str, float], options: GroupAlgorithmOptions
) -> ScoredRolloutGroup:
    """Return the usable rollouts of ``group`` and the rewards by which they are compared.

    These include the length penalties.
    """
    group = _usable_rollouts(group)
    trajectories = group.trajectories
    trees = [tree_of(trajectory, task_weights) for trajectory in trajectories]
    lengths = [rollout_token_counts(trajectory) for trajectory in trajectories]
    roots = [next(iter(tree)) for tree in trees]
    rewards = _for_length(
        [tree[root].reward for tree, root in zip(trees, roots, strict=True)], lengths, options
    )
    for tree, root, reward in zip(trees, roots, rewards, strict=True):
        change = reward - tree[root].reward
        tree[root] = tree[root]._replace(reward=reward)
        for agent in compared_call_ids(tree)[1:]:
            tree[agent] = tree[agent]._replace(reward=tree[agent].reward + change)
    return ScoredRolloutGroup(group, trees)


def _for_length(
    rewards: list[float], lengths: Sequence[RolloutTokenCounts], options: GroupAlgorithmOptions
) -> list[float]:
    """Return ``rewards`` after the length penalties that the options request.

    These are the length penalty and the soft overlong penalty.
    """
    if options.length_weight and lengths:
        longest = GroupLengthMaxima(
            *(max(1, *(length[index] for length in lengths)) for index in range(3))
        )
        rewards = subtract_length_penalty(rewards, lengths, longest, options.length_weight)
    if options.max_rollout_tokens and options.overlong_buffer:
        limit, buffer = options.max_rollout_tokens, options.overlong_buffer
        rewards = [
            r + soft_overlong(n.output, limit, buffer)
            for r, n in zip(rewards, lengths, strict=True)
        ]
    return rewards


def _is_trained(call: Call, options: GroupAlgorithmOptions) -> bool:
    if call.kind == "judge":
        return False
    if call.parent is None:  # the root, even if it is a single plain call
        return True
    return options.children if call.kind == "rlm" else options.llm_calls


def _loss_token_counts(rollout: _Rollout, options: GroupAlgorithmOptions) -> dict[str, float]:
    """Return the number of each call's tokens that may contribute to the loss, keyed by call id.

    If turns have separate weights, each token counts with its turn's weight.
    """
    trajectory, masks = rollout.trajectory, options.overlong == "mask"
    if (turns := rollout.turns) is not None:  # these know about roots that were cut
        return {
            call.id: sum(
                turns[call.id, index].share * num
                for index, _, num in sampled_turns(call)
                if (call.id, index) in turns
            )
            if _is_trained(call, options)
            and not (masks and call.parent is not None and ends_in_cut_reply(call))
            else 0
            for call in trajectory.calls
        }
    is_root_cut = ends_in_cut_reply(trajectory.root)
    only = options.drop_zero_variance == "calls"
    return {
        call.id: num_sampled_tokens(call)
        if _is_trained(call, options)
        and not (masks and (is_root_cut or ends_in_cut_reply(call)))
        and not (only and abs(rollout.numbers[call.id]) <= NO_ADVANTAGE)
        else 0
        for call in trajectory.calls
    }


def _per_token(
    rollout: _Rollout, counts: Mapping[str, float], gamma: float
) -> dict[str, list[float]]:
    """Return the advantages of the tokens that may contribute to the loss, as one list per call
    id."""
    numbers = rollout.numbers
    if (turns := rollout.turns) is not None:
        return {
            call.id: [
                turns.get((call.id, index), _UNTRAINED).advantage
                for index, _, num in sampled_turns(call)
                for _ in range(num)
            ]
            for call in rollout.trajectory.calls
            if counts[call.id]
        }
    return {
        id: [numbers[id] * gamma ** (num - 1 - index) for index in range(int(num))]
        for id, num in counts.items()
        if num
    }


_UNTRAINED = TurnCredit(0.0, 0.0)


def _assign_advantages(
    rollout: _Rollout,
    weights: Weights,
    values: Mapping[str, list[float]],
    shares: Mapping[str, Weights],
    every_token: bool,
) -> RolloutAdvantages:
    """Return the advantages and loss weights of the tokens in a rollout's turns.

    Only turns with a weight and a non-zero advantage are included. With ``every_token``, a weight
    is enough.

    ``shares`` has the weights of each call's tokens in other terms of the loss, by the name of the
    term's stream.
    """
    credits: Stamps = {}
    for call in rollout.trajectory.calls:
        weight, start = weights[call.id], 0
        for index, _, num in sampled_turns(call) if weight else ():
            advantages = values[call.id][start : start + num]
            start += num
            share = 1.0
            if rollout.turns is not None:
                share = rollout.turns.get((call.id, index), _UNTRAINED).share
            if not share:
                continue
            if every_token or any(abs(value) > NO_ADVANTAGE for value in advantages):
                credit = TokenCredit(advantages=advantages, rl=[weight * share] * num)
                for name, of_calls in shares.items():
                    credit.streams[name] = [of_calls[call.id]] * num
                credits[call.id, index] = credit
    return RolloutAdvantages(rollout.trajectory, credits)


def _metrics(
    groups: Sequence[Group],
    by_group: Sequence[Sequence[_Rollout]],
    with_signal: Sequence[Sequence[_Rollout]],
) -> dict[str, float]:
    rollouts = [rollout for group in by_group for rollout in group]
    rewards = [next(iter(rollout.tree.values())).reward for rollout in rollouts]
    children = [node.reward for rollout in rollouts for node in rollout.tree.values() if node.depth]
    metrics = {
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "groups_with_signal": float(len(with_signal)),
        "zero_variance": _zero_variance(by_group),
        "failed_rollouts": float(sum(len(group.trajectories) for group in groups) - len(rollouts)),
        "calls_per_rollout": 1 + len(children) / len(rollouts) if rollouts else 0.0,
    }
    if children:
        metrics["child_reward"] = sum(children) / len(children)
    return metrics


def _zero_variance(groups: Sequence[Sequence[_Rollout]]) -> float:
    """Return the fraction of groups in which all rollouts have the same reward."""
    rewards = [
        [next(iter(rollout.tree.values())).reward for rollout in group] for group in groups if group
    ]
    same = sum(min(values) == max(values) for values in rewards)
    return same / len(rewards) if rewards else 0.0


def _no_signal(
    groups: Sequence[Group],
    scored: Sequence[ScoredRolloutGroup],
    with_signal: Sequence[object],
    rollouts: Sequence[RolloutAdvantages],
    has_baseline: bool,
) -> str:
    if rollouts:
        return ""
    if not any(each.trees for each in scored):
        failed = sum(len(group.trajectories) for group in groups)
        return f"none of {failed} rollouts has a reward; their errors are in the trajectories"
    if has_baseline and all(len(each.trees) < 2 for each in scored):
        return "no group has two rollouts, so no rollout can be compared with another"
    if not with_signal:
        return f"in each of {len(groups)} groups all rollouts did equally well"
    return (
        "all calls with an advantage were masked, are of another model, or have no token ids and "
        "log-probabilities"
    )
