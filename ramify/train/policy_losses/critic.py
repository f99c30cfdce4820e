"""What a critic learns: to say, before each sampled token, what its call will come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.optional_fields import check_optional
from ramify.train.policy_losses.base import LossFormula, LossTokens, nowhere

if TYPE_CHECKING:
    from torch import Tensor


class CriticTokens(NamedTuple):
    """What a critic's loss sees; each [E]."""

    now: Tensor
    """V, with gradient."""
    old: Tensor
    """At the step's start."""
    returns: Tensor


class ValueLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²), which is added to the policy's at each token
    that has a return."""

    weight: float = 0.5
    clip: float | None = 0.2
    """None: no bound."""

    def __post_init__(self) -> None:
        check_optional("loss.value", "no bound", clip=self.clip)
        if self.weight <= 0:
            raise ConfigError(f"loss.value.weight={self.weight} must be above 0")

    def per_token(self, values: CriticTokens) -> Tensor:
        """[E]"""
        missed = (values.now - values.returns).square()
        if self.clip is None:
            return missed / 2
        near = values.old + (values.now - values.old).clamp(-self.clip, self.clip)
        return missed.maximum((near - values.returns).square()) / 2


class CriticOnlyLoss(LossFormula, frozen=True, kw_only=True, tag="critic"):
    """0: nothing of the policy is trained, only the critic beside it (``loss.value``)."""

    def per_token(self, tokens: LossTokens) -> Tensor:
        return tokens.now * 0.0

    def clipped(self, tokens: LossTokens) -> Tensor:
        return nowhere(tokens)
