"""The DPPO losses, which limit the change of a token's probability instead of its probability
ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor

_EDGE = 1e-6
"""Probabilities are clamped to [_EDGE, 1 - _EDGE] before their logarithm is taken."""


class DppoTv(BaseLossFormula, frozen=True, kw_only=True, tag="dppo_tv"):
    """DPPO's loss, which stops pushing a token once its probability has moved by delta
    (2602.04879).

    The loss of a token is -rho A 1[not (A > 0 and p - q > delta) and not (A < 0 and q - p > delta)]
    + pull (l - m)². Here p and l are the token's probability and log-probability under the policy,
    q and m those under the sampler, rho = p / q, and A is the advantage.

    A token is no longer pushed once its probability has moved by delta in that direction. A rare
    token may still change by a large factor, which a bound on the ratio would forbid. Needs no
    recomputed old log-probabilities. The default.
    """

    delta: float = 0.2
    """Bound on the change of a token's probability."""
    pull: float = 1e-3
    """Weight of the squared difference between the current and the sampler's log-probability of a
    token, which keeps the policy close to the sampler."""

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
    """DPPO's loss with a capped importance ratio as a weight, as in verl.

    The loss of a token is -sg(min(r, cap)) A l, or 0 if DPPO masks it. Which tokens are masked is
    decided as by ``dppo_tv`` (or ``dppo_kl``), but relative to o instead of the sampler. The
    gradient flows only through l, the token's log-probability. Here o is its log-probability at the
    start of the step, r the importance ratio of l to o, A the advantage, and sg stops the gradient.

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
    """DPPO's loss with a bound on each token's KL divergence.

    The loss of a token is that of ``dppo_tv`` without ``pull``, but it masks a token that has moved
    in the direction of A once its binary KL, q log(q/p) + (1-q) log((1-q)/(1-p)), exceeds delta.
    Here A is the advantage, and p and q are the token's probabilities under the policy and the
    sampler.

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
