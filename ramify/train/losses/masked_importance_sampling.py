"""A policy gradient weighted by importance ratios between the current policy and the sampler.

Tokens whose ratio is out of bounds are masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor


class MaskedImportanceSamplingLoss(BaseLossFormula, frozen=True, kw_only=True, tag="rollout_is"):
    """Policy gradient weighted by the importance ratio to the sampler, without the tokens whose
    ratio is out of bounds (2602.15763).

    The loss of a token is -sg(rho 1[1 - low < rho < 1 + high]) A l, where rho is the ratio, so a
    token with rho out of bounds has no gradient. Here sg stops the gradient, A is the advantage and
    l the log-probability. Needs no recomputed old log-probabilities.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        rho = importance_ratio(tokens.now.detach(), tokens.sampler)
        return -rho.masked_fill(self.clipped(tokens), 0.0) * tokens.advantages * tokens.now

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        rho = importance_ratio(tokens.now.detach(), tokens.sampler)
        return (rho >= 1 + self.clip_high) | (rho <= 1 - self.clip_low)
