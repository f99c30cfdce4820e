"""Estimates the cost and duration of a whole map from a sample of its rows.

A map asks one question about every row of a table.

    sample of n rows ──> cost, seconds and characters of each ──> line through them
    characters of all questions ──> dollars = the line, summed over all, with its interval

Equal rows are asked once, so the sum is over the distinct questions. The time has two bounds: the
time of the replies with the map's number of concurrent requests, and the CPU time of this process.
If the sample is several times as large as that number, the rate of its later part is measured
instead. The first row is asked alone and does not count for the time, because it imports what
requests need, and connects. Reading the whole table takes CPU time as well, which a sample of a few
rows does not show. The rows of the sample are chosen by ``map_run.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

_Z = statistics.NormalDist().inv_cdf(0.975)
MIN_FOR_INTERVAL = 8
"""Minimum sample size for extrapolating with a fitted line and a confidence interval. Smaller
samples give only a mean."""
_MIN_ROUNDS = 4
"""Minimum ratio of sample size to concurrency for estimating the duration from the sample's
throughput. For smaller samples, it is estimated from the times of single rows."""
_NUM_BLOCKS = 8


class EstimatedAmount(msgspec.Struct, frozen=True):
    """An estimated cost or duration with its 95 % confidence interval.

    The bounds are None if the sample does not determine an interval.
    """

    value: float
    low: float | None = None
    high: float | None = None


class MeasuredRowCost(msgspec.Struct, frozen=True):
    """The measured cost and duration of answering one sampled question.

    Lists of measured rows are in the order in which the questions ended.
    """

    chars: int
    """Number of characters in the question and in the part of the row that the model reads."""
    cost: float
    """Cost in dollars."""
    seconds: float
    ended_s: float
    """Seconds from the start of the sample to the end of the question. Negative if the question
    does not count for the throughput, because it was the first or its answer was already known."""
    cpu_s: float = 0.0
    """CPU time of this process, in seconds, from the start of the sample to the end of the
    question."""
    is_first: bool = False
    """True if the question was asked alone, before the others."""


class TableMapEstimate(msgspec.Struct, frozen=True):
    """The cost and duration of a whole map, extrapolated from a sample of its rows."""

    num_rows: int
    """Number of rows in the table."""
    num_questions: int
    """Number of distinct questions, each of which is asked once."""
    num_sampled: int
    """Number of questions that were measured."""
    cost: EstimatedAmount | None
    """Cost in dollars, or None if no model has a price."""
    hours: EstimatedAmount
    """Estimated duration in hours with one worker, on this machine and at the concurrency of the
    sample."""
    workers_for_an_hour: int
    """Number of workers like this one that are needed to finish within an hour, unless the
    provider's rate limits slow them down."""
    is_batch: bool = False
    """True if the cost is based on the batch API's prices. The provider then determines the
    duration, which is at most a day for each batch."""


def estimate(
    rows: Sequence[MeasuredRowCost],
    num_rows: int,
    num_questions: int,
    num_chars: int,
    concurrency: int,
    read_s: float,
    *,
    is_priced: bool,
) -> TableMapEstimate:
    """Estimate the cost and duration of a whole map from a sample of its rows.

    ``num_chars`` is the number of characters in all questions together. ``read_s`` is how long it
    takes to read the whole table, in seconds.
    """
    chars = [row.chars for row in rows]
    cost = extrapolate_total([row.cost for row in rows], chars, num_questions, num_chars)
    seconds = _seconds(rows, num_questions, num_chars, concurrency, read_s)
    low, high = (None if s is None else s / 3600 for s in (seconds.low, seconds.high))
    hours = EstimatedAmount(seconds.value / 3600, low, high)
    return TableMapEstimate(
        num_rows,
        num_questions,
        len(rows),
        cost if is_priced else None,
        hours,
        max(1, math.ceil(hours.value)),
    )


