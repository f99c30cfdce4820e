"""OPO (2505.23585): a rollout's reward minus the mean of its group, in which each rollout is
weighted by its length.

rewards 1, 0 of 1 and 3 tokens: advantages 0.75, -0.25. Long rollouts have large gradients, so the
baseline of least variance gives them more weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import by_length
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class OPO(
    GroupOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="opo"
):
    """OPO estimator; implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, by_length, every_token)
