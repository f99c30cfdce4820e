"""PPO's clipped surrogate loss, and its dual-clip variant, which also limits the loss of a single
token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.train.losses.base import (
    BaseLossFormula,
    PolicyLossInputs,
    clipped_surrogate,
    importance_ratio,
    is_clipped,
)

if TYPE_CHECKING:
    from torch import Tensor


class PpoClip(BaseLossFormula, frozen=True, kw_only=True, tag="ppo_clip"):
    """PPO's clipped surrogate loss (1707.06347).

    The loss of a token is -min(r A, clip(r, 1 - low, 1 + high) A), where r is the importance ratio
    and A the advantage. DAPO (2503.14476) sets a higher upper bound.

    Example:
        train.LossSpec(policy=train.PpoClip(clip_low=0.2, clip_high=0.28))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    clip_low: float = 0.2
    clip_high: float = 0.28

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        return clipped_surrogate(
            importance_ratio(tokens.now, tokens.old),
            tokens.advantages,
            self.clip_low,
            self.clip_high,
        )

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return is_clipped(
            importance_ratio(tokens.now, tokens.old),
            tokens.advantages,
            self.clip_low,
            self.clip_high,
        )


class DualClip(BaseLossFormula, frozen=True, kw_only=True, tag="dual_clip"):
    """PPO's clipped loss, also bounded for tokens with a negative advantage (1912.09729).

    The loss of a token is that of ``ppo_clip``, but at most -bound A if A < 0, however large r is.
    Here A is the advantage and r the importance ratio.

    Example:
        train.LossSpec(policy=train.DualClip(bound=3.0))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    bound: float = 3.0

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        loss = self._ppo().per_token(tokens)
        return loss.minimum(-self.bound * tokens.advantages).where(tokens.advantages < 0, loss)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        is_bounded = (tokens.advantages < 0) & (
            importance_ratio(tokens.now, tokens.old) > self.bound
        )
        return self._ppo().clipped(tokens) | is_bounded

    def _ppo(self) -> PpoClip:
        return PpoClip(clip_low=self.clip_low, clip_high=self.clip_high)
