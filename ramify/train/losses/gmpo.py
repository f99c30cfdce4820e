"""The GMPO loss, which uses the geometric mean of a sequence's importance ratios.

Each ratio is first clipped in log space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Gmpo(BaseLossFormula, frozen=True, kw_only=True, tag="gmpo"):
    """GMPO's loss, with a clipped geometric mean of a sequence's importance ratios (2507.20673).

    The loss of a token is -Ā exp(mean over the sequence of c), where c = min(l - o, high) if Ā > 0,
    else max(l - o, -low). Ā is the mean advantage of the sequence, and l and o are a token's new
    and old log-probabilities.

    Every token of the sequence gets this value.

    Example:
        train.LossSpec(policy=train.Gmpo())
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    whole: ClassVar[bool] = True
    clip_low: float = 0.4
    clip_high: float = 0.4
    sequence_mean: bool = True
    """Whether to average the loss within each sequence (a call or a rollout, see
    ``rl.loss.sequence``), and then over the sequences, as in the paper. False: average according
    to ``rl.algorithm.reduction``.
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        mean = tokens.sequences.mean(tokens.advantages)
        gap = tokens.now - tokens.old
        bounded = gap.clamp(max=self.clip_high).where(mean > 0, gap.clamp(min=-self.clip_low))
        return -mean * importance_ratio(tokens.sequences.mean(bounded), gap.new_zeros(()))

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        mean, gap = tokens.sequences.mean(tokens.advantages), tokens.now.detach() - tokens.old
        return ((mean > 0) & (gap > self.clip_high)) | ((mean <= 0) & (gap < -self.clip_low))
