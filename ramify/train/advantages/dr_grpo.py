"""Dr.GRPO (2503.20783): a rollout's reward minus the mean of its group, without division by the
standard deviation. The default.

rewards 1, 0, 0, 0: advantages 0.75, -0.25, -0.25, -0.25
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import mean
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class DrGRPO(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="dr_grpo",
):
    """Dr.GRPO estimator; implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, mean, every_token)
