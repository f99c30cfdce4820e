"""Policy losses: what one sampled token adds to the loss, from its log-probabilities and its advantage.

    now  l    under the policy that is trained, with gradient          r = exp(clamp(l - o, ±20))
    old  o    under the policy at the step's start; the sampler's      rho = exp(clamp(l - m, ±20))
              where no old pass was made                               p = exp(l), q = exp(m)
    sampler m when the token was sampled                               A  advantage;  sg  stop-gradient

Each class is one formula and its options; each returns a loss per token, which ``loss.py`` weighs and sums. Left out:
whatever looks at more than one token at a time.

Legend: E entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ramify.errors import ConfigError

if TYPE_CHECKING:  # methods of tensors are all that is needed: a configuration is read without torch
    from torch import Tensor

_MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """What a policy loss sees; each [E], in fp32."""

    now: Tensor
    old: Tensor
    sampler: Tensor
    advantages: Tensor


class PolicyLoss(Protocol):
    def per_token(self, tokens: Tokens) -> Tensor:
        """[E]"""
        ...

    def clipped(self, tokens: Tokens) -> Tensor:
        """[E] whether the token's policy gradient was cut off; without gradient."""
        ...


def ratio(now: Tensor, then: Tensor) -> Tensor:
    """exp(now - then), the difference clamped to ±20."""
    return (now - then).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


class PpoClip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="ppo_clip"):
    """-min(r A, clip(r, 1 - low, 1 + high) A)   (1707.06347; a higher upper bound: DAPO, 2503.14476)"""

    clip_low: float = 0.2
    clip_high: float = 0.28

    def per_token(self, tokens: Tokens) -> Tensor:
        r, advantages = ratio(tokens.now, tokens.old), tokens.advantages
        return -(r * advantages).minimum(r.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)

    def clipped(self, tokens: Tokens) -> Tensor:
        r, advantages = ratio(tokens.now, tokens.old), tokens.advantages
        return ((advantages > 0) & (r > 1 + self.clip_high)) | ((advantages < 0) & (r < 1 - self.clip_low))


class DualClip(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="dual_clip"
):
    """``ppo_clip``, of which a token with A < 0 adds at most -bound A, however far r has run away   (1912.09729)"""

    clip_low: float = 0.2
    clip_high: float = 0.28
    bound: float = 3.0

    def per_token(self, tokens: Tokens) -> Tensor:
        loss, most = self._ppo().per_token(tokens), -self.bound * tokens.advantages
        return loss.minimum(most).where(tokens.advantages < 0, loss)

    def clipped(self, tokens: Tokens) -> Tensor:
        ran_away = (tokens.advantages < 0) & (ratio(tokens.now, tokens.old) > self.bound)
        return self._ppo().clipped(tokens) | ran_away

    def _ppo(self) -> PpoClip:
        return PpoClip(clip_low=self.clip_low, clip_high=self.clip_high)


class Cispo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="cispo"):
    """-sg(clip(r, 1 - low, 1 + high)) A l   (2506.13585): every token keeps a gradient, its weight is bounded."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    anchor: str = "old"
    """r is taken against ``old`` or ``sampler``."""

    def __post_init__(self) -> None:
        if self.anchor not in ("old", "sampler"):
            raise ConfigError(f"cispo anchor '{self.anchor}' is neither 'old' nor 'sampler'")

    def per_token(self, tokens: Tokens) -> Tensor:
        weight = self._ratio(tokens).clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * tokens.advantages * tokens.now

    def clipped(self, tokens: Tokens) -> Tensor:
        r = self._ratio(tokens)
        return (r > 1 + self.clip_high) | (r < 1 - self.clip_low)

    def _ratio(self, tokens: Tokens) -> Tensor:
        return ratio(tokens.now.detach(), tokens.old if self.anchor == "old" else tokens.sampler)


class DppoTv(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="dppo_tv"):
    """-rho A 1[not (A > 0 and p - q > delta) and not (A < 0 and q - p > delta)] + pull (l - m)²   (2602.04879)

    A token stops being pushed once its probability has moved by delta that way; a rare token may change by a large factor,
    which a bound on the ratio forbids. No old pass is needed. The default."""

    delta: float = 0.2
    pull: float = 1e-3

    def per_token(self, tokens: Tokens) -> Tensor:
        rho = ratio(tokens.now, tokens.sampler)
        push = -rho * tokens.advantages * (~self.clipped(tokens)).to(rho.dtype)
        return push + self.pull * (tokens.now - tokens.sampler).square()

    def clipped(self, tokens: Tokens) -> Tensor:
        moved = tokens.now.detach().exp() - tokens.sampler.exp()
        return ((tokens.advantages > 0) & (moved > self.delta)) | ((tokens.advantages < 0) & (-moved > self.delta))


class ImportanceSampling(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="importance_sampling"
):
    """-rho A, without any bound; with one step per rollout it is the plain policy gradient."""

    def per_token(self, tokens: Tokens) -> Tensor:
        return -ratio(tokens.now, tokens.sampler) * tokens.advantages

    def clipped(self, tokens: Tokens) -> Tensor:
        return (tokens.now > 0).logical_and(tokens.now < 0)


AnyPolicyLoss = PpoClip | DualClip | Cispo | DppoTv | ImportanceSampling
"""In a configuration ``{"name": "ppo_clip", "clip_high": 0.3}``."""

POLICY_LOSSES: dict[str, type[AnyPolicyLoss]] = {
    "ppo_clip": PpoClip,
    "dual_clip": DualClip,
    "cispo": Cispo,
    "dppo_tv": DppoTv,
    "importance_sampling": ImportanceSampling,
}
