"""How long or cut-off rollouts are treated: pure functions on rewards, lengths and flags.

A rollout that was cut off by a limit says little about the answer it would have given. ``punish``
(the default) keeps its score. ``mask`` keeps it in the baseline but removes its tokens from the
loss (DAPO's overlong filtering). The soft overlong penalty and the length penalty change the reward
before any comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Overlong = Literal["punish", "mask"]


class RolloutLength(NamedTuple):
    """The length of one rollout."""

    output: int
    """Sampled tokens."""
    input: int
    """Prompt tokens."""
    turns: int


class LengthLimits(NamedTuple):
    """The maximum lengths that the length penalty divides by."""

    output: int
    input: int
    turns: int


def soft_overlong(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO (2503.14476) eq. 13: 0 up to max_tokens - buffer, then a linear fall to -1 at
    max_tokens, and -1 beyond.

    max_tokens 100, buffer 20:  80 -> 0,  90 -> -0.5,  100 -> -1,  150 -> -1."""
    if buffer <= 0:
        return -1.0 if num_tokens > max_tokens else 0.0
    return min(0.0, max(-1.0, (max_tokens - buffer - num_tokens) / buffer))


def length_penalty(
    rewards: Sequence[float], lengths: Sequence[RolloutLength], most: LengthLimits, weight: float
) -> list[float]:
    """R'_i = R_i - max(0, mean(R)) · (w·out_i/max_out + 0.1·in_i/max_in + 0.1·turns_i/max_turns),
    for the rollouts of one group.

    The better a group does, the more brevity counts. A group whose mean is not above 0 is left
    unchanged: a negative mean would reward length."""
    centre = max(0.0, sum(rewards) / len(rewards)) if rewards else 0.0
    return [
        reward
        - centre
        * (
            weight * n.output / most.output
            + 0.1 * n.input / most.input
            + 0.1 * n.turns / most.turns
        )
        for reward, n in zip(rewards, lengths, strict=True)
    ]
