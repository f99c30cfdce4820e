"""GRPO for pass@k: only the best rollout of a group has an advantage, its lead over the second
best divided by the group's standard deviation.

rewards 1, 0, 0, 0: std 0.5, advantages 2, 0, 0, 0. If two rollouts share the best reward, all
advantages are 0. The goal is that one attempt succeeds, not that all do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import best_alone
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class PassAtK(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="pass_at_k",
):
    """Pass@k estimator; implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, best_alone, every_token)
