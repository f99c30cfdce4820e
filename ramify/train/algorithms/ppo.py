"""PPO with a critic (1707.06347): generalised advantage estimation along the sampled tokens of each
call.

    stamp   each call's return (its own reward, and γ_tree of its parent's) on its last sampled token: the stream ``rewards``
    finish  δ_t = r_t + γ V_{t+1} - V_t,   Â_t = δ_t + γλ Â_{t+1},   returns Â + V,   then Â is normalised over the step

t + 1 is the next token that was *sampled* in the call: neither γ nor λ decays over what tools
print. Nothing comes after the last one. A call of 2 tokens that came to 1, V = 0.2, 0.6, γ = 1, λ =
0.5: δ = 0.4, 0.4, Â = 0.6, 0.4, returns 0.8, 1.

There is no group: one attempt at each item is enough. The critic is ``rl.critic``'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ramify.errors import ConfigError
from ramify.train.algorithms import token_arithmetic as row_math
from ramify.train.algorithms.base import AlgorithmNeeds, AssignedStep
from ramify.train.algorithms.group import GroupOptions, judged
from ramify.train.signals.credit import CreditNode, Numbers, returns_of
from ramify.train.token_credit import TokenCredit
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Group


class PPO(
    GroupOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="ppo"
):
    """Implements ``Algorithm``."""

    gamma: float = 1.0
    lam: float = 1.0
    """λ; 1: advantages are returns less values, without bias; less: the critic is trusted more."""
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"gamma={self.gamma} and lam={self.lam} must be between 0 and 1")

    @property
    def has_group_baseline(self) -> bool:
        return False

    @property
    def needs(self) -> AlgorithmNeeds:
        kl = super().needs
        return msgspec.structs.replace(kl, values=True, streams=kl.streams | {"values"})

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        came_to: dict[tuple[str, str], float] = {}

        def judge(group: Group, trees: Sequence[Mapping[str, CreditNode]]) -> Sequence[Numbers]:
            for trajectory, tree in zip(group.trajectories, trees, strict=True):
                came_to.update(
                    {(trajectory.id, id): R for id, R in returns_of(tree, self.gamma_tree).items()}
                )
            return [dict.fromkeys(tree, 0.0) for tree in trees]

        later = msgspec.structs.replace(
            self, normalise=False
        )  # there is nothing to be normalised before ``finish``
        found = judged(groups, weights, later, judge, True, has_baseline=False)
        for rollout in found.rollouts:
            last = dict(sorted(rollout.credits))
            for (call, turn), credit in rollout.credits.items():
                is_last = last[call] == turn
                _put_reward(credit, came_to[rollout.trajectory.id, call] if is_last else 0.0)
        return found

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        calls = list(row_math.lines(rows))
        told, missed, gaps = [], [], []
        for line in calls:
            rewards, values = line.read("rewards"), line.read("values")
            if self.kl_reward:
                gaps.append(line.read("old_logprobs") - line.read("ref_logprobs"))
                rewards = rewards - self.kl_reward * gaps[-1]
            advantages = row_math.gae(rewards, values, self.gamma, self.lam)
            line.write("returns", advantages + values)
            line.write("advantages", line.read("advantages") + advantages)
            told.append(advantages + values)
            missed.append(advantages)
        if self.normalise:
            row_math.normalise_lines(calls)
        measured = {"explained_variance": _explained(told, missed)}
        return {**measured, "reward_kl": float(np.concatenate(gaps).mean())} if gaps else measured


def _put_reward(credit: TokenCredit, reward: float) -> None:
    credit.streams["rewards"] = [*[0.0] * (len(credit) - 1), reward]


def _explained(returns: Sequence[row_math.Doubles], missed: Sequence[row_math.Doubles]) -> float:
    """The share of the returns' variance that the critic foresaw; 0 where they do not vary."""
    if not returns:
        return 0.0
    whole = float(np.concatenate(list(returns)).var())
    return 1 - float(np.concatenate(list(missed)).var()) / whole if whole > 1e-12 else 0.0
