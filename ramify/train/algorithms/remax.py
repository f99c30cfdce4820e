"""ReMax (2310.10505): what a rollout came to more than the policy's likeliest answer to the same
item.

rewards 1, 0 beside a greedy rollout of 0.25: advantages 0.75, -0.25. The greedy rollout is made
beside each group, at temperature 0, and nothing is learnt from it; a group whose greedy rollout
failed is left out, and said. One attempt is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ramify.train.algorithms.base import AlgorithmNeeds, AssignedStep
from ramify.train.algorithms.group import GroupOptions, judged
from ramify.train.signals.credit import CreditNode, Numbers
from ramify.train.signals.rollout_trees import tree_of, why_unscored
from ramify.types.trajectory import Group


class ReMax(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="remax",
):
    """Implements ``Algorithm``. Every call has its root's advantage: children of a greedy root are
    not those of another."""

    @property
    def has_group_baseline(self) -> bool:
        return False

    @property
    def needs(self) -> AlgorithmNeeds:
        return msgspec.structs.replace(super().needs, greedy=True)

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        def judge(group: Group, trees: Sequence[Mapping[str, CreditNode]]) -> Sequence[Numbers]:
            assert group.greedy is not None
            baseline = next(iter(tree_of(group.greedy, weights).values())).reward
            return [
                dict.fromkeys(tree, next(iter(tree.values())).reward - baseline) for tree in trees
            ]

        kept = [group for group in groups if not _why_not(group)]
        found = judged(kept, weights, self, judge, every_token)
        found.notes += [
            f"item {group.task} is left out: {why}" for group in groups if (why := _why_not(group))
        ]
        return found


def _why_not(group: Group) -> str:
    if group.greedy is None:
        return "it has no greedy rollout"
    why = why_unscored(group.greedy)
    return f"its greedy rollout {why}" if why else ""
