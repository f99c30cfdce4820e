"""Importance sampling without bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.train.losses.base import LossFormula, LossTokens, nowhere, ratio

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceSampling(LossFormula, frozen=True, kw_only=True, tag="importance_sampling"):
    """-rho A, without bounds; with one optimizer step per rollout it is the plain policy
    gradient.

    Example:
        train.LossSpec(policy=train.ImportanceSampling())
    """

    def per_token(self, tokens: LossTokens) -> Tensor:
        return -ratio(tokens.now, tokens.sampler) * tokens.advantages

    def clipped(self, tokens: LossTokens) -> Tensor:
        return nowhere(tokens)
