"""How fast one engine is, as a function of how many sequences it decodes at once; and how that is
read off requests.

    step(b) seconds   one token for each of b sequences
    + prompt_token_s  for each prompt token that is read beside them, which all of them wait for
    request_s         for each request, outside the engine: rendering, the wire

Requests say it, from when each had a slot: in a stretch of time in which an engine went n steps
with b sequences and read P prompt tokens, it was busy for ``n·base + n·b·each + P·prompt_token_s``;
three numbers, none negative, found by least differences over many such stretches. A prompt token
goes through the model with those that are decoded, so it takes no longer than one of them,
``prompt_token_s <= each``. (Left free, the two are hard to tell apart: where an engine is always
full, prompts come as steadily as tokens. And requests one by one say little: who of those that wait
has the next slot is not written down.)
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ramify.errors import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]


_ROUNDS = 20
"""Of finding the least sum of differences."""


class EngineRate(msgspec.Struct, frozen=True):
    """Of one engine."""

    points: tuple[tuple[float, float], ...]
    """(sequences at once, seconds of a step), by sequences; between two a line, beyond the last on
    along it."""
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


class MeasuredRequest(NamedTuple):
    """One request as it was measured, at one engine or at several that share the load evenly."""

    begun_s: float
    ended_s: float
    new: int
    """Prompt tokens that were read."""
    sampled: int


def fit(
    asked: Sequence[MeasuredRequest],
    engines: int = 1,
    slots: int | None = None,
    *,
    hidden: float = 1.0,
) -> EngineRate:
    """The rate of one of ``engines`` that explains ``asked`` best. ``hidden``: for each request
    that is known, so many ran. Raises ConfigError where there is nothing to go by."""
    asked_first = [each for each in asked if each.sampled and each.ended_s > each.begun_s]
    served = admitted(asked_first, None if slots is None else slots * engines / hidden)
    if len(served) < 4:
        raise ConfigError(
            f"{len(served)} of {len(asked)} requests say how fast an engine is: keep more rollouts "
            "(schedule.save_rollouts_every=1), or "
            "measure the engine itself with --calibrate MODEL"
        )
    share = hidden / engines
    took, steps, tokens, read = _windows(served, share)
    base_s, more_s, prompt_s = _typical(np.stack([steps, tokens, tokens + read], axis=1), took)
    each_s = more_s + prompt_s
    most = float(slots or 2)
    beyond = [0.0]
    for request, came, beside, meanwhile in zip(
        served, asked_first, *_beside(served, share), strict=True
    ):
        most = most if slots else max(most, beside)
        if request.begun_s == came.begun_s and 2 * beside <= (
            slots or math.inf
        ):  # nobody can have waited
            model_s = request.sampled * (base_s + each_s * beside) + prompt_s * max(
                float(request.new), meanwhile
            )
            beyond.append(request.ended_s - request.begun_s - model_s)
    step_s = max(base_s + each_s, 1e-9)
    return EngineRate(
        ((1.0, step_s), (most, step_s + each_s * (most - 1))), prompt_s, max(0.0, median(beyond))
    )


def _windows(served: Sequence[MeasuredRequest], share: float) -> tuple[Floats, ...]:
    """For each of many stretches of time: busy seconds, steps of an engine, tokens that one
    sampled, prompt tokens that one read. A request's tokens are spread evenly over its time."""
    at, running, pace = _events(served)
    passed = np.where(running > 0, np.diff(at), 0.0)
    steps = passed * pace / np.maximum(running, 1)
    counts = np.stack([passed, steps, steps * np.maximum(running * share, 1.0)])
    so_far = np.concatenate([np.zeros((3, 1)), np.cumsum(counts, axis=1)], axis=1)
    begins = np.array([each.begun_s for each in served])
    order = np.argsort(begins, kind="stable")
    read = (
        np.concatenate(
            [[0.0], np.cumsum(np.array([each.new for each in served], dtype=float)[order])]
        )
        * share
    )
    at_once = float(running @ np.diff(at)) / max(float(passed.sum()), 1e-12)
    edges = np.unique(
        np.linspace(0, len(at) - 1, max(4, int(len(at) / (at_once + 4))) + 1).astype(int)
    )
    until = read[np.searchsorted(begins[order], at[edges], "left")]
    until[-1] = read[-1]
    took, num, tokens = np.diff(so_far[:, edges], axis=1)
    return took, num, tokens, np.diff(until)


