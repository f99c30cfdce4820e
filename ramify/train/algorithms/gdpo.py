"""GDPO (2601.05242): each named reward is compared within the group on its own, then they are
weighed and added, and the sum normalised over the step.

rewards correct 1, 0 and short 0, 0.1 with weights 1 and 0.5: each pair is ±0.707, so that the sums
are 0.354, -0.354. Added before the comparison the small reward would have had next to no say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.errors import ConfigError
from ramify.train.algorithms.base import AssignedStep
from ramify.train.algorithms.group import GroupOptions, judged
from ramify.train.signals.baseline import mean_std
from ramify.train.signals.credit import CREDITS, CreditNode, Numbers
from ramify.train.signals.rollout_trees import tree_of
from ramify.types.trajectory import Group


class GDPO(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="gdpo",
):
    """Implements ``Algorithm``. The task's weights are those of the sum."""

    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length_weight or self.overlong_buffer:
            raise ConfigError(
                "gdpo compares each reward on its own: let the task score length as one of them"
            )

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        def judge(group: Group, trees: Sequence[Mapping[str, CreditNode]]) -> Sequence[Numbers]:
            found = [dict.fromkeys(tree, 0.0) for tree in trees]
            names = _names(group)
            for name in names:
                alone = {each: float(each == name) for each in names}
                alone_trees = [tree_of(each, alone) for each in group.trajectories]
                numbers = CREDITS.of(self.credit)(alone_trees, mean_std, self.gamma_tree)
                for sums, own in zip(found, numbers, strict=True):
                    for call, value in own.items():
                        sums[call] += weights.get(name, 1.0) * value
            return found

        return judged(groups, weights, self, judge, every_token)


def _names(group: Group) -> list[str]:
    """Of the rewards of a group, of whole rollouts and of calls."""
    return sorted(
        {
            name
            for each in group.trajectories
            for rewards in (each.rewards, *each.call_rewards.values())
            for name in rewards
        }
    )