def extrapolate_total(
    values: Sequence[float], sizes: Sequence[int], num_all: int, size_of_all: float
) -> EstimatedAmount:
    """Estimate a total over all questions, such as the cost, from the values in a sample.

    A line fitted to the sample predicts a question's value from its size. ``num_all`` is the number
    of all questions, and ``size_of_all`` is their total size.
    """
    num = len(values)
    mean, mean_size = statistics.fmean(values), statistics.fmean(sizes)
    spread = math.fsum((size - mean_size) ** 2 for size in sizes)
    slope, degrees = 0.0, max(1, num - 1)
    if num >= MIN_FOR_INTERVAL and spread:
        products = ((size - mean_size) * value for size, value in zip(sizes, values, strict=True))
        slope, degrees = math.fsum(products) / spread, num - 2
    away = size_of_all / num_all - mean_size
    value = num_all * (mean + slope * away)
    if num < min(MIN_FOR_INTERVAL, num_all):
        return EstimatedAmount(value)
    rest = math.fsum(
        (value - mean - slope * (size - mean_size)) ** 2
        for size, value in zip(sizes, values, strict=True)
    )
    unseen = max(0.0, 1 - num / num_all)
    variance = rest / degrees * (unseen / num + (away**2 / spread if slope else 0.0))
    error = num_all * math.sqrt(variance) * _quantile(degrees)
    return EstimatedAmount(value, max(0.0, value - error), value + error)


def _seconds(
    rows: Sequence[MeasuredRowCost],
    num_questions: int,
    num_chars: int,
    concurrency: int,
    read_s: float,
) -> EstimatedAmount:
    new = [row for row in rows if row.ended_s >= 0]
    if len(new) >= _MIN_ROUNDS * concurrency and len(new) >= 2 * _NUM_BLOCKS:
        return _by_rate(new[min(concurrency, len(new) // 4) :], num_questions, read_s)
    timed = [row for row in rows if not row.is_first] or rows
    seconds, chars = [row.seconds for row in timed], [row.chars for row in timed]
    waited = extrapolate_total(seconds, chars, num_questions, num_chars)
    steady = new[len(new) // 4 :]
    each_s = (steady[-1].cpu_s - steady[0].cpu_s) / (len(steady) - 1) if len(steady) > 1 else 0.0
    busy = each_s * num_questions + read_s
    value = max(waited.value / concurrency, busy)
    # The CPU time is measured as a whole, so it has no interval.
    if waited.low is None or waited.high is None or busy >= waited.high / concurrency:
        return EstimatedAmount(value)
    return EstimatedAmount(value, max(waited.low / concurrency, busy), waited.high / concurrency)


def _by_rate(rows: Sequence[MeasuredRowCost], num_questions: int, read_s: float) -> EstimatedAmount:
    """Estimate how long answering all questions takes from the rate at which a sample was answered.

    ``rows`` holds the sampled questions that were answered at full concurrency.
    """
    size = len(rows) // _NUM_BLOCKS
    marks = [rows[index * size].ended_s for index in range(_NUM_BLOCKS)] + [rows[-1].ended_s]
    last = len(rows) - 1 - (_NUM_BLOCKS - 1) * size
    sizes = [size] * (_NUM_BLOCKS - 1) + [max(1, last)]
    each = [
        (after - before) / num for before, after, num in zip(marks, marks[1:], sizes, strict=False)
    ]
    mean = (marks[-1] - marks[0]) / max(1, len(rows) - 1)
    error = statistics.stdev(each) / math.sqrt(_NUM_BLOCKS) * _quantile(_NUM_BLOCKS - 1)
    # Reading adds time only as far as the process is busy anyway.
    busy = (rows[-1].cpu_s - rows[0].cpu_s) / max(marks[-1] - marks[0], 1e-9)
    value = num_questions * mean + read_s * min(1.0, busy)
    return EstimatedAmount(
        value, max(0.0, value - num_questions * error), value + num_questions * error
    )


def _quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with ``degrees`` degrees of freedom.

    It is a series expansion around the normal quantile.
    """
    z, n = _Z, max(1, degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return z + (z**3 + z) / (4 * n) + second
