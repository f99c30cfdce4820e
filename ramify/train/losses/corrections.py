"""Off-policy corrections, which multiply the policy loss by factors that compensate for differences
between sampler and trainer.

The two differ if their numerics or kernels differ, or if the sampler has older weights.

    gap = o - m      a token's log-probability for the trainer, at the start of the step, minus
                     that for the sampler
    moved = m - l    the sampler's minus the current policy's: how far it has moved since sampling

Each correction is a factor per token, without gradient, on the policy loss (not on KL and
entropy); several are multiplied. A masked token still counts in the loss's denominator, so that
the weight of other tokens does not depend on it.

    token_tis           min(exp(gap), cap)
    sequence_tis        min(exp(sum over the sequence of gap), cap)
    sequence_mask       1[low <= exp(sum over the sequence of gap) <= high], times it if ``weigh``
    icepop              1[low < exp(gap) < high], times exp(gap) if ``weigh`` is set
    geometric_mask      1[low < exp(mean over the sequence of gap) < high]
    worst_token_mask    1[low < exp(gap) < high at every token of the sequence]
    opsm                0 if A < 0 and the sequence's mean of moved is above delta

Legend: E entries. l, o and m as in ``base.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from ramify.plugins import PluginRegistry
from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor

_OLD = frozenset({"old_logprobs", "fresh_old"})


class OffPolicyCorrection(Protocol):
    """The interface of an off-policy correction, which gives each token a factor for its policy
    loss."""

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        """Return the factor for the policy loss of each token, as a tensor of shape [E] for the E
        tokens of the batch.

        A factor of 0 masks the token.
        """
        ...


class TokenTis(BaseLossFormula, frozen=True, kw_only=True, tag="token_tis"):
    """Truncated importance sampling per token: min(exp(gap), cap), where the gap is the trainer's
    log-probability minus the sampler's."""

    reads: ClassVar[frozenset[str]] = _OLD
    cap: float = 2.0

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        return importance_ratio(tokens.old, tokens.sampler).clamp(max=self.cap)


class SequenceTis(BaseLossFormula, frozen=True, kw_only=True, tag="sequence_tis"):
    """Truncated importance sampling per sequence: min(exp(sum of gap), cap), where the gap of a
    token is the trainer's log-probability minus the sampler's.

    Example:
        train.LossSpec(corrections=(train.SequenceTis(cap=2.0),))
    """

    reads: ClassVar[frozenset[str]] = _OLD
    whole: ClassVar[bool] = True
    cap: float = 5.0

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        gap = tokens.sequences.sum(tokens.old - tokens.sampler)
        return importance_ratio(gap, gap.new_zeros(())).clamp(max=self.cap)


class SequenceMask(BaseLossFormula, frozen=True, kw_only=True, tag="sequence_mask"):
    """Masks sequences whose trainer-to-sampler probability ratio, exp(sum of gap), is out of
    bounds, and weights the others by that ratio.

    The gap of a token is the trainer's log-probability minus the sampler's.

    Example:
        train.LossSpec(corrections=(train.SequenceMask(low=0.5, high=2.0, weigh=False),))
    """

    reads: ClassVar[frozenset[str]] = _OLD
    whole: ClassVar[bool] = True
    low: float = 0.0
    high: float = 3.0
    weigh: bool = True

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        gap = tokens.sequences.sum(tokens.old - tokens.sampler)
        gap = importance_ratio(gap, gap.new_zeros(()))
        kept = (gap >= self.low) & (gap <= self.high)
        return gap.masked_fill(~kept, 0.0) if self.weigh else kept.to(gap.dtype)


class IcePop(BaseLossFormula, frozen=True, kw_only=True, tag="icepop"):
    """Masks tokens whose probability ratio between trainer and sampler, exp(gap), is out of bounds.

    The gap is the trainer's log-probability minus the sampler's.
    """

    reads: ClassVar[frozenset[str]] = _OLD
    low: float = 0.5
    high: float = 5.0
    weigh: bool = False
    """Whether to multiply the loss of the remaining tokens by exp(gap), their probability ratio
    between trainer and sampler.
    """

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        gap = importance_ratio(tokens.old, tokens.sampler)
        kept = (gap > self.low) & (gap < self.high)
        return gap.masked_fill(~kept, 0.0) if self.weigh else kept.to(gap.dtype)


class GeometricMask(BaseLossFormula, frozen=True, kw_only=True, tag="geometric_mask"):
    """Masks sequences whose mean probability ratio between trainer and sampler, exp(mean of gap),
    is out of bounds.

    The mean is geometric, over the tokens of the sequence. The gap of a token is the trainer's
    log-probability minus the sampler's.

    Example:
        train.LossSpec(corrections=(train.GeometricMask(low=0.98, high=1.02),))
    """

    reads: ClassVar[frozenset[str]] = _OLD
    whole: ClassVar[bool] = True
    low: float = 0.99
    high: float = 1.01

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        gap = tokens.sequences.mean(tokens.old - tokens.sampler).exp()
        return ((gap > self.low) & (gap < self.high)).to(gap.dtype)


class WorstTokenMask(BaseLossFormula, frozen=True, kw_only=True, tag="worst_token_mask"):
    """Masks sequences with any token whose probability ratio between trainer and sampler, exp(gap),
    is out of bounds.

    The gap is the trainer's log-probability minus the sampler's.

    Example:
        train.LossSpec(corrections=(train.WorstTokenMask(low=1e-3),))
    """

    reads: ClassVar[frozenset[str]] = _OLD
    whole: ClassVar[bool] = True
    low: float = 1e-4
    high: float = 100.0

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        gap = importance_ratio(tokens.old, tokens.sampler)
        return (~tokens.sequences.any((gap <= self.low) | (gap >= self.high))).to(gap.dtype)


class Opsm(BaseLossFormula, frozen=True, kw_only=True, tag="opsm"):
    """Off-policy sequence masking (DeepSeek-V3.2, 2512.02556): masks tokens with A < 0 in sequences
    the policy has moved away from (mean of m - l > delta).

    A is the advantage. Here m and l are a token's log-probabilities under the sampler and the
    current policy.

    It does not use o - l, which is 0 in a step of one minibatch, and reflects neither the sampler's
    numerics nor the age of its weights.
    """

    whole: ClassVar[bool] = True
    delta: float = 0.5

    def factor(self, tokens: PolicyLossInputs) -> Tensor:
        left = tokens.sequences.mean(tokens.sampler - tokens.now.detach()) > self.delta
        return (~(left & (tokens.advantages < 0))).to(tokens.now.dtype)


CORRECTIONS = PluginRegistry(
    "correction",
    "ramify.corrections",
    {
        "token_tis": TokenTis,
        "sequence_tis": SequenceTis,
        "sequence_mask": SequenceMask,
        "icepop": IcePop,
        "geometric_mask": GeometricMask,
        "worst_token_mask": WorstTokenMask,
        "opsm": Opsm,
    },
    structs=True,
)
"""Map the name of each off-policy correction to its class. A configuration gives the name and
options, as in ``{"name": "token_tis", "cap": 4}``.

Example:
    rl.loss.corrections=["icepop"]          # in a recipe, by name
"""