def _events(served: Sequence[MeasuredRequest]) -> tuple[Floats, Floats, Floats]:
    """(times at which a request began or ended; how many run after each; the tokens a second that
    they get together)."""
    begins = np.array([each.begun_s for each in served])
    ends = np.maximum(np.array([each.ended_s for each in served]), begins + 1e-9)
    pace = np.array([each.sampled for each in served]) / (ends - begins)
    times = np.concatenate([ends, begins])
    order = np.argsort(times, kind="stable")  # at one moment ends come first
    ones = np.ones(len(served))
    running = np.cumsum(np.concatenate([-ones, ones])[order])[:-1]
    return (
        times[order],
        np.round(running),
        np.maximum(np.cumsum(np.concatenate([-pace, pace])[order])[:-1], 0.0),
    )


def admitted(asked: Sequence[MeasuredRequest], room: float | None) -> list[MeasuredRequest]:
    """``asked`` from when each had a slot, where there are ``room`` of them: who came first had the
    first that was free."""
    if room is None:
        return list(asked)
    begins = [each.begun_s for each in asked]
    events = sorted(
        [(each.ended_s, 0, index) for index, each in enumerate(asked)]
        + [(each.begun_s, 1, index) for index, each in enumerate(asked)]
    )
    waiting: dict[int, None] = {}
    inside: set[int] = set()
    for at_s, is_begin, index in events:
        if is_begin:
            waiting[index] = None
        else:
            inside.discard(index)
            waiting.pop(index, None)
        while waiting and len(inside) < max(room, 1.0):
            first = next(iter(waiting))
            del waiting[first]
            inside.add(first)
            begins[first] = at_s
    return [each._replace(begun_s=begin) for each, begin in zip(asked, begins, strict=True)]


def _beside(served: Sequence[MeasuredRequest], share: float) -> tuple[list[float], list[float]]:
    """For each request: how many ran in its engine on average while it did, itself included; and
    the prompt tokens that were read there meanwhile."""
    at, running, _ = _events(served)
    area = np.concatenate([[0.0], np.cumsum(np.maximum(running * share, 1.0) * np.diff(at))])
    begins = np.array([each.begun_s for each in served])
    ends = np.array([each.ended_s for each in served])
    order = np.argsort(begins, kind="stable")
    read = np.concatenate(
        [[0.0], np.cumsum(np.array([each.new for each in served], dtype=float)[order])]
    )
    means = (np.interp(ends, at, area) - np.interp(begins, at, area)) / np.maximum(
        ends - begins, 1e-9
    )
    first, last = (np.searchsorted(begins[order], each, "left") for each in (begins, ends))
    return [max(1.0, float(each)) for each in means], [
        float(each) for each in (read[last] - read[first]) * share
    ]


def _typical(rows: Floats, took: Floats) -> list[float]:
    """As ``non_negative``, by sums of differences in place of squares, so that a stretch in which
    the machine was at something else says as much as any other; then by as much more as all of it
    took more."""
    found = non_negative(rows, took)
    least = 0.02 * float(took.mean())
    for _ in range(_ROUNDS):
        weights = 1 / np.sqrt(np.maximum(np.abs(took - rows @ found), least))
        found = non_negative(rows * weights[:, None], took * weights)
    total = float((rows @ found).sum())
    return [each * float(took.sum()) / total for each in found] if total > 0 else found


def non_negative(
    given: Sequence[Sequence[float]] | Floats, took: Sequence[float] | Floats
) -> list[float]:
    """Least squares with no number below zero: the best of all choices of which are zero; there are
    few."""
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


def from_steps(
    measured: Iterable[tuple[int, float]], prompt_token_s: float, request_s: float = 0.0
) -> EngineRate:
    """Of (sequences at once, seconds of a step) that were measured one by one; a step with more
    sequences is not faster."""
    points: list[tuple[float, float]] = []
    for sequences, step_s in sorted(measured):
        points.append((float(sequences), max(step_s, points[-1][1] if points else 0.0)))
    return EngineRate(tuple(points), prompt_token_s, request_s)
