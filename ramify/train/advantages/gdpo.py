"""GDPO (2601.05242): normalise each named reward within its group, sum the results with the task's
reward weights, and normalise the sums over the rollouts of the step.

Two rollouts have rewards ``correct`` 1 and 0, and ``short`` 0 and 0.1, with weights 1 and 0.5.
Each reward becomes ±0.707, so the sums are 0.354 and -0.354, and normalised over these two
rollouts ±0.707. If the rewards were summed before the comparison, the small one would have almost
no influence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

from ramify.errors import ConfigError
from ramify.train.advantages import token_arithmetic as row_math
from ramify.train.advantages.advantage_pipeline import StepAdvantageBuilder
from ramify.train.advantages.base import OptimizerStepAdvantages
from ramify.train.advantages.credit_assignment import CREDITS, Numbers, tree_of
from ramify.train.advantages.group_estimators import GRPO
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group


class GDPO(GRPO, frozen=True, kw_only=True, tag_field="name", tag="gdpo"):
    """The GDPO estimator: normalise each named reward within its group, then sum the results with
    the task's reward weights.

    Example:
        train.RlSpec(algorithm=train.GDPO())
    """

    normalise: bool = True
    over: Literal["rollouts", "tokens"] = "rollouts"
    """What ``normalise`` takes the mean and standard deviation over. ``rollouts``: the advantages
    of the root calls, so each rollout counts once. ``tokens``: all tokens, so long rollouts count
    more.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length_weight or self.overlong_buffer:
            raise ConfigError(
                "gdpo compares each reward separately: leave length_weight and overlong_buffer at "
                "0, and have the task score length as one of its rewards"
            )

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        step = StepAdvantageBuilder(groups, weights, self)
        credit = CREDITS.resolve(self.credit)
        for scored in step.groups:
            sums = [dict.fromkeys(tree, 0.0) for tree in scored.trees]
            names = _reward_names(scored.group)
            for name in names:
                only = {other: float(other == name) for other in names}
                trees = [tree_of(trajectory, only) for trajectory in scored.group.trajectories]
                numbers = credit(trees, self.compare, self.gamma_tree)
                for total, own in zip(sums, numbers, strict=True):
                    for call, value in own.items():
                        total[call] += weights.get(name, 1.0) * value
            scored.advantages = sums
        by_rollout = self.normalise and self.over == "rollouts"
        return step.spread_advantages_to_tokens(
            every_token, rescale=self._whiten_numbers if by_rollout else None
        )

    def _whiten_numbers(self, numbers: Sequence[Numbers]) -> list[Numbers]:
        roots = [next(iter(each.values())) for each in numbers]
        centre, std = (fmean(roots), stdev(roots)) if len(roots) > 1 else (0.0, 0.0)
        return [
            {id: (value - centre) / (std + self.epsilon) for id, value in each.items()}
            for each in numbers
        ]

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        is_late = self.normalise and self.over == "tokens"
        return row_math.subtract_kl_penalty(
            rows, self.kl_reward, 1.0, normalise=is_late, epsilon=self.normalise_epsilon
        )


def _reward_names(group: Group) -> list[str]:
    """Return the sorted names of all rewards in a group, both rollout-level and call-level."""
    return sorted(
        {
            name
            for trajectory in group.trajectories
            for rewards in (trajectory.rewards, *trajectory.call_rewards.values())
            for name in rewards
        }
    )
