"""Baselines: how much better each attempt was than other attempts at the same task.

Pure functions ``[n returns], [n lengths] -> [n advantages]``; only ``by_length`` uses the lengths.
``credit.py`` decides which calls count as attempts at the same task. A single attempt cannot be
compared with others, so its advantage is 0 (two public implementations return the raw reward).

    returns 3, 1, 1, 3     mean: 1, -1, -1, 1     mean_std: ±0.866
                           leave_one_out: ±4/3    mean_ratio: ±0.5
    returns 3, 1, 0, 0     best_alone: 2/std, 0, 0, 0
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

EPSILON = 1e-6


class Baseline(Protocol):
    """A function from the returns of several attempts to their advantages."""

    def __call__(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
        """``lengths``: sampled tokens of each attempt; empty if unknown."""
        ...


def mean(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """A_i = R_i - mean(R). Dr.GRPO (2503.20783): no division, so advantages keep their scale on
    both hard and easy tasks."""
    # Exactly 0 if all returns are equal, whatever rounding does to the mean.
    if len(returns) < 2 or min(returns) == max(returns):
        return [0.0] * len(returns)
    centre = statistics.fmean(returns)
    return [value - centre for value in returns]


def mean_std(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), with the unbiased std. GRPO (2402.03300)."""
    centred = mean(returns)
    if not any(centred):
        return centred
    std = statistics.stdev(returns)
    return [value / (std + EPSILON) for value in centred]


def leave_one_out(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """A_i = R_i - mean of the others = n/(n-1) · (R_i - mean(R)). RLOO (2402.14740)."""
    scale = len(returns) / max(len(returns) - 1, 1)
    return [value * scale for value in mean(returns)]


def mean_ratio(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """A_i = (R_i - mean(R)) / (mean(R) + 1e-6), or 0 if the mean is not positive. MaxRL
    (2602.02710): with rewards of 0 and 1 this is the gradient of the log of the pass rate, so rare
    successes count for more."""
    centre = statistics.fmean(returns) if returns else 0.0
    return [value / (centre + EPSILON) if centre > 0 else 0.0 for value in mean(returns)]


def best_alone(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """(best - second) / (std(R) + 1e-6) for the best, 0 for the others; all 0 if two share the best
    return. GRPO for pass@k: the value of the n-th attempt."""
    if not any(mean(returns)):
        return [0.0] * len(returns)
    first, second = sorted(returns, reverse=True)[:2]
    ahead = (first - second) / (statistics.stdev(returns) + EPSILON)
    return [ahead if value == first else 0.0 for value in returns]


def by_length(returns: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """A_i = R_i - sum(len · R) / sum(len). OPO (2505.23585): has the least variance if gradients
    grow with length.

    returns 1, 0 of lengths 1, 3: the baseline is 1/4, advantages 3/4, -1/4"""
    if not any(mean(returns)) or not sum(lengths):
        return mean(returns)
    centre = sum(size * value for size, value in zip(lengths, returns, strict=True)) / sum(lengths)
    return [value - centre for value in returns]
