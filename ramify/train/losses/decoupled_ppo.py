"""Decoupled PPO, which uses one policy for the importance weights and another for the trust region.

Stale rollouts then do not narrow the trust region.

    w · ppo_clip(r = exp(l - x)),   w = min(exp(x - m), cap), or 0 above the cap
        m the sampler, x the proximal policy, around which updates are clipped

``decoupled`` recomputes x at the start of the step (2505.24298). ``prox_approx`` saves this forward
pass: it interpolates x between the sampler and the current policy, according to the staleness of
the token. ``decoupled_gspo`` clips the geometric mean of a sequence's ratios.

    x = m + a (sg(l) - m),   a = staleness / (staleness + 1)    staleness 0: x = m, 1: halfway
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.errors import ConfigError
from ramify.train.losses.base import (
    BaseLossFormula,
    PolicyLossInputs,
    clipped_surrogate,
    importance_ratio,
    is_clipped,
)

if TYPE_CHECKING:
    from torch import Tensor


class Decoupled(BaseLossFormula, frozen=True, kw_only=True, tag="decoupled"):
    """Decoupled PPO: clipped PPO with a capped importance weight (AReaL, 2505.24298).

    The loss of a token is min(exp(o - m), cap) · ppo_clip(r = exp(l - o)). Here l, o and m are a
    token's log-probabilities under the current policy, the policy at the start of the step, and the
    sampler. Updates are clipped around the policy at the start of the step. The first factor
    corrects for the sampler.

    Example:
        train.LossSpec(policy=train.Decoupled(cap=2.0))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "fresh_old"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float = 5.0
    drop: bool = False
    """Whether a token whose weight exceeds ``cap`` gets weight 0, as in AReaL's rejection
    sampling. False: it gets the weight ``cap``.
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        weight = self._weight(tokens)
        r = importance_ratio(tokens.now, tokens.old)
        return weight * clipped_surrogate(r, tokens.advantages, self.clip_low, self.clip_high)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return is_clipped(
            importance_ratio(tokens.now, tokens.old),
            tokens.advantages,
            self.clip_low,
            self.clip_high,
        )

    def _weight(self, tokens: PolicyLossInputs) -> Tensor:
        weight = importance_ratio(tokens.old, tokens.sampler)
        return (
            weight.masked_fill(weight > self.cap, 0.0) if self.drop else weight.clamp(max=self.cap)
        )


class DecoupledGspo(Decoupled, frozen=True, kw_only=True, tag="decoupled_gspo"):
    """Decoupled PPO with one importance ratio per sequence, as AReaL's
    importance_sampling_level=sequence.

    The loss of a token is that of ``decoupled``, but with r = exp(mean over the sequence of (l -
    o)) and with the sequence's mean advantage. Tokens of weight 0 are left out of both means. Here
    l and o are a token's log-probabilities now and at the start of the step.

    Example:
        train.LossSpec(policy=train.DecoupledGspo(clip_low=0.4, clip_high=0.4, drop=True))
    """

    whole: ClassVar[bool] = True
    sequence_mean: bool = False
    """Whether to average the loss within each sequence (a call or a rollout, see
    ``rl.loss.sequence``), and then over the sequences. False, as in AReaL: average according to
    ``rl.algorithm.reduction``.
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        weight = self._weight(tokens)
        r, advantages = self._means(tokens, weight)
        return weight * clipped_surrogate(r, advantages, self.clip_low, self.clip_high)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        r, advantages = self._means(tokens, self._weight(tokens))
        return is_clipped(r.detach(), advantages, self.clip_low, self.clip_high)

    def _means(self, tokens: PolicyLossInputs, weight: Tensor) -> tuple[Tensor, Tensor]:
        kept = (weight > 0).to(tokens.now.dtype)
        num = tokens.sequences.sum(kept).clamp(min=1.0)
        gap = tokens.sequences.sum((tokens.now - tokens.old) * kept) / num
        return importance_ratio(gap, gap.new_zeros(())), tokens.sequences.sum(
            tokens.advantages * kept
        ) / num


class ProxApprox(BaseLossFormula, frozen=True, kw_only=True, tag="prox_approx"):
    """Decoupled PPO without recomputed old log-probabilities.

    The loss of a token is that of ``decoupled``, but o is replaced by the interpolation x = m + a
    (sg(l) - m), with a = staleness / (staleness + 1). Here m and l are the token's
    log-probabilities under the sampler and the current policy, and sg stops the gradient.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"staleness"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float = 5.0

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        proximal = self._proximal_logprobs(tokens)
        weight = importance_ratio(proximal, tokens.sampler).clamp(max=self.cap)
        r = importance_ratio(tokens.now, proximal)
        return weight * clipped_surrogate(r, tokens.advantages, self.clip_low, self.clip_high)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        r = importance_ratio(tokens.now, self._proximal_logprobs(tokens))
        return is_clipped(r, tokens.advantages, self.clip_low, self.clip_high)

    def _proximal_logprobs(self, tokens: PolicyLossInputs) -> Tensor:
        if tokens.staleness is None:
            raise ConfigError(
                "prox_approx interpolates by staleness: the batch has no stream 'staleness'"
            )
        part = tokens.staleness / (tokens.staleness + 1)
        return tokens.sampler + part * (tokens.now.detach() - tokens.sampler)
