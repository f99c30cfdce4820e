"""Decoupled PPO: what a token is weighed against and what it is held near to are two policies, so
that stale rollouts do not narrow the trust region.

    w · ppo_clip(r = exp(l - x)),   w = min(exp(x - m), cap)        m  the sampler, x  the policy that is held near

``decoupled`` recomputes x at the step's start (2505.24298); ``prox_approx`` interpolates it between
the sampler and the policy as it is, by version, and saves that pass:

    x = m + a (sg(l) - m),   a = lag / (lag + 1)                    lag 0: x = m, lag 1: halfway
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.errors import ConfigError
from ramify.train.policy_losses.base import (
    LossFormula,
    LossTokens,
    clipped_surrogate,
    is_clipped,
    ratio,
)

if TYPE_CHECKING:
    from torch import Tensor


class Decoupled(LossFormula, frozen=True, kw_only=True, tag="decoupled"):
    """min(exp(o - m), cap) · ppo_clip(r against o)   (AReaL, 2505.24298)"""

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "fresh_old"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float = 5.0

    def per_token(self, tokens: LossTokens) -> Tensor:
        weight = ratio(tokens.old, tokens.sampler).clamp(max=self.cap)
        r = ratio(tokens.now, tokens.old)
        return weight * clipped_surrogate(r, tokens.advantages, self.clip_low, self.clip_high)

    def clipped(self, tokens: LossTokens) -> Tensor:
        return is_clipped(
            ratio(tokens.now, tokens.old), tokens.advantages, self.clip_low, self.clip_high
        )


class ProxApprox(LossFormula, frozen=True, kw_only=True, tag="prox_approx"):
    """``decoupled`` with x = m + a (sg(l) - m), a = lag / (lag + 1), in place of o: without an old
    pass."""

    reads: ClassVar[frozenset[str]] = frozenset({"staleness"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float = 5.0

    def per_token(self, tokens: LossTokens) -> Tensor:
        near = self._near(tokens)
        weight = ratio(near, tokens.sampler).clamp(max=self.cap)
        r = ratio(tokens.now, near)
        return weight * clipped_surrogate(r, tokens.advantages, self.clip_low, self.clip_high)

    def clipped(self, tokens: LossTokens) -> Tensor:
        r = ratio(tokens.now, self._near(tokens))
        return is_clipped(r, tokens.advantages, self.clip_low, self.clip_high)

    def _near(self, tokens: LossTokens) -> Tensor:
        if tokens.staleness is None:
            raise ConfigError(
                "prox_approx interpolates by version: the batch has no stream 'staleness'"
            )
        part = tokens.staleness / (tokens.staleness + 1)
        return tokens.sampler + part * (tokens.now.detach() - tokens.sampler)
