"""How fast one engine is, as a function of how many sequences it decodes at once; and how that is read off requests.

    step(b) seconds   one token for each of b sequences
    + prompt_token_s  for each prompt token that is read beside them, which all of them wait for
    request_s         for each request, outside the engine: rendering, the wire

Requests say it: one of n tokens, with b others beside it on average, while P prompt tokens were read in that engine, took
``request_s + n·base + n·b·each + P·prompt_token_s``; four numbers, none negative, found by least squares.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ramify.errors import ConfigError


class Rate(msgspec.Struct, frozen=True):
    """Of one engine."""

    points: tuple[tuple[float, float], ...]
    """(sequences at once, seconds of a step), by sequences; between two a line, beyond the last on along it."""
    prompt_token_s: float = 0.0
    request_s: float = 0.0

    def step_s(self, sequences: float) -> float:
        """Seconds of one step with so many sequences."""
        points = self.points
        if len(points) == 1 or sequences <= points[0][0]:
            return points[0][1]
        right = min(max(bisect_right(points, (sequences, float("inf"))), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (sequences - x0) / (x1 - x0)

    def tokens_per_s(self, sequences: float) -> float:
        """That all of them get together."""
        return sequences / self.step_s(sequences)


class Asked(NamedTuple):
    """One request as it was measured, at one engine or at several that share the load evenly."""

    begun_s: float
    ended_s: float
    new: int
    """Prompt tokens that were read."""
    sampled: int


def fit(asked: Sequence[Asked], engines: int = 1, slots: int | None = None, *, hidden: float = 1.0) -> Rate:
    """The rate of one of ``engines`` that explains ``asked`` best. Requests that may have waited for one of its ``slots``
    are left out. ``hidden``: for each request that is known, so many ran. Raises ConfigError where nothing is left to go
    by."""
    rows, seconds = [], []
    room = None if slots is None else slots * engines
    share = hidden / engines
    for request, beside, most, read in zip(asked, *_beside(asked), strict=True):
        if request.sampled and (room is None or most * hidden <= room):
            at_once = max(1.0, beside * share)
            rows.append((1.0, request.sampled, request.sampled * at_once, max(float(request.new), read * share)))
            seconds.append(request.ended_s - request.begun_s)
    if len(rows) < 4:
        raise ConfigError(
            f"{len(rows)} of {len(asked)} requests say how fast an engine is (a reply, and a slot at once): keep more "
            "rollouts (cadence.rollouts=1), or measure the engine itself with --calibrate MODEL"
        )
    request_s, base_s, each_s, prompt_s = non_negative(rows, seconds)
    most_at_once = max(2.0, float(slots or max(_beside(asked)[1])))
    ends = ((1.0, base_s + each_s), (most_at_once, base_s + each_s * most_at_once))
    return Rate(ends, prompt_s, request_s)


def _beside(asked: Sequence[Asked]) -> tuple[list[float], list[int], list[int]]:
    """For each request: how many ran on average while it did, itself included; the most at one time; and the prompt
    tokens that were read meanwhile."""
    begins = np.array([each.begun_s for each in asked])
    ends = np.array([each.ended_s for each in asked])
    new = np.array([each.new for each in asked])
    order = np.argsort(np.concatenate([ends, begins]), kind="stable")  # at one moment ends come first
    at = np.concatenate([ends, begins])[order]
    running = np.cumsum(np.where(order < len(asked), -1, 1))
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(at))])
    means, mosts, reads = [], [], []
    by_begin = np.argsort(begins, kind="stable")
    read_until = np.concatenate([[0], np.cumsum(new[by_begin])])
    for begin, end in zip(begins, ends, strict=True):
        first, last = np.searchsorted(at, begin, "right"), np.searchsorted(at, end, "left")
        took = end - begin
        around = np.interp([begin, end], at, area)
        means.append(float(around[1] - around[0]) / took if took > 0 else 1.0)
        mosts.append(int(running[max(first - 1, 0) : max(last, first)].max()))
        from_, to = np.searchsorted(begins[by_begin], begin, "left"), np.searchsorted(begins[by_begin], end, "left")
        reads.append(int(read_until[max(to, from_ + 1)] - read_until[from_]))
    return means, mosts, reads


def non_negative(given: Sequence[Sequence[float]], took: Sequence[float]) -> list[float]:
    """Least squares with no number below zero: the best of all choices of which are zero; there are few."""
    rows, seconds = np.array(given, dtype=float), np.array(took, dtype=float)
    num = rows.shape[1]
    best, least = [0.0] * num, float(seconds @ seconds)
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    for size in range(1, num + 1):
        for chosen in map(list, itertools.combinations(range(num), size)):
            found, *_ = np.linalg.lstsq(rows[:, chosen] / scale[chosen], seconds, rcond=None)
            off = seconds - rows[:, chosen] / scale[chosen] @ found
            if (found >= 0).all() and float(off @ off) < least * (1 - 1e-9):
                least = float(off @ off)
                best = [0.0] * num
                for index, value in zip(chosen, found / scale[chosen], strict=True):
                    best[index] = float(value)
    return best


def from_steps(measured: Iterable[tuple[int, float]], prompt_token_s: float, request_s: float = 0.0) -> Rate:
    """Of (sequences at once, seconds of a step) that were measured one by one; a step with more sequences is not
    faster."""
    points: list[tuple[float, float]] = []
    for sequences, step_s in sorted(measured):
        points.append((float(sequences), max(step_s, points[-1][1] if points else 0.0)))
    return Rate(tuple(points), prompt_token_s, request_s)
