"""The importance-sampling loss, a policy gradient weighted by the unbounded importance ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.train.losses.base import (
    BaseLossFormula,
    PolicyLossInputs,
    empty_token_mask,
    importance_ratio,
)

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceSamplingLoss(BaseLossFormula, frozen=True, kw_only=True, tag="importance_sampling"):
    """Policy gradient with an unbounded importance ratio to the sampler.

    The loss of a token is -rho A, where rho is the ratio and A the advantage. As long as the policy
    equals the sampler, it is the plain policy gradient.

    Example:
        train.LossSpec(policy=train.ImportanceSamplingLoss())
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        return -importance_ratio(tokens.now, tokens.sampler) * tokens.advantages

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return empty_token_mask(tokens)
