"""Define the interface of policy losses.

A policy loss is a formula for the loss of one sampled token, given its log-probabilities and its
advantage.

    l  (now)       log-probability under the policy being trained, with gradient
    o  (old)       under the policy at the start of the step, or m if it is not recomputed
    m  (sampler)   under the policy that sampled the token, when it did so

    r = exp(clamp(l - o, ±20))     rho = exp(clamp(l - m, ±20))     p = exp(l)     q = exp(m)
    A  advantage                   sg  stop-gradient

Each class in this package is one formula with its options. It returns a loss per token;
``total_loss.py`` weights and sums these losses. Some formulas use more than one token, and declare
that. A formula over the token's whole sequence sets ``whole``, so that its sequences are never
split. A formula that first selects some of the tokens of an optimizer step implements ``choose``.

Legend: E entries of a batch, N tokens of an optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

from ramify.errors import ConfigError

# Configurations can be read without torch: this file only calls methods of tensors.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Doubles = npt.NDArray[np.float64]

_MAX_LOG_RATIO = 20.0


class BaseLossFormula(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name"):
    """Base class of all loss and correction formulas.

    In a configuration, the ``tag`` of its class names the formula. The class also declares which
    inputs the formula reads.

    Example:
        class Bounded(train.BaseLossFormula, frozen=True, kw_only=True, tag="bounded"):
            most: float = 2.0
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    """Names of the per-token streams that the formula needs in addition to those of every batch,
    such as ``old_logprobs`` and ``staleness``."""
    whole: ClassVar[bool] = False
    """True if the formula needs all tokens of a sequence in the same batch."""


class SequenceSums(NamedTuple):
    """Sums and means over whole sequences, for a batch in which several sequences are packed
    together."""

    owner: Tensor
    """Index of the sequence of each entry, counted from 0, with shape [E]."""
    num: int
    """Number of sequences."""
    weighs: Tensor
    """Mask [E] of the entries with policy-gradient weight. Other entries are ignored."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over each entry's sequence, as a tensor of shape [E].

        E is the number of entries (tokens with loss) in the batch.
        """
        weighed = values.masked_fill(~self.weighs, 0.0)
        sums = weighed.new_zeros(self.num).index_add(0, self.owner, weighed)
        return sums[self.owner]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over each entry's sequence, as a tensor of shape [E].

        E is the number of entries (tokens with loss) in the batch.
        """
        return self.sum(values) / self.sum(self.weighs.to(values.dtype)).clamp(min=1.0)

    def any(self, flags: Tensor) -> Tensor:
        """Return, for each entry, whether ``flags`` is set anywhere in its sequence.

        Both tensors have one value for each of the E entries of the batch.
        """
        return self.sum(flags.float()) > 0


class PolicyLossInputs(NamedTuple):
    """The inputs of a policy loss: the log-probabilities and advantages of sampled tokens.

    Each tensor has shape [E], with one fp32 number for each of the E tokens of a batch.
    """

    now: Tensor
    old: Tensor
    sampler: Tensor
    advantages: Tensor
    whole: SequenceSums | None = None
    chosen: Tensor | None = None
    """True for each token that the loss's method ``choose`` selected. None if the loss selects no
    tokens.
    """
    staleness: Tensor | None = None
    """How many versions the sampling policy was behind the policy at the start of the step."""

    @property
    def sequences(self) -> SequenceSums:
        """The whole sequences of the batch's tokens, for sums and means over each sequence.

        Raises ConfigError if they are unknown.
        """
        if self.whole is None:
            raise ConfigError("a loss over whole sequences received tokens without their sequences")
        return self.whole


class TokenSelectionInputs(NamedTuple):
    """The per-token values that a loss uses to select tokens.

    Each array has shape [N], with one fp64 number for each of the N tokens of an optimizer step
    that carry policy-gradient weight.
    """

    now: Doubles
    old: Doubles
    advantages: Doubles
    keys: npt.NDArray[np.uint64]
    """A random number for each token. It is derived from the name of the token's sequence and from
    its position, so that it does not depend on the order of tokens."""


class PolicyLoss(Protocol):
    """The interface of all policy losses.

    Most losses extend ``BaseLossFormula``, and some also implement ``TokenSelectingLoss``.
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        """Return the loss of each sampled token, as a tensor of shape [E] for the E tokens of the
        batch."""
        ...

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        """Return a mask [E] of the tokens whose policy gradient the loss clips away.

        The mask itself has no gradient.
        """
        ...


@runtime_checkable
class TokenSelectingLoss(Protocol):
    """A policy loss that selects some tokens of an optimizer step and treats them differently.

    It selects these tokens from all tokens of the step.
    """

    def choose(self, step: TokenSelectionInputs) -> npt.NDArray[np.bool_]:
        """Return True for each selected token, as an array of shape [N] for the N tokens of the
        step."""
        ...


def importance_ratio(now: Tensor, then: Tensor) -> Tensor:
    """Return the probability ratio exp(now - then) of each token, given its log-probabilities under
    two policies.

    Their difference is clamped to ±20, so that the ratio stays finite.

    Example:
        train.importance_ratio(tokens.now, tokens.sampler)    # [E], 1 if the policy has not moved
    """
    return (now - then).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_surrogate(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's clipped surrogate loss of each token: -min(r A, clip(r, 1 - low, 1 + high) A),
    where r is the importance ratio and A the advantage."""
    return -(r * advantages).minimum(r.clamp(1 - low, 1 + high) * advantages)


def is_clipped(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return True for each token at which clipping removes the gradient of PPO's surrogate loss.

    The result has the shape of ``r``.
    """
    return ((advantages > 0) & (r > 1 + high)) | ((advantages < 0) & (r < 1 - low))


def empty_token_mask(tokens: PolicyLossInputs) -> Tensor:
    """Return a mask that selects none of the tokens.

    This is the ``clipped`` of a loss that never cuts off a gradient.
    """
    return tokens.now.new_zeros(tokens.now.shape).bool()


_NOT_NEGATIVE = (
    "kl_beta", "router_aux_loss_coef", "kd_pull", "kd_clip", "clip_low", "clip_high", "cap",
    "bound", "share", "beta", "pull", "delta", "tau_positive", "tau_negative",
)  # fmt: skip
"""Options of losses and corrections that must not be negative, such as distances, factors and
fractions.
"""


def check_bounds(options: Any, where: str) -> None:
    """Raise ConfigError if a loss has a negative bound, or a lower bound above the upper bound.

    No token could lie within such bounds, so training would silently learn nothing.
    """
    for name in _NOT_NEGATIVE:
        value = getattr(options, name, None)
        if isinstance(value, int | float) and not value >= 0:
            raise ConfigError(f"{where}{name}={value:g} cannot be negative")
    low, high = getattr(options, "low", None), getattr(options, "high", None)
    if isinstance(low, int | float) and isinstance(high, int | float) and not low <= high:
        raise ConfigError(f"{where}low={low:g} must not be above high={high:g}")


def check_per_token(part: Any, method: str, given: Tensor, tokens: PolicyLossInputs) -> None:
    """Raise ConfigError unless a method of a loss term returned one value for each token.

    A plug-in may return a mean by mistake, which would be broadcast to every token without an
    error.
    """
    if given.shape != tokens.now.shape:
        raise ConfigError(
            f"{type(part).__name__}.{method}() gave shape {list(given.shape)} for "
            f"{tokens.now.numel()} tokens: give a value for each token, without a mean or a sum"
        )
