"""ReMax (2310.10505): a rollout's reward minus that of a greedy rollout of the same item.

rewards 1, 0 and a greedy rollout of 0.25: advantages 0.75, -0.25. Each group gets one greedy
rollout at temperature 0, which is not trained on. A group whose greedy rollout failed is left out
and reported. One attempt per item is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ramify.train.advantages.base import AlgorithmNeeds, AssignedStep
from ramify.train.advantages.credit import CreditNode, Numbers, tree_of, why_unscored
from ramify.train.advantages.group import GroupOptions, judged
from ramify.types.trajectory import Group


class ReMax(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="remax",
):
    """ReMax estimator; implements ``Algorithm``.

    Every call gets its root's advantage, since the children of the greedy rollout cannot be matched
    with those of another.

    Example:
        train.RlSpec(algorithm=train.ReMax())    # one more rollout per group, at temperature 0
    """

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

        kept = [group for group in groups if not _why_unusable(group)]
        assigned = judged(kept, weights, self, judge, every_token)
        assigned.notes += [
            f"item {group.task} is left out: {why}"
            for group in groups
            if (why := _why_unusable(group))
        ]
        return assigned


def _why_unusable(group: Group) -> str:
    if group.greedy is None:
        return "it has no greedy rollout"
    why = why_unscored(group.greedy)
    return f"its greedy rollout {why}" if why else ""
