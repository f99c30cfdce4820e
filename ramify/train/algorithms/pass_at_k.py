"""GRPO for pass@k: only the best of a group learns, by how far it was ahead of the second.

rewards 1, 0, 0, 0: std 0.5, advantages 2, 0, 0, 0. Two that are equally good: all 0. It asks that
one attempt succeed, not all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.algorithms.base import AssignedStep
from ramify.train.algorithms.group import GroupOptions, assigned_rollout
from ramify.train.signals.baseline import best_alone
from ramify.types.trajectory import Group


class PassAtK(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="pass_at_k",
):
    """Implements ``Algorithm``."""

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_rollout(groups, weights, self, best_alone, every_token)
