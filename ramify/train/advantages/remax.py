"""ReMax (2310.10505): the advantage is a rollout's reward minus that of a greedy rollout of the
same item.

rewards 1, 0 and a greedy rollout of 0.25: advantages 0.75, -0.25. Each group gets one greedy
rollout at temperature 0, which is not trained on. A group whose greedy rollout failed is left out
and reported. One attempt per item is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ramify.train.advantages.advantage_pipeline import GroupAlgorithmOptions, StepAdvantageBuilder
from ramify.train.advantages.base import AlgorithmNeeds, OptimizerStepAdvantages
from ramify.train.advantages.credit_assignment import CreditNode, tree_of, why_unusable
from ramify.types.trajectory import Group


class ReMax(
    GroupAlgorithmOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="remax",
):
    """The ReMax estimator: the advantage of a rollout is its reward minus that of a greedy rollout
    of the same item.

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
    ) -> OptimizerStepAdvantages:
        step = StepAdvantageBuilder(
            [each for each in groups if not _why_unusable(each)], weights, self
        )
        for scored in step.groups:
            assert scored.group.greedy is not None
            baseline = _root_reward(tree_of(scored.group.greedy, weights))
            scored.advantages = [
                dict.fromkeys(tree, _root_reward(tree) - baseline) for tree in scored.trees
            ]
        assigned = step.spread_advantages_to_tokens(every_token)
        assigned.notes += [
            f"item {group.task} is left out: {why}"
            for group in groups
            if (why := _why_unusable(group))
        ]
        return assigned


def _root_reward(tree: Mapping[str, CreditNode]) -> float:
    return next(iter(tree.values())).reward


def _why_unusable(group: Group) -> str:
    if group.greedy is None:
        return "it has no greedy rollout"
    why = why_unusable(group.greedy)
    return f"its greedy rollout {why}" if why else ""
