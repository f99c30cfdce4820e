"""The GSPO loss, which uses one importance ratio for a whole sequence: the geometric mean of its
tokens' ratios."""

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


class Gspo(BaseLossFormula, frozen=True, kw_only=True, tag="gspo"):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the sequence of (l - o))
    (2507.18071)

    Computed per token as log s_t = l - sg(l) + sg(log s), so advantages may differ within a
    sequence. The bounds apply to a mean, so they are about a thousand times tighter than those of
    a single token."""

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    whole: ClassVar[bool] = True
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    sequence_mean: bool = True
    """Average over each sequence, which ``rl.loss.sequence`` defines, and then over the sequences,
    as the paper does. False: weigh tokens as ``rl.algorithm.reduction`` says."""

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        return clipped_surrogate(
            self._ratio(tokens), tokens.advantages, self.clip_low, self.clip_high
        )

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return is_clipped(
            self._ratio(tokens).detach(), tokens.advantages, self.clip_low, self.clip_high
        )

    def _ratio(self, tokens: PolicyLossInputs) -> Tensor:
        now = tokens.now.detach()
        return importance_ratio(
            tokens.now - now + tokens.sequences.mean(now - tokens.old), now.new_zeros(())
        )
