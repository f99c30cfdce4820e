"""Distillation losses over k candidate tokens per position.

Each of the three forms is a function that returns the unweighted loss at each position.

    forward     Σ_k p_T (log p_T − log p)                on the teacher's likeliest tokens
    reverse     Σ_{k+1} p (log p − log p_T)              same, plus one bin for all others (V2)
    surrogate   Σ_k max(−A ρ, −A clip(ρ, 1−ε_l, 1+ε_h))  on the policy's likeliest tokens (V3)
                A = clip(log p_T − log p_old, ±C) · softmax_k(log p_old),  ρ = p / p_old

Log-probabilities are over the whole vocabulary and are never renormalized over the k tokens, since
otherwise mass could leak to other tokens without a penalty. The candidates are chosen in
``signals/teacher.py``.

Legend: E entries, k candidates per entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KdKind = Literal["forward", "reverse", "surrogate"]
LEAST = 1e-8
"""Lower bound for the total probability of the tokens outside the k candidates, so that its
logarithm is finite even if the candidates are the whole vocabulary.
"""


def forward_kl(teacher: Tensor, now: Tensor) -> Tensor:
    """Return the forward KL divergence, KL(teacher, policy), at each of E positions.

    The result has shape [E]. Both inputs are log-probabilities of k candidate tokens per position,
    [E, k].

    Example:
        p_T = (0.2, 0.7, 0.1), p = (0.6, 0.3, 0.1)    # 0.373386
    """
    return (teacher.exp() * (teacher - now)).sum(-1)


def reverse_kl(teacher: Tensor, now: Tensor) -> Tensor:
    """Return the reverse KL divergence, KL(policy, teacher), at each of E positions.

    The result has shape [E]. Both inputs are log-probabilities of k candidate tokens per position,
    [E, k]; all other tokens together count as one more candidate. The KL is differentiated
    directly, without a policy gradient.

    Example:
        p_T = (0.2, 0.7, 0.1), p = (0.6, 0.3, 0.1)    # 0.404978
    """
    rest, rest_teacher = _remaining_probability(now), _remaining_probability(teacher)
    return (now.exp() * (now - teacher)).sum(-1) + rest * (rest.log() - rest_teacher.log())


def clipped_ppo_surrogate(
    teacher: Tensor,
    old: Tensor,
    now: Tensor,
    clip: float = 1.0,
    low: float = 0.2,
    high: float = 0.28,
) -> Tensor:
    """Return PPO's clipped surrogate loss at each of E positions, summed over k candidate tokens.

    A candidate's advantage is the clipped difference between its log-probabilities under the
    teacher and the sampling policy, weighted by the latter's softmax over the candidates. The
    inputs are log-probabilities [E, k] of the candidates under the teacher, the sampling policy
    (``old``) and the current policy (``now``).

    Example:
        p_T = (0.2, 0.7), p_old = p = (0.6, 0.3), clip = 1    # 0.384234
    """
    advantages = ((teacher - old).clamp(-clip, clip) * old.softmax(-1)).detach()
    ratio = (now - old.detach()).clamp(-20.0, 20.0).exp()
    losses = (-advantages * ratio).maximum(-advantages * ratio.clamp(1 - low, 1 + high))
    return losses.sum(-1)


def _remaining_probability(logprobs: Tensor) -> Tensor:
    """Return the total probability of all tokens outside the k candidates.

    It is at least ``LEAST``, so that its logarithm is finite.
    """
    return (1 - logprobs.exp().sum(-1)).clamp(min=LEAST)
