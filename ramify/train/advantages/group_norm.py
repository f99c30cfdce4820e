"""Normalisation of per-turn numbers within a group. Pure functions: one mapping step -> number per
trajectory, in and out.

    step_index   for each step index, over the trajectories of the group:
                 (R - mean) / (std + 1e-6), with the population std

A step index that only one trajectory has gives 0, since there is nothing to compare it with (a
public implementation keeps the raw number, which is then the largest of all). Equal numbers give 0,
too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeVar

K = TypeVar("K", bound=Hashable)
Norm = Literal["none", "group", "step_index"]


def step_index(rows: Sequence[Mapping[K, float]]) -> list[dict[K, float]]:
    """Normalise within each step index.

    R [2, 2], [-2, 0, -2], [0, -2]: step 0 gives 1.2247, -1.2247, 0; step 1 the same; step 2, which
    only one trajectory has, gives 0."""
    buckets: dict[K, list[float]] = defaultdict(list)
    for row in rows:
        for step, value in row.items():
            buckets[step].append(value)
    return [{step: _scaled(value, buckets[step]) for step, value in row.items()} for row in rows]


def group(rows: Sequence[Mapping[K, float]]) -> list[dict[K, float]]:
    """Subtract the mean over the group's trajectories, each counted by its own mean, so that long
    trajectories weigh no more than short ones.

    [1, 1], [0]: means 1 and 0, so 0.5, 0.5 and -0.5"""
    means = [statistics.fmean(row.values()) for row in rows if row]
    if len(means) < 2:
        return [dict.fromkeys(row, 0.0) for row in rows]
    centre = statistics.fmean(means)
    return [{step: value - centre for step, value in row.items()} for row in rows]


def normalised(rows: Sequence[Mapping[K, float]], norm: Norm) -> list[dict[K, float]]:
    """``rows`` normalised by the method that ``norm`` names."""
    if norm == "step_index":
        return step_index(rows)
    return group(rows) if norm == "group" else [dict(row) for row in rows]


def early_first(values: Sequence[float], gamma: float) -> list[float]:
    """A_j · (1 + γ (1 - Σ_{l<j} |A_l| / Σ |A|)): early tokens get more weight (2606.22600).

    1, 1, 2 with γ = 0.5: 1.5, 1.375, 2.5"""
    total = sum(abs(value) for value in values)
    if not gamma or not total:
        return list(values)
    weighted, before = [], 0.0
    for value in values:
        weighted.append(value * (1 + gamma * (1 - before / total)))
        before += abs(value)
    return weighted


def _scaled(value: float, bucket: Sequence[float]) -> float:
    if len(bucket) < 2 or min(bucket) == max(bucket):
        return 0.0
    return (value - statistics.fmean(bucket)) / (statistics.pstdev(bucket) + 1e-6)
