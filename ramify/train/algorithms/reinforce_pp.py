"""REINFORCE++ (2501.03262): what a call came to, passed back along its tokens, normalised over all
tokens of the step.

A call of 3 tokens that came to 1, another of 1 token that came to 0, γ = 0.5: returns 0.25, 0.5, 1
| 0, their mean 0.4375 and standard deviation 0.427: advantages -0.439, 0.146, 1.317, -1.024. There
is no group: rollouts of all tasks are compared, so that one attempt at each is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.errors import ConfigError
from ramify.train.algorithms import token_arithmetic as row_math
from ramify.train.algorithms.base import AssignedStep
from ramify.train.algorithms.group import GroupOptions, judged
from ramify.train.signals.credit import CreditNode, Numbers, returns_of
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Group


class ReinforcePP(
    GroupOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="reinforce_pp",
):
    """Implements ``Algorithm``."""

    gamma: float = 1.0
    """Discount from one sampled token to the one before; tokens that were given between them do not
    count."""
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma={self.gamma} is not between 0 and 1")

    @property
    def has_group_baseline(self) -> bool:
        return False

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        def judge(group: Group, trees: Sequence[Mapping[str, CreditNode]]) -> Sequence[Numbers]:
            return [returns_of(tree, self.gamma_tree) for tree in trees]

        return judged(
            groups, weights, self, judge, every_token, gamma=self.gamma, has_baseline=False
        )

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        return row_math.add_kl(rows, self.kl_reward, self.gamma, normalise=self.normalise)
