"""RL estimators that compare the rollouts of one task item with each other.

They differ only in the formula of their method ``compare``.

    [n returns], [n lengths] ──compare──> [n advantages]       for n attempts at the same thing

    returns 3, 1, 1, 3     dr_grpo: 1, -1, -1, 1   grpo: ±0.866   rloo: ±4/3   maxrl: ±0.5
    returns 3, 1, 0, 0     pass_at_k: 2/std, 0, 0, 0

The stack of a call of ``compare``, from the step's groups down:

    GroupAlgorithmOptions.assign_advantages  rewards before it, weights of tokens after it
    per_role, or another credit              which calls are attempts at the same
                                             (credit_assignment.py)
    DrGRPO.compare                           here

A single attempt cannot be compared with others, so its advantage
is 0 (two public implementations return the raw reward). Estimators with state, a critic or a
greedy rollout are in the file of their name.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from ramify.train.advantages import token_arithmetic as row_math
from ramify.train.advantages.advantage_pipeline import EPSILON, GroupAlgorithmOptions
from ramify.train.advantages.credit_assignment import Overlong
from ramify.train.advantages.token_loss_weights import Reduction
from ramify.types.training_sequences import TokenSequence, rollout_of


def subtract_mean(returns: Sequence[float]) -> list[float]:
    """Subtract the mean from each return: R_i - mean(R).

    The result is exactly 0 if all returns are equal, regardless of rounding.
    """
    if len(returns) < 2 or min(returns) == max(returns):
        return [0.0] * len(returns)
    centre = statistics.fmean(returns)
    return [value - centre for value in returns]


class DrGRPO(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="dr_grpo"):
    """Dr.GRPO (2503.20783), the default estimator: the advantage is a rollout's reward minus the
    mean of its group, without division by the standard deviation.

        A_i = R_i - mean(R)             rewards 1, 0, 0, 0: advantages 0.75, -0.25, -0.25, -0.25

    Without the division, advantages keep their scale on both hard and easy tasks."""

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        return subtract_mean(returns)


class GRPO(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="grpo"):
    """GRPO (2402.03300): the advantage is a rollout's reward minus the mean of its group, divided
    by the group's standard deviation.

        A_i = (R_i - mean(R)) / (std(R) + epsilon), with the unbiased std

    rewards 1, 0, 0, 0: std 0.5, advantages 1.5, -0.5, -0.5, -0.5. The division amplifies rare
    successes and rare failures. It made the training of small policies unstable (see
    ``docs/learning.md``), so GRPO is not the default."""

    epsilon: float = EPSILON

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        centred = subtract_mean(returns)
        if not any(centred):
            return centred
        std = statistics.stdev(returns)
        return [value / (std + self.epsilon) for value in centred]


class DAPO(GRPO, frozen=True, kw_only=True, tag_field="name", tag="dapo"):
    """DAPO's estimator (2503.14476): advantages as in GRPO, and a loss averaged over all tokens of
    the step.

    Calls whose last reply was cut off at its token limit are not trained on.

    Rewards 1, 0, 0, 0 give advantages 1.5, -0.5, -0.5, -0.5. ``rl.objective=dapo`` also sets
    DAPO's loss.

    Example:
        train.RlSpec(algorithm=train.DAPO(), loss=train.LossSpec(policy=train.PpoClip()))
    """

    reduction: Reduction = "token"
    overlong: Overlong = "mask"


class RLOO(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="rloo"):
    """RLOO (2402.14740): the advantage is a rollout's reward minus the mean of the other rollouts
    of its group.

        A_i = R_i - mean of the others = n/(n-1) · (R_i - mean(R))

    rewards 1, 0, 0, 0: advantages 1, -1/3, -1/3, -1/3"""

    kl_over: Literal["token", "rollout"] = "token"
    """Where the KL penalty ``kl_reward`` is subtracted. ``token``: from the advantages, each
    token's penalty from its own and from those of earlier tokens in its call. ``rollout``: its sum
    over a rollout from the rollout's reward before rewards are compared, as in the paper; set
    ``drop_zero_variance`` to false, so that groups of equal rewards stay in the step.
    """

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        scale = len(returns) / max(len(returns) - 1, 1)
        return [value * scale for value in subtract_mean(returns)]

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        if self.kl_over == "token" or not self.kl_reward:
            return super().finish(rows)
        # The comparison is linear, so the charges are compared by themselves.
        charges: dict[str, dict[str, float]] = {}
        calls = list(row_math.tokens_by_call(rows))
        for line in calls:
            row = line.parts[0][0]
            group = charges.setdefault(row.item, {})
            kl = float(
                (
                    line.per_token_values("old_logprobs") - line.per_token_values("ref_logprobs")
                ).sum()
            )
            name = rollout_of(row.name)
            group[name] = group.get(name, 0.0) + kl
        extra = {
            name: self.kl_reward * value
            for group in charges.values()
            for name, value in zip(group, self.compare(list(group.values())), strict=True)
        }
        for line in calls:
            name = rollout_of(line.parts[0][0].name)
            line.write_stream("advantages", line.per_token_values("advantages") - extra[name])
        if self.normalise:
            row_math.normalise_advantages(calls, self.normalise_epsilon)
        num = sum(len(tokens) for line in calls for _, tokens in line.parts)
        total = sum(value for group in charges.values() for value in group.values())
        return {"reward_kl": total / num if num else 0.0}


class MaxRL(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="maxrl"):
    """MaxRL (2602.02710): the advantage is a rollout's reward minus the mean of its group, divided
    by that mean.

        A_i = (R_i - mean(R)) / (mean(R) + epsilon), or 0 if the mean is not positive

    rewards 1, 0, 0, 0: advantages 3, -1, -1, -1. With rewards of 0 and 1 this follows the gradient
    of the log of the pass rate: the rarer a success, the larger its advantage."""

    epsilon: float = EPSILON

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        centre = statistics.fmean(returns) if returns else 0.0
        shift = centre + self.epsilon
        return [value / shift if centre > 0 else 0.0 for value in subtract_mean(returns)]


class OPO(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="opo"):
    """OPO (2505.23585): the advantage is a rollout's reward minus the length-weighted mean reward
    of its group.

        A_i = R_i - sum(len · R) / sum(len)

    rewards 1, 0 of 1 and 3 tokens: advantages 0.75, -0.25. Long rollouts have large gradients, so
    the baseline of least variance gives them more weight.
    """

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        centred = subtract_mean(returns)
        if not any(centred) or not sum(lengths):
            return centred
        weighted = sum(size * value for size, value in zip(lengths, returns, strict=True))
        centre = weighted / sum(lengths)
        return [value - centre for value in returns]


class PassAtKEstimator(
    GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="pass_at_k"
):
    """GRPO for pass@k: only a group's best rollout gets an advantage, its margin over the second
    best divided by the group's standard deviation.

        A = (best - second) / (std(R) + 1e-6) for the best, 0 for the others

    rewards 1, 0, 0, 0: std 0.5, advantages 2, 0, 0, 0. If two rollouts share the best reward, all
    advantages are 0. The goal is that one attempt succeeds, not that all do.
    """

    def compare(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        if not any(subtract_mean(returns)):
            return [0.0] * len(returns)
        first, second = sorted(returns, reverse=True)[:2]
        ahead = (first - second) / (statistics.stdev(returns) + EPSILON)
        return [ahead if value == first else 0.0 for value in returns]


class Hierarchical(DrGRPO, frozen=True, kw_only=True, tag_field="name", tag="hierarchical"):
    """Hierarchical GRPO: compare a call's own reward with the mean over attempts at the same
    sub-task, and add ``gamma_tree`` times its parent's advantage.

    Root calls are compared with the other roots of their group.

    For example, two rollouts have rewards 1 and 0. In each, the root delegates the sub-task
    "north", and these two calls have rewards 1 and 0. With ``gamma_tree=0`` the roots get
    advantages 0.5 and -0.5, and so do the two calls. A call whose sub-task no other call attempted
    is compared with calls of the same role.

    Example:
        train.RlSpec(algorithm=train.Hierarchical())
    """

    credit: str = "hierarchical"


class ReinforcePPBaseline(
    DrGRPO, frozen=True, kw_only=True, tag_field="name", tag="reinforce_pp_baseline"
):
    """REINFORCE++ with a baseline (2501.03262): the advantage is a rollout's reward minus the mean
    of its group, normalised over all tokens of the step.

    rewards 1, 0 | 1, 1, one token each: 0.5, -0.5 | 0, 0, then divided by their standard deviation
    0.408: ±1.225 | 0, 0. Zero-variance groups stay in the step, because they are part of what is
    normalised.

    Example:
        train.RlSpec(algorithm=train.ReinforcePPBaseline())
    """

    normalise: bool = True
    drop_zero_variance: bool = False
