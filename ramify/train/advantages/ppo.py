"""PPO with a critic (1707.06347): generalised advantage estimation along the sampled tokens of
each call.

    assign_advantages   write each call's return (its own reward, plus γ_tree times its parent's
                        return) to the stream ``rewards``, at the call's last sampled token
    finish              compute δ_t = r_t + γ V_{t+1} - V_t and Â_t = δ_t + γλ Â_{t+1}, with
                        returns Â + V; then normalise Â over the step

t + 1 is the next *sampled* token of the call: neither γ nor λ decays over tool output. The value
after the last token is 0. A call of 2 tokens with return 1, V = 0.2, 0.6, γ = 1, λ = 0.5 gives δ =
0.4, 0.4, Â = 0.6, 0.4, and returns 0.8, 1.

With ``unit="turn"`` a step is one turn of the call instead of one token. V is then the critic's
value at the turn's first token, r is the sum of the turn's rewards, and all tokens of a turn have
its Â. Neither γ nor λ then depends on how many tokens a turn has.

No groups are compared, so one attempt per item is enough. ``rl.critic`` configures the critic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from ramify.errors import ConfigError
from ramify.train.advantages import token_arithmetic as row_math
from ramify.train.advantages.advantage_pipeline import GroupAlgorithmOptions, StepAdvantageBuilder
from ramify.train.advantages.base import AlgorithmNeeds, OptimizerStepAdvantages, TokenCredit
from ramify.train.advantages.credit_assignment import inherited_returns
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group


class PPO(
    GroupAlgorithmOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="ppo",
):
    """The PPO estimator: advantages are computed by generalised advantage estimation from the
    values of a critic.

    Example:
        train.RlSpec(algorithm=train.PPO(lam=0.95), critic=train.CriticSpec(model="own"))
    """

    gamma: float = 1.0
    lam: float = 1.0
    """λ of generalised advantage estimation. At 1, advantages are returns minus values, without
    bias; smaller values rely more on the critic and reduce the variance.
    """
    unit: Literal["token", "turn"] = "token"
    """What a step of GAE is: one sampled token, or one turn of a call."""
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
    ) -> OptimizerStepAdvantages:
        returns_by_call: dict[tuple[str, str], float] = {}
        # ``finish`` normalises, once advantages exist.
        step = StepAdvantageBuilder(groups, weights, msgspec.structs.replace(self, normalise=False))
        for group in step.groups:
            for trajectory, tree in zip(group.group.trajectories, group.trees, strict=True):
                returns_by_call.update(
                    {
                        (trajectory.id, id): R
                        for id, R in inherited_returns(tree, self.gamma_tree).items()
                    }
                )
            group.advantages = [dict.fromkeys(tree, 0.0) for tree in group.trees]
        assigned = step.spread_advantages_to_tokens(True, has_baseline=False)
        for rollout in assigned.rollouts:
            last = dict(sorted(rollout.credits))
            for (call, turn), credit in rollout.credits.items():
                is_last = last[call] == turn
                reward = returns_by_call[rollout.trajectory.id, call] if is_last else 0.0
                _put_reward(credit, reward)
                if self.unit == "turn":
                    credit.streams["turn"] = [float(turn)] * len(credit)
        return assigned

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        calls = list(row_math.tokens_by_call(rows))
        returns, residuals, kls = [], [], []
        for line in calls:
            rewards, values = line.per_token_values("rewards"), line.per_token_values("values")
            if self.kl_reward:
                kls.append(
                    line.per_token_values("old_logprobs") - line.per_token_values("ref_logprobs")
                )
                rewards = rewards - self.kl_reward * kls[-1]
            starts = np.arange(len(values))
            if self.unit == "turn":
                starts = row_math.turn_start_indices(line.per_token_values("turn"))
            by_step = row_math.gae(
                np.add.reduceat(rewards, starts), values[starts], self.gamma, self.lam
            )
            lengths = np.diff(starts, append=len(values))
            advantages, values = np.repeat(by_step, lengths), np.repeat(values[starts], lengths)
            line.write_stream("returns", advantages + values)
            line.write_stream("advantages", line.per_token_values("advantages") + advantages)
            returns.append(advantages + values)
            residuals.append(advantages)
        if self.normalise:
            row_math.normalise_advantages(calls, self.normalise_epsilon)
        metrics = {"explained_variance": _explained_variance(returns, residuals)}
        return {**metrics, "reward_kl": float(np.concatenate(kls).mean())} if kls else metrics


def _put_reward(credit: TokenCredit, reward: float) -> None:
    credit.streams["rewards"] = [*[0.0] * (len(credit) - 1), reward]


def _explained_variance(
    returns: Sequence[row_math.Doubles], residuals: Sequence[row_math.Doubles]
) -> float:
    """Return the fraction of the returns' variance that the critic explains, or 0 if the returns do
    not vary.
    """
    if not returns:
        return 0.0
    total = float(np.concatenate(list(returns)).var())
    return 1 - float(np.concatenate(list(residuals)).var()) / total if total > 1e-12 else 0.0
