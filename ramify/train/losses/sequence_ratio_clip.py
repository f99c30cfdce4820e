"""The policy loss of PPO that treats a whole sequence as one action.

The importance ratio is that of the whole sequence, not a mean over its tokens.
"""

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


class SequenceClip(BaseLossFormula, frozen=True, kw_only=True, tag="sequence_clip"):
    """PPO's clipped loss with one importance ratio per sequence, as in TRL's ``RLOOTrainer``.

    The loss of a token is -min(s Ā, clip(s, 1 - low, 1 + high) Ā), where s = exp(sum over the
    sequence of (l - o)). Ā is the mean advantage of the sequence, and l and o are a token's new and
    old log-probabilities.

    Every token of the sequence gets this value.

    Example:
        train.LossSpec(policy=train.SequenceClip(clip_high=0.28))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    whole: ClassVar[bool] = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    sequence_mean: bool = True
    """Whether to average the loss within each sequence (a call or a rollout, see
    ``rl.loss.sequence``), and then over the sequences. False: average according to
    ``rl.algorithm.reduction``.
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        mean = tokens.sequences.mean(tokens.advantages)
        return clipped_surrogate(self._ratio(tokens), mean, self.clip_low, self.clip_high)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        mean = tokens.sequences.mean(tokens.advantages)
        return is_clipped(self._ratio(tokens).detach(), mean, self.clip_low, self.clip_high)

    def _ratio(self, tokens: PolicyLossInputs) -> Tensor:
        gap = tokens.sequences.sum(tokens.now - tokens.old)
        return importance_ratio(gap, gap.new_zeros(()))
