"""The GSPO loss, which uses one importance ratio per sequence: the geometric mean of its tokens'
ratios."""

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
    """GSPO's loss, a clipped loss with one importance ratio per sequence (2507.18071).

    The loss of a token is -min(s A, clip(s, 1 - low, 1 + high) A), where s = exp(mean over the
    sequence of (l - o)). A is the advantage, and l and o are a token's new and old
    log-probabilities.

    Computed per token as log s_t = l - sg(l) + sg(log s), so advantages may differ within a
    sequence. The bounds apply to a mean, so they are about a thousand times tighter than those of
    a single token.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    whole: ClassVar[bool] = True
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    sequence_mean: bool = True
    """Whether to average the loss within each sequence (a call or a rollout, see
    ``rl.loss.sequence``), and then over the sequences, as in the paper. False: average according
    to ``rl.algorithm.reduction``.
    """

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
