"""The DPPO losses, which bound how far the probability of a token moves instead of bounding its
ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor

_EDGE = 1e-6
"""Probabilities are kept this far from 0 and 1 before their logarithm is taken."""


class DppoTv(BaseLossFormula, frozen=True, kw_only=True, tag="dppo_tv"):
    """-rho A 1[not (A > 0 and p - q > delta) and not (A < 0 and q - p > delta)] + pull (l - m)²
    (2602.04879)

    A token is no longer pushed once its probability has moved by delta in that direction. A rare
    token may still change by a large factor, which a bound on the ratio would forbid. Needs no
    recomputed old log-probabilities. The default."""

    delta: float = 0.2
    """Bound on the change of a token's probability."""
    pull: float = 1e-3
    """Weight of the squared difference between new and old log-probabilities."""

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        rho = importance_ratio(tokens.now, tokens.sampler)
        push = -rho * tokens.advantages * (~self.clipped(tokens)).to(rho.dtype)
        return push + self.pull * (tokens.now - tokens.sampler).square()

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        moved = tokens.now.detach().exp() - tokens.sampler.exp()
        return ((tokens.advantages > 0) & (moved > self.delta)) | (
            (tokens.advantages < 0) & (-moved > self.delta)
        )


class DppoCapped(BaseLossFormula, frozen=True, kw_only=True, tag="dppo_capped"):
    """-sg(min(r, cap)) A l at tokens that ``dppo_tv`` (or ``dppo_kl``) would not mask with o in
    place of m, and 0 at the others, as in verl. The ratio r is only a bounded weight: the gradient
    flows through l.

    Example:
        train.LossSpec(policy=train.DppoCapped(cap=20.0))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    delta: float = 0.2
    cap: float = 20.0
    divergence: Literal["tv", "kl"] = "tv"

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        weight = importance_ratio(tokens.now.detach(), tokens.old).clamp(max=self.cap)
        kept = (~self.clipped(tokens)).to(weight.dtype)
        return -weight * tokens.advantages * tokens.now * kept

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        formula = DppoTv if self.divergence == "tv" else DppoKl
        return formula(delta=self.delta).clipped(tokens._replace(sampler=tokens.old))


class DppoKl(BaseLossFormula, frozen=True, kw_only=True, tag="dppo_kl"):
    """``dppo_tv`` with the binary KL q log(q/p) + (1-q) log((1-q)/(1-p)) > delta, and the sign of
    p - q, as the bound.

    Example:
        train.LossSpec(policy=train.DppoKl(delta=0.1))
    """

    delta: float = 0.05

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        rho = importance_ratio(tokens.now, tokens.sampler)
        return -rho * tokens.advantages * (~self.clipped(tokens)).to(rho.dtype)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        p, q = (
            logprobs.exp().clamp(_EDGE, 1 - _EDGE)
            for logprobs in (tokens.now.detach(), tokens.sampler)
        )
        far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log() > self.delta
        return far & ((tokens.advantages > 0) & (p > q) | (tokens.advantages < 0) & (p < q))
