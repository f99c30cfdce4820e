"""Hierarchical GRPO: a call's return minus the mean over attempts at the same sub-task; roots are
compared with the roots of their group.

roots 1 and 0; both ask "north", which is answered with rewards 1 and 0 (γ of the tree 0):
advantages 0.5, -0.5 for both pairs. A sub-task that only one call attempted gives that call no
signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.train.advantages.base import AssignedStep
from ramify.train.advantages.baseline import mean
from ramify.train.advantages.group import GroupOptions, assigned_step
from ramify.types.trajectory import Group


class Hierarchical(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="hierarchical",
):
    """Hierarchical GRPO estimator; implements ``Algorithm``."""

    credit: str = "hierarchical"

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        return assigned_step(groups, weights, self, mean, every_token)
