"""The SAPO loss, which replaces PPO's clip with a sigmoid.

The gradient fades but is never cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ramify.train.losses.base import (
    BaseLossFormula,
    PolicyLossInputs,
    empty_token_mask,
    importance_ratio,
)

if TYPE_CHECKING:
    from torch import Tensor


class Sapo(BaseLossFormula, frozen=True, kw_only=True, tag="sapo"):
    """SAPO's loss, in which a sigmoid replaces PPO's clip (2511.20347).

    The loss of a token is -(4/tau) sigmoid(tau (r - 1)) A, where tau depends on the sign of A. Here
    r is the importance ratio and A the advantage.

    Example:
        train.LossSpec(policy=train.Sapo(tau_negative=1.1))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    sequence_mean: bool = True
    """Whether to average the loss within each sequence (a call or a rollout, see
    ``rl.loss.sequence``), and then over the sequences, as in the paper. False: average according
    to ``rl.algorithm.reduction``.
    """

    def per_token(self, tokens: PolicyLossInputs) -> Tensor:
        r, advantages = importance_ratio(tokens.now, tokens.old), tokens.advantages
        tau = advantages.new_full((), self.tau_positive).where(
            advantages > 0, advantages.new_full((), self.tau_negative)
        )
        return -(4 / tau) * (tau * (r - 1)).sigmoid() * advantages

    def clipped(self, tokens: PolicyLossInputs) -> Tensor:
        return empty_token_mask(tokens)
