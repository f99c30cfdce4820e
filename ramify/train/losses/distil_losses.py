"""Distillation losses over k tokens per position: three forms, each a function per entry, before
weights.

    forward     Σ_k p_T (log p_T − log p)                on the teacher's likeliest tokens
    reverse     Σ_{k+1} p (log p − log p_T)              same, plus one bin for all others (V2)
    surrogate   Σ_k max(−A ρ, −A clip(ρ, 1−ε_l, 1+ε_h))  on the policy's likeliest tokens (V3)
                A = clip(log p_T − log p_old, ±C) · softmax_k(log p_old),  ρ = p / p_old

Log-probabilities are over the whole vocabulary and are never renormalized over the k tokens:
otherwise mass could leak to other tokens without a penalty. Not here: where the candidates come
from (``signals/teacher.py``).

Legend: E entries, k candidates per entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KdKind = Literal["forward", "reverse", "surrogate"]
LEAST = 1e-8
"""Lower bound of the mass of the bin of all other tokens. If the k tokens are the whole vocabulary,
the bin is empty and adds 0."""


def forward_kl(teacher: Tensor, now: Tensor) -> Tensor:
    """[E] from [E, k]. p_S .6 .3 .1, p_T .2 .7 .1: 0.373386."""
    return (teacher.exp() * (teacher - now)).sum(-1)


def reverse_kl(teacher: Tensor, now: Tensor) -> Tensor:
    """[E] from [E, k]. Same example: 0.404978. It is differentiated directly, without a policy
    gradient."""
    rest, rest_teacher = _rest(now), _rest(teacher)
    return (now.exp() * (now - teacher)).sum(-1) + rest * (rest.log() - rest_teacher.log())


def surrogate(
    teacher: Tensor,
    old: Tensor,
    now: Tensor,
    clip: float = 1.0,
    low: float = 0.2,
    high: float = 0.28,
) -> Tensor:
    """[E] from [E, k]; ``old`` is the sampling policy. p_S .6 .3, p_T .2 .7, C=1, on-policy:
    0.384234."""
    advantages = ((teacher - old).clamp(-clip, clip) * old.softmax(-1)).detach()
    ratio = (now - old.detach()).clamp(-20.0, 20.0).exp()
    losses = (-advantages * ratio).maximum(-advantages * ratio.clamp(1 - low, 1 + high))
    return losses.sum(-1)


def _rest(logprobs: Tensor) -> Tensor:
    """Mass of all other tokens."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=LEAST)
