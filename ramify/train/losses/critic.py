"""The loss of the critic, which predicts a call's return just before each of its sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.config_redaction import check_none_or_positive
from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, empty_token_mask

if TYPE_CHECKING:
    from torch import Tensor


class CriticLossInputs(NamedTuple):
    """The inputs of the critic's loss: the predicted values and the returns.

    Each tensor has shape [E], with one number for each of the E tokens of a batch.
    """

    now: Tensor
    """Predicted value V, with gradient."""
    old: Tensor
    """Predicted value V at the start of the step."""
    returns: Tensor


class ValueLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The clipped squared error of the critic, ½ max((V - R)², (clip(V, V_old ± clip) - R)²), where
    V is the predicted value and R the return.

    It is added to the policy loss at each token that has a return.
    """

    weight: float = 0.5
    """Weight of the critic's loss, relative to the policy loss."""
    clip: float | None = 0.2
    """Maximum change of the critic's value V within a step; None: no limit."""

    def __post_init__(self) -> None:
        check_none_or_positive("loss.value", "no bound", clip=self.clip)
        if self.weight <= 0:
            raise ConfigError(f"loss.value.weight={self.weight} must be above 0")

    def per_token_loss(self, values: CriticLossInputs) -> Tensor:
        """Return the critic's loss for each token, as a tensor of shape [E] for the E tokens of the
        batch."""
        squared_error = (values.now - values.returns).square()
        if self.clip is None:
            return squared_error / 2
        clipped = values.old + (values.now - values.old).clamp(-self.clip, self.clip)
        return squared_error.maximum((clipped - values.returns).square()) / 2


class CriticOnlyLoss(BaseLossFormula, frozen=True, kw_only=True, tag="critic"):
    """A policy loss that is 0, so that only the critic (``loss.value``) is trained.

    Example:
        train.LossSpec(policy=train.CriticOnlyLoss())
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        return tokens.now * 0.0

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return empty_token_mask(tokens)
