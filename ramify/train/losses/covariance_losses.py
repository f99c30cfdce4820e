"""Clip-Cov and KL-Cov (2505.22617), two losses that slow the decrease of entropy.

Most entropy is lost at a few tokens that are both likely and better than average.

These tokens are selected from all tokens of the optimizer step, before training on any of them.
They are the ones that contribute most to the covariance of advantage and log-probability:

    cov_i = (A_i - mean A) (l_i - mean l)                  both means over all tokens of the step

Advantages are used as they are. Multiplied by token weights they would be too small to reach any
bound, and the loss would silently become plain PPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ramify.errors import ConfigError
from ramify.train.losses.base import (
    BaseLossFormula,
    PolicyLossInputs,
    TokenSelectionInputs,
    clipped_surrogate,
    empty_token_mask,
    importance_ratio,
    is_clipped,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from ramify.train.losses.base import Doubles


class ClipCov(BaseLossFormula, frozen=True, kw_only=True, tag="clip_cov"):
    """Clip-Cov (2505.22617): ``ppo_clip`` without a random ``share`` of all tokens, drawn from
    those that reduce entropy most (cov in (cov_low, cov_high)).

    Here cov is a token's contribution to the covariance of advantage and log-probability.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    share: float = 2e-4
    """Fraction of all tokens to select; at least one token, if any qualifies."""
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        _check_share(self.share)

    def choose(self, step: TokenSelectionInputs) -> npt.NDArray[np.bool_]:
        cov = covariance_terms(step)
        r = np.exp(np.clip(step.now - step.old, -20, 20))
        is_free = ~np.where(step.advantages > 0, r > 1 + self.clip_high, r < 1 - self.clip_low)
        candidates = np.flatnonzero((cov > self.cov_low) & (cov < self.cov_high) & is_free)
        chosen = np.zeros(len(cov), np.bool_)
        chosen[
            candidates[np.argsort(step.keys[candidates])][: max(1, int(self.share * len(cov)))]
        ] = True
        return chosen

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        loss = clipped_surrogate(
            importance_ratio(tokens.now, tokens.old),
            tokens.advantages,
            self.clip_low,
            self.clip_high,
        )
        return loss.masked_fill(_require_chosen(tokens), 0.0)

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        by_ratio = is_clipped(
            importance_ratio(tokens.now, tokens.old),
            tokens.advantages,
            self.clip_low,
            self.clip_high,
        )
        return by_ratio | _require_chosen(tokens)


class KlCov(BaseLossFormula, frozen=True, kw_only=True, tag="kl_cov"):
    """KL-Cov: policy gradient with a penalty on the tokens that reduce entropy most (2505.22617).

    The loss of a token is -r A, plus beta |l - o| for the ``share`` of all tokens that add most to
    the covariance of advantage and log-probability. Here r is the importance ratio, A the
    advantage, and l and o are a token's new and old log-probabilities.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    share: float = 2e-4
    """Fraction of all tokens to penalize; at least one token."""
    beta: float = 1.0

    def __post_init__(self) -> None:
        _check_share(self.share)

    def choose(self, step: TokenSelectionInputs) -> npt.NDArray[np.bool_]:
        cov = covariance_terms(step)
        chosen = np.zeros(len(cov), np.bool_)
        chosen[np.lexsort((step.keys, -cov))[: max(1, int(self.share * len(cov)))]] = True
        return chosen

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        penalty = (tokens.now - tokens.old).abs().masked_fill(~_require_chosen(tokens), 0.0)
        return -importance_ratio(tokens.now, tokens.old) * tokens.advantages + self.beta * penalty

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return empty_token_mask(tokens)


def covariance_terms(step: TokenSelectionInputs) -> Doubles:
    """Return the contribution of each token of a step to the covariance of advantage and
    log-probability.

    For token i it is (A_i - mean A) (l_i - mean l), where A is the advantage and l the
    log-probability. The array has one number per token of the step.
    """
    cov: Doubles = (step.advantages - step.advantages.mean()) * (step.now - step.now.mean())
    return cov


def _require_chosen(tokens: PolicyLossInputs) -> Tensor:
    if tokens.chosen is None:
        raise ConfigError(
            "clip_cov and kl_cov first choose among all tokens of a step, but the batch has no "
            "stream 'chosen'"
        )
    return tokens.chosen


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} of tokens must be above 0 and at most 1")
