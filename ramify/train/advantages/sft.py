"""Supervised fine-tuning: train with cross-entropy on the replies in trajectories, optionally only
in those with a high enough reward.

With ``min_reward`` this is rejection sampling (RAFT, STaR): of stored or freshly sampled
trajectories, only those that reached the reward are trained on. Each token weighs the same
(``reduction=token``), or each trajectory does.

    rewards 1, 0, 1 with min_reward=1: the first and the third are trained on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from ramify.tasks.base import total
from ramify.train.advantages.base import (
    OptimizerStepAdvantages,
    RolloutAdvantages,
    Stamps,
    TokenCredit,
)
from ramify.train.advantages.token_loss_weights import Reduction, Share
from ramify.train.advantages.token_loss_weights import weights as token_weights
from ramify.types.trajectory import Call, Group, Trajectory


class SFT(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="sft",
):
    """Supervised fine-tuning on the replies of trajectories.

    With ``min_reward``, only trajectories that reach this reward are imitated (rejection sampling).

    Example:
        train.SFT(min_reward=1.0)    # imitate only rollouts with a reward of at least 1
    """

    imitates: ClassVar[bool] = True
    """Always true: the loss is only cross-entropy on the replies, so the reduction that a policy
    loss prescribes does not apply.
    """
    min_reward: float | None = None
    """Minimum total reward that a trajectory needs to be trained on; None: train on all, even
    those without a reward.
    """
    min_call_reward: float | None = None
    """Minimum reward that a call below the root needs to be trained on, if it has its own reward;
    None: no minimum.
    """
    children: bool = True
    """Train on the replies of calls below the root."""
    llm_calls: bool = False
    """Train on the replies of ``llm_query`` calls."""
    reduction: Reduction = "token"
    """How much each token weighs; see ``docs/algorithms.md``."""
    share: Share = "token"
    """How a rollout's weight is divided. ``token``: evenly among its tokens. ``call``: evenly among
    its calls, so that tokens of long calls count less."""

    @property
    def has_group_baseline(self) -> bool:
        return False

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        kept = [
            [trajectory for trajectory in group.trajectories if self._is_good(trajectory, weights)]
            for group in groups
        ]
        counts = [
            [self._trained_token_counts(trajectory, weights) for trajectory in group]
            for group in kept
        ]
        per_token, denominator = token_weights(counts, self.reduction, self.share)
        rollouts = [
            RolloutAdvantages(trajectory, _credits(trajectory, weight))
            for group, weighed in zip(kept, per_token, strict=True)
            for trajectory, weight in zip(group, weighed, strict=True)
        ]
        rollouts = [rollout for rollout in rollouts if rollout.credits]
        num = sum(len(group.trajectories) for group in groups)
        metrics = {"kept": len(rollouts) / num if num else 0.0}
        if returns := [
            total(each.rewards, weights)
            for group in groups
            for each in group.trajectories
            if each.rewards
        ]:
            metrics["reward"] = sum(returns) / len(returns)
        no_signal = "" if rollouts else self._why_none(groups, weights)
        return OptimizerStepAdvantages(rollouts, {"ce": denominator}, metrics, no_signal)

    def _why_none(self, groups: Sequence[Group], weights: Mapping[str, float]) -> str:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        scored = [total(each.rewards, weights) for each in trajectories if each.rewards]
        best = f"the best reward is {max(scored):g}" if scored else "none has a reward"
        why = "" if self.min_reward is None else f", with min_reward={self.min_reward:g}: {best}"
        return f"none of {len(trajectories)} trajectories qualifies for training{why}"

    def _is_good(self, trajectory: Trajectory, weights: Mapping[str, float]) -> bool:
        if self.min_reward is None:
            return True
        return bool(trajectory.rewards) and total(trajectory.rewards, weights) >= self.min_reward

    def _trained_token_counts(
        self, trajectory: Trajectory, weights: Mapping[str, float]
    ) -> dict[str, int]:
        return {
            call.id: sum(num for _, num in _replies_with_ids(call))
            if self._is_trained(trajectory, call, weights)
            else 0
            for call in trajectory.calls
        }

    def _is_trained(self, trajectory: Trajectory, call: Call, weights: Mapping[str, float]) -> bool:
        if call.parent is None:
            return True
        if call.kind == "judge" or not (self.children if call.kind == "rlm" else self.llm_calls):
            return False
        own = trajectory.call_rewards.get(call.id)
        return (
            own is None
            or self.min_call_reward is None
            or total(own, weights) >= self.min_call_reward
        )


def _replies_with_ids(call: Call) -> list[tuple[int, int]]:
    """Return the index and the number of sampled tokens of each turn whose reply has token ids.

    Log-probabilities may be missing, since cross-entropy does not need them.
    """
    return [
        (index, len(turn.reply.token_ids))
        for index, turn in enumerate(call.turns)
        if turn.num_ids is not None and turn.reply.token_ids
    ]


def _credits(trajectory: Trajectory, weights: Mapping[str, float]) -> Stamps:
    return {
        (call.id, index): TokenCredit(ce=[weights[call.id]] * num)
        for call in trajectory.calls
        if weights[call.id]
        for index, num in _replies_with_ids(call)
    }
