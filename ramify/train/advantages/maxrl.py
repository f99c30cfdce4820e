"""MaxRL (2602.02710): a rollout's reward minus the mean of its group, divided by that mean.

rewards 1, 0, 0, 0: advantages 3, -1, -1, -1. With rewards of 0 and 1 this follows the gradient of
the log of the pass rate: the rarer a success, the larger its advantage. A group whose mean is not
positive has no signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import mean_ratio
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class MaxRL(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="maxrl",
):
    """MaxRL estimator; implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, mean_ratio, every_token)
