"""GRPO (2402.03300): a rollout's reward minus the mean of its group, divided by the group's
standard deviation.

rewards 1, 0, 0, 0: std 0.5, advantages 1.5, -0.5, -0.5, -0.5. The division amplifies rare
successes and rare failures. It made the training of small policies unstable (see
``docs/learning.md``), so GRPO is not the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import mean_std
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class GRPO(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="grpo",
):
    """GRPO estimator; implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, mean_std, every_token)
