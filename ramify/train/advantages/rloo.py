"""RLOO (2402.14740): a rollout's reward minus the mean of the other rollouts of its group.

rewards 1, 0, 0, 0: advantages 1, -1/3, -1/3, -1/3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import leave_one_out
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class RLOO(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="rloo",
):
    """RLOO estimator; implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, leave_one_out, every_token)
