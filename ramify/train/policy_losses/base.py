"""What a policy loss is: what one sampled token adds to the loss, from its log-probabilities and
its advantage.

    now  l    under the policy that is trained, with gradient          r = exp(clamp(l - o, ±20))
    old  o    under the policy at the step's start; the sampler's      rho = exp(clamp(l - m, ±20))
              where no old pass was made                               p = exp(l), q = exp(m)
    sampler m when the token was sampled                               A  advantage;  sg  stop-gradient

Each class of this room is one formula and its options; each returns a loss per token, which
``loss.py`` weighs and sums. A formula that looks at more than its own token says how far it looks:
over the token's whole sequence (``whole``: then no sequence may be split), or over all tokens of
the optimizer step, of which it chooses some before any is learnt from (``choose``).

Legend: E entries of a batch, N tokens of an optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

from ramify.errors import ConfigError

if (
    TYPE_CHECKING
):  # methods of tensors are all that is needed: a configuration is read without torch
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Doubles = npt.NDArray[np.float64]

_MAX_LOG_RATIO = 20.0


class LossFormula(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name"
):
    """How a formula is stored, and how far it looks. Its tag is its name."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Streams that it needs besides those of every batch: ``old_logprobs``, ``staleness``."""
    whole: ClassVar[bool] = False
    """Whether it looks at whole sequences."""


class SequenceSums(NamedTuple):
    """Which entries are of one sequence."""

    owner: Tensor
    """[E] of the sequence, from 0."""
    num: int
    """Sequences."""
    weighs: Tensor
    """[E] whether the entry carries policy-gradient weight; the others count for nothing."""

    def sum(self, values: Tensor) -> Tensor:
        """[E] the sum over the entry's sequence."""
        kept = values.masked_fill(~self.weighs, 0.0)
        return kept.new_zeros(self.num).index_add(0, self.owner, kept)[self.owner]

    def mean(self, values: Tensor) -> Tensor:
        """[E] the mean over the entry's sequence."""
        return self.sum(values) / self.sum(self.weighs.to(values.dtype)).clamp(min=1.0)

    def any(self, flags: Tensor) -> Tensor:
        """[E] whether it is so anywhere in the entry's sequence."""
        return self.sum(flags.float()) > 0


class LossTokens(NamedTuple):
    """What a policy loss sees; each [E], in fp32."""

    now: Tensor
    old: Tensor
    sampler: Tensor
    advantages: Tensor
    whole: SequenceSums | None = None
    chosen: Tensor | None = None
    """Whether ``choose`` chose the token."""
    staleness: Tensor | None = None
    """How many versions older than the policy at the step's start the one was that sampled the
    token."""

    @property
    def sequences(self) -> SequenceSums:
        """Raises ConfigError where it is not known which tokens are of one sequence."""
        if self.whole is None:
            raise ConfigError(
                "a loss over whole sequences was given tokens without their sequences"
            )
        return self.whole


class LossStep(NamedTuple):
    """All tokens of an optimizer step that carry policy-gradient weight; each [N], in fp64."""

    now: Doubles
    old: Doubles
    advantages: Doubles
    keys: npt.NDArray[np.uint64]
    """A random number per token, from its sequence's name and its place in it: the same in whatever
    order they come."""


class PolicyLoss(Protocol):
    """Implemented by every class of this room; most are a ``LossFormula``, some
    ``TokenSelectingLoss``."""

    def per_token(self, tokens: LossTokens) -> Tensor:
        """[E]"""
        ...

    def clipped(self, tokens: LossTokens) -> Tensor:
        """[E] whether the token's policy gradient was cut off; without gradient."""
        ...


@runtime_checkable
class TokenSelectingLoss(Protocol):
    """A policy loss that treats some tokens of the step otherwise."""

    def choose(self, step: LossStep) -> npt.NDArray[np.bool_]:
        """[N] which."""
        ...


def ratio(now: Tensor, then: Tensor) -> Tensor:
    """exp(now - then), the difference clamped to ±20."""
    return (now - then).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_surrogate(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A)"""
    return -(r * advantages).minimum(r.clamp(1 - low, 1 + high) * advantages)


def is_clipped(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Where that has no gradient."""
    return ((advantages > 0) & (r > 1 + high)) | ((advantages < 0) & (r < 1 - low))


def nowhere(tokens: LossTokens) -> Tensor:
    """[E] False."""
    return (tokens.now > 0).logical_and(tokens.now < 0)
