"""The GMPO loss, which uses the geometric mean of a sequence's importance ratios, each clipped
separately in log space."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Gmpo(BaseLossFormula, frozen=True, kw_only=True, tag="gmpo"):
    """-Ā exp(mean over the sequence of c), c = min(l - o, high) if Ā > 0, else max(l - o, -low)
    (2507.20673)

    Ā is the mean advantage of the sequence. Every token of the sequence gets this value.

    Example:
        train.LossSpec(policy=train.Gmpo())
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    whole: ClassVar[bool] = True
    clip_low: float = 0.4
    clip_high: float = 0.4
    sequence_mean: bool = True
    """Average over each sequence, which ``rl.loss.sequence`` defines, and then over the sequences,
    as the paper does. False: weigh tokens as ``rl.algorithm.reduction`` says."""

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        mean = tokens.sequences.mean(tokens.advantages)
        gap = tokens.now - tokens.old
        bounded = gap.clamp(max=self.clip_high).where(mean > 0, gap.clamp(min=-self.clip_low))
        return -mean * importance_ratio(tokens.sequences.mean(bounded), gap.new_zeros(()))

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        mean, gap = tokens.sequences.mean(tokens.advantages), tokens.now.detach() - tokens.old
        return ((mean > 0) & (gap > self.clip_high)) | ((mean <= 0) & (gap < -self.clip_low))
