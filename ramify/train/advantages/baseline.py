"""Baselines: how much better a call did than the calls of the *other* trees of its group.

Pure functions ``[returns of each tree's calls], [tokens of each tree] -> [advantages]``; only
``by_length`` uses the tokens. ``credit.py`` decides which calls are compared. All of them follow
two rules, so that a call's number does not depend on how many calls its own tree has:

- The calls of one tree are averaged first, so every tree counts once.
- A tree is compared with the other trees only. Dr.GRPO's ``mean`` includes the tree itself, which
  is the same times (n-1)/n for n trees.

    one call in each tree, returns 3, 1, 1, 3   mean: 1, -1, -1, 1     mean_std: ±0.866
                                                leave_one_out: ±4/3    mean_ratio: ±0.5
    returns 3, 1, 0, 0                          best_alone: 2/std, 0, 0, 0
    nine calls that returned 1, and one, 0      mean: 9 times 0.5, and -0.5

A tree that cannot be compared with another gets 0 (two public implementations return the raw
reward).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

EPSILON = 1e-6

ByTree = Sequence[Sequence[float]]
"""Returns of the compared calls, by tree; no tree is empty."""
Advantages = list[list[float]]
"""An advantage for each of them."""


class Baseline(Protocol):
    """A function from the returns of several trees to advantages."""

    def __call__(self, returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
        """``lengths``: sampled tokens of the compared calls, by tree; empty if unknown."""
        ...


def leave_one_out(returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
    """A = R - mean of the other trees. RLOO (2402.14740): unbiased, because the baseline does not
    depend on the call's own tree."""
    means = [fmean(tree) for tree in returns]
    others = [means[:index] + means[index + 1 :] for index in range(len(means))]
    return _compared(returns, [fmean(other) if other else 0.0 for other in others])


def mean(returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
    """A = (n-1)/n · (R - mean of the other trees), which is R - mean(R) for one call in each tree.
    Dr.GRPO (2503.20783): no division by the spread, so advantages keep their scale on both hard
    and easy tasks."""
    return _scaled(leave_one_out(returns), (len(returns) - 1) / max(len(returns), 1))


def mean_std(returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
    """``mean`` divided by (std + 1e-6), with the unbiased std in which every tree counts once.
    GRPO (2402.03300)."""
    return _scaled(mean(returns), 1 / (_std(returns) + EPSILON))


def mean_ratio(returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
    """``mean`` divided by (mean(R) + 1e-6), or 0 if the mean is not positive. MaxRL (2602.02710):
    with rewards of 0 and 1 this is the gradient of the log of the pass rate, so rare successes
    count for more."""
    centre = fmean(map(fmean, returns)) if returns else 0.0
    return _scaled(mean(returns), 1 / (centre + EPSILON) if centre > 0 else 0.0)


def best_alone(returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
    """(R - second best tree) / (std + 1e-6) for the best tree, 0 for the others; all 0 if two trees
    share the best mean. GRPO for pass@k: the value of the n-th attempt."""
    means = [fmean(tree) for tree in returns]
    if len(means) < 2 or sorted(means)[-1] == sorted(means)[-2]:
        return _zeros(returns)
    second, best = sorted(means)[-2:]
    lead = 1 / (_std(returns) + EPSILON)
    return [
        [(value - second) * lead if own == best else 0.0 for value in tree]
        for tree, own in zip(returns, means, strict=True)
    ]


def by_length(returns: ByTree, lengths: Sequence[int] = ()) -> Advantages:
    """A = R - sum(len · R) / sum(len) for one call in each tree; in general (1 - w) · (R - b) with
    w the tree's share of the tokens and b the others' mean by length. OPO (2505.23585): has the
    least variance if gradients grow with length. Biased where a call can choose its length.

    returns 1, 0 of lengths 1, 3: the baseline is 1/4, advantages 3/4, -1/4"""
    total = sum(lengths)
    if not total:
        return mean(returns)
    weighed = [size * fmean(tree) for size, tree in zip(lengths, returns, strict=True)]
    centres = [
        (sum(weighed) - own) / (total - size) if total > size else 0.0
        for own, size in zip(weighed, lengths, strict=True)
    ]
    return [
        [value * (1 - size / total) for value in tree]
        for tree, size in zip(_compared(returns, centres), lengths, strict=True)
    ]


def _compared(returns: ByTree, centres: Sequence[float]) -> Advantages:
    """R - centre of its tree. Exactly 0 if all returns are equal, whatever rounding does to the
    centres, and if there is only one tree."""
    values = [value for tree in returns for value in tree]
    if len(returns) < 2 or min(values) == max(values):
        return _zeros(returns)
    return [
        [value - centre for value in tree] for tree, centre in zip(returns, centres, strict=True)
    ]


def _zeros(returns: ByTree) -> Advantages:
    return [[0.0] * len(tree) for tree in returns]


def _scaled(advantages: Advantages, scale: float) -> Advantages:
    return [[value * scale for value in tree] for tree in advantages]


def _std(returns: ByTree) -> float:
    """The unbiased standard deviation of returns in which every tree counts once."""
    if len(returns) < 2:
        return 0.0
    centre = fmean(map(fmean, returns))
    variance = fmean(fmean((value - centre) ** 2 for value in tree) for tree in returns)
    return math.sqrt(variance * len(returns) / (len(returns) - 1))
