"""REINFORCE++ with a baseline (2501.03262): a rollout's reward minus the mean of its group,
normalised over the step.

rewards 1, 0 | 1, 1, one token each: 0.5, -0.5 | 0, 0, then divided by their standard deviation
0.408: ±1.225 | 0, 0. Zero-variance groups stay in the step, because they are part of what is
normalised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import mean
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class ReinforcePPBaseline(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="reinforce_pp_baseline",
):
    """REINFORCE++-baseline estimator; implements ``Algorithm``."""

    normalise: bool = True
    drop_zero_variance: bool = False

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, mean, every_token)
