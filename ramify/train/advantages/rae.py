"""RAE, role-conditioned advantage estimation (SPIRAL, 2506.24119): a call's return minus a running
mean of its role's returns.

The running mean is kept across steps.

    A = R(call) - b(role, depth)        b <- decay b + (1 - decay) mean of R over the step

With decay 0.95 and b = 0.4, returns 1 and 0 give advantages 0.6 and -0.4, and b becomes 0.405. All
calls of a step are compared with the mean from before the step, so their order does not matter.
One attempt per item is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.train.advantages.advantage_pipeline import GroupAlgorithmOptions, StepAdvantageBuilder
from ramify.train.advantages.base import OptimizerStepAdvantages
from ramify.train.advantages.credit_assignment import CreditNode, Numbers, inherited_returns
from ramify.types.trajectory import Group


class RAE(
    GroupAlgorithmOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="rae",
):
    """Role-conditioned advantage estimation: the advantage of a call is its return minus a running
    mean of the returns of calls with the same role.

    Example:
        train.RlSpec(algorithm=train.RAE(decay=0.9))
    """

    decay: float = 0.95
    update: Literal["step", "rollout"] = "step"
    """When the running mean is updated. ``step``: once per step, from all of its returns, so their
    order does not matter. ``rollout``: after each rollout, in their order.
    """
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """Role -> initial running mean: ``rlm@0`` is the root, ``rlm@1`` its children, ``lm@1`` plain
    calls. Roles that are not listed start at 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay={self.decay} must be at least 0 and below 1")

    @property
    def has_group_baseline(self) -> bool:
        return False

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        means = dict(self.memory)
        returns_by_role: dict[str, list[float]] = defaultdict(list)
        step = StepAdvantageBuilder(groups, weights, self)
        for group in step.groups:
            numbers = []
            for tree in group.trees:
                numbers.append(self._advantages_against_means(means, tree, returns_by_role))
                if self.update == "rollout":
                    means.update(self._update_means(means, returns_by_role))
                    returns_by_role.clear()
            group.advantages = numbers
        assigned = step.spread_advantages_to_tokens(every_token)
        means.update(self._update_means(means, returns_by_role))
        assigned.memory |= {role: mean for role, mean in means.items() if "@" in role}
        return assigned

    def _update_means(
        self, means: Mapping[str, float], returns_by_role: Mapping[str, Sequence[float]]
    ) -> dict[str, float]:
        return {
            role: self.decay * means.get(role, 0.0) + (1 - self.decay) * fmean(returns)
            for role, returns in returns_by_role.items()
        }

    def _advantages_against_means(
        self,
        means: Mapping[str, float],
        tree: Mapping[str, CreditNode],
        returns_by_role: dict[str, list[float]],
    ) -> Numbers:
        advantages: Numbers = {}
        for call, value in inherited_returns(tree, self.gamma_tree).items():
            role = f"{tree[call].role}@{tree[call].depth}"
            returns_by_role[role].append(value)
            advantages[call] = value - means.get(role, 0.0)
        return advantages
