"""The CISPO loss, which uses the importance ratio only as a weight without gradient.

A token keeps its gradient even if it is far off-policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.errors import ConfigError
from ramify.train.losses.base import BaseLossFormula, PolicyLossInputs, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(BaseLossFormula, frozen=True, kw_only=True, tag="cispo"):
    """CISPO's loss, which weights each token by a bounded importance ratio (2506.13585).

    The loss of a token is -sg(clip(r, 1 - low, 1 + high)) A l, or with ``cap`` -sg(min(r, cap)) A
    l. Here sg stops the gradient, r is the importance ratio, A the advantage and l the
    log-probability. Every token keeps a gradient.

    The paper sets no effective lower bound, as ``cap`` does.

    Example:
        train.LossSpec(policy=train.Cispo(clip_high=0.3))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float | None = None
    """Upper bound of the importance weight, replacing ``clip_low`` and ``clip_high``; the weight
    then has no lower bound. ScaleRL (arXiv 2510.13786) calls it epsilon_max and sets it to 5. None:
    use ``clip_low`` and ``clip_high``."""
    anchor: str = "old"
    """Policy in the denominator of the importance ratio r: ``old`` (see ``rl.loss.old``) or
    ``sampler``."""

    def __post_init__(self) -> None:
        if self.anchor not in ("old", "sampler"):
            raise ConfigError(f"cispo anchor '{self.anchor}' is neither 'old' nor 'sampler'")

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        low, high = self._bounds
        weight = self._ratio(tokens).clamp(low, high)
        return -weight * tokens.advantages * tokens.now

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        r, (low, high) = self._ratio(tokens), self._bounds
        return (r > high) | (r < low)

    @property
    def _bounds(self) -> tuple[float, float]:
        return (1 - self.clip_low, 1 + self.clip_high) if self.cap is None else (0.0, self.cap)

    def _ratio(self, tokens: PolicyLossInputs) -> Tensor:
        return importance_ratio(
            tokens.now.detach(), tokens.old if self.anchor == "old" else tokens.sampler
        )
