"""REINFORCE++ (2501.03262): a call's return, discounted per token and normalised over all tokens of
the step.

A call of 3 tokens with return 1, another of 1 token with return 0, γ = 0.5: token returns
0.25, 0.5, 1 | 0, mean 0.4375, standard deviation 0.427, advantages -0.439, 0.146, 1.317, -1.024.
Rollouts of all tasks are compared with each other instead of groups, so one attempt per item is
enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.errors import ConfigError
from ramify.train.advantages import token_arithmetic as row_math
from ramify.train.advantages.advantage_pipeline import GroupAlgorithmOptions, StepAdvantageBuilder
from ramify.train.advantages.base import OptimizerStepAdvantages
from ramify.train.advantages.credit_assignment import inherited_returns
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group


class ReinforcePP(
    GroupAlgorithmOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="reinforce_pp",
):
    """The REINFORCE++ estimator: the advantage is a call's discounted return, normalised over all
    tokens of the step."""

    gamma: float = 1.0
    """Discount per sampled token; tokens between sampled ones (prompts, observations) do not
    count."""
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma={self.gamma} is not between 0 and 1")

    @property
    def has_group_baseline(self) -> bool:
        return False

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        step = StepAdvantageBuilder(groups, weights, self)
        for group in step.groups:
            group.advantages = [inherited_returns(tree, self.gamma_tree) for tree in group.trees]
        return step.spread_advantages_to_tokens(every_token, gamma=self.gamma, has_baseline=False)

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        return row_math.subtract_kl_penalty(
            rows,
            self.kl_reward,
            self.gamma,
            normalise=self.normalise,
            epsilon=self.normalise_epsilon,
        )
