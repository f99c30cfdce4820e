"""Advantages from the returns of attempts at one thing: what each was better than.

Pure functions ``[n returns] -> [n advantages]``. Which calls are attempts at one thing is ``credit.py``'s to decide. One
attempt has nothing to be compared with: its advantage is 0 (two public implementations return the raw reward there).

    returns 3, 1, 1, 3     mean: 1, -1, -1, 1     mean_std: ±0.866     leave_one_out: ±4/3
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

Baseline = Callable[[Sequence[float]], list[float]]


def mean(returns: Sequence[float]) -> list[float]:
    """A_i = R_i - mean(R). Dr.GRPO (2503.20783): no division, so that hard and easy tasks keep their size."""
    if len(returns) < 2 or min(returns) == max(
        returns
    ):  # exactly 0 where nothing differs, whatever floats do to a mean
        return [0.0] * len(returns)
    centre = statistics.fmean(returns)
    return [value - centre for value in returns]


def mean_std(returns: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), unbiased std. GRPO (2402.03300)."""
    centred = mean(returns)
    if not any(centred):
        return centred
    std = statistics.stdev(returns)
    return [value / (std + 1e-6) for value in centred]


def leave_one_out(returns: Sequence[float]) -> list[float]:
    """A_i = R_i - mean of the others = n/(n-1) · (R_i - mean(R)). RLOO (2402.14740)."""
    scale = len(returns) / max(len(returns) - 1, 1)
    return [value * scale for value in mean(returns)]
