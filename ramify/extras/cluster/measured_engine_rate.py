"""Measure and model the speed of an inference engine as a function of the number of sequences that
it decodes at once.

    step(b) seconds   time of one token for each of b sequences
    + prompt_token_s  for each prompt token that is read; all sequences wait for it
    + request_s       for each request, outside the engine: rendering and transport

The rate is fitted to measured requests. In a time window in which an engine ran n steps with b
sequences and read P prompt tokens, it was busy for ``n·base + n·b·per_sequence + P·prompt_token_s``
seconds. These three non-negative numbers minimize the absolute deviations over many windows. A
prompt token passes through the model together with decoded ones, so ``prompt_token_s <=
per_sequence``.

There are two reasons for this form. Without that bound, the last two terms are hard to separate,
because prompts arrive as steadily as tokens at an engine that is always full. And single requests
carry little information, because the order in which waiting requests get slots is not recorded.

``measure_engine_rate`` measures a live engine instead, if a run says too little about it: one that
was never full, or a model without a run. It sends single requests, a long prompt, and 1, 2, 4 …
concurrent requests, all of random words, which no cache contains. It takes a few minutes on a slow
engine, and costs tokens on a paid one.

``read_step_cpu_times`` reads the CPU time of a run's steps from its metrics:

    batch16.decode/steps: 311, batch16.decode/cpu_s: 1.42, cpu/loop_s: 1.31, …
        ->  StepRolloutCpuTime(step=12, cores=2, loop_s=1.31, sessions_s=2.74, engine=[…])

Runs of earlier versions have these figures in ``processors.jsonl``, with the fields of
``StepRolloutCpuTime``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ramify.clients.base import Client, Request, Sampling
from ramify.errors import ConfigError
from ramify.inference.local.step_timings import EngineStepTotals
from ramify.train.metrics import StepMetrics
from ramify.types.message import Message, Reply

Floats = np.ndarray[Any, np.dtype[np.float64]]


_ROUNDS = 20
"""Number of iterations of the reweighted least-squares fit."""


class InferenceEngineSpeed(msgspec.Struct, frozen=True):
    """The measured speed of one inference engine.

    It consists of the seconds per decoding step for several numbers of concurrent sequences, and
    the time for prompt tokens and requests.
    """

    points: tuple[tuple[float, float], ...]
    """(concurrent sequences, seconds per step), sorted by sequences; linear between and beyond
    points."""
    prompt_token_s: float = 0.0
    request_s: float = 0.0

    def decode_step_s(self, sequences: float) -> float:
        """Return the duration in seconds of one decoding step with a given number of concurrent
        sequences."""
        points = self.points
        if len(points) == 1 or sequences <= points[0][0]:
            return points[0][1]
        right = min(max(bisect_right(points, (sequences, float("inf"))), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (sequences - x0) / (x1 - x0)

    def tokens_per_s(self, sequences: float) -> float:
        """Return the total tokens per second of all concurrent sequences together."""
        return sequences / self.decode_step_s(sequences)


class MeasuredRequest(NamedTuple):
    """The measured times and token counts of one request to an inference engine.

    Several engines are assumed to share the load evenly.
    """

    begun_s: float
    ended_s: float
    new: int
    """Prompt tokens that were read rather than cached."""
    sampled: int


def fit(
    requests: Sequence[MeasuredRequest],
    engines: int = 1,
    slots: int | None = None,
    *,
    hidden: float = 1.0,
) -> InferenceEngineSpeed:
    """Fit a speed model of an inference engine to the recorded requests of a run.

    The load was shared evenly by ``engines`` engines. ``hidden`` is the ratio of all requests that
    ran to those that were recorded; requests of discarded rollouts are not recorded. Raises
    ConfigError if there are too few requests.
    """
    usable = [each for each in requests if each.sampled and each.ended_s > each.begun_s]
    served = queue_for_slots(usable, None if slots is None else slots * engines / hidden)
    if len(served) < 4:
        raise ConfigError(
            f"only {len(served)} of {len(requests)} requests can be used to measure engine speed: "
            "save more rollouts (schedule.save_rollouts_every=1), or measure the engine itself "
            "with --calibrate MODEL"
        )
    share = hidden / engines
    took, steps, tokens, read = _windows(served, share)
    base_s, more_s, prompt_s = _fit_least_absolute(
        np.stack([steps, tokens, tokens + read], axis=1), took
    )
    each_s = more_s + prompt_s
    most = float(slots or 2)
    beyond = [0.0]
    for request, arrival, beside, meanwhile in zip(
        served, usable, *_concurrent_load(served, share), strict=True
    ):
        most = most if slots else max(most, beside)
        # Only requests that cannot have waited for a slot show the time outside the engine.
        if request.begun_s == arrival.begun_s and 2 * beside <= (slots or math.inf):
            model_s = request.sampled * (base_s + each_s * beside) + prompt_s * max(
                float(request.new), meanwhile
            )
            beyond.append(request.ended_s - request.begun_s - model_s)
    step_s = max(base_s + each_s, 1e-9)
    return InferenceEngineSpeed(
        ((1.0, step_s), (most, step_s + each_s * (most - 1))), prompt_s, max(0.0, median(beyond))
    )


def _windows(served: Sequence[MeasuredRequest], share: float) -> tuple[Floats, ...]:
    """Divide the time of a measured run into windows, and return an engine's work in each window.

    Return four arrays with one value per window: busy seconds, steps of one engine, tokens that it
    sampled, and prompt tokens that it read. The tokens of a request are spread evenly over its
    time.
    """
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
    """Return how many requests run, and how fast together, after each request's start or end.

    The result is three arrays: times, running requests, and tokens per second.
    """
    begins = np.array([each.begun_s for each in served])
    ends = np.maximum(np.array([each.ended_s for each in served]), begins + 1e-9)
    pace = np.array([each.sampled for each in served]) / (ends - begins)
    times = np.concatenate([ends, begins])
    order = np.argsort(times, kind="stable")  # at equal times, ends come first
    ones = np.ones(len(served))
    running = np.cumsum(np.concatenate([-ones, ones])[order])[:-1]
    return (
        times[order],
        np.round(running),
        np.maximum(np.cumsum(np.concatenate([-pace, pace])[order])[:-1], 0.0),
    )


def queue_for_slots(
    requests: Sequence[MeasuredRequest], room: float | None
) -> list[MeasuredRequest]:
    """Delay the start times of requests as if the engines had only ``room`` KV-cache slots.

    Waiting requests get slots in the order of their arrival. Returns them with their start times
    delayed to when each got a slot. With ``room=None``, they are returned unchanged.
    """
    if room is None:
        return list(requests)
    begins = [each.begun_s for each in requests]
    # At equal times, ends (0) sort before begins (1), so a freed slot is used at once.
    events = sorted(
        [(each.ended_s, 0, index) for index, each in enumerate(requests)]
        + [(each.begun_s, 1, index) for index, each in enumerate(requests)]
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
    return [each._replace(begun_s=begin) for each, begin in zip(requests, begins, strict=True)]


def _concurrent_load(
    served: Sequence[MeasuredRequest], share: float
) -> tuple[list[float], list[float]]:
    """Return the mean concurrency and the number of prompt tokens read during each request.

    The concurrency is the mean number of sequences in the engine, including the request itself.
    """
    at, running, _ = _events(served)
    # The difference of this integral at two times, divided by the time, is the mean in between.
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


def _fit_least_absolute(rows: Floats, took: Floats) -> list[float]:
    """Fit non-negative coefficients to measured times, ignoring outliers.

    The method is least absolute deviations. Windows in which the machine was also busy with other
    work then have little influence. The result is scaled so that the total time is right.
    """
    coefficients = non_negative_least_squares(rows, took)
    least = 0.02 * float(took.mean())
    for _ in range(_ROUNDS):
        # Iteratively reweighted least squares: the floor avoids weights that are almost infinite.
        weights = 1 / np.sqrt(np.maximum(np.abs(took - rows @ coefficients), least))
        coefficients = non_negative_least_squares(rows * weights[:, None], took * weights)
    total = float((rows @ coefficients).sum())
    if total <= 0:
        return coefficients
    return [each * float(took.sum()) / total for each in coefficients]


def non_negative_least_squares(
    matrix: Sequence[Sequence[float]] | Floats, took: Sequence[float] | Floats
) -> list[float]:
    """Return non-negative coefficients that fit the measured times by least squares.

    Every subset of the coefficients is tried. This is fast because there are few.
    """
    rows, seconds = np.array(matrix, dtype=float), np.array(took, dtype=float)
    num = rows.shape[1]
    best, least = [0.0] * num, float(seconds @ seconds)
    # Columns of equal magnitude keep the least-squares problem well conditioned.
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    for size in range(1, num + 1):
        for chosen in map(list, itertools.combinations(range(num), size)):
            solution, *_ = np.linalg.lstsq(rows[:, chosen] / scale[chosen], seconds, rcond=None)
            off = seconds - rows[:, chosen] / scale[chosen] @ solution
            if (solution >= 0).all() and float(off @ off) < least * (1 - 1e-9):
                least = float(off @ off)
                best = [0.0] * num
                for index, value in zip(chosen, solution / scale[chosen], strict=True):
                    best[index] = float(value)
    return best


def rate_from_steps(
    measured: Iterable[tuple[int, float]], prompt_token_s: float, request_s: float = 0.0
) -> InferenceEngineSpeed:
    """Build an engine's speed model from its seconds per step, measured at several concurrencies.

    A step with more sequences is assumed to take at least as long.
    """
    points: list[tuple[float, float]] = []
    for sequences, step_s in sorted(measured):
        points.append((float(sequences), max(step_s, points[-1][1] if points else 0.0)))
    return InferenceEngineSpeed(tuple(points), prompt_token_s, request_s)


ROUNDS = 3
_SHORT, _LONG = 8, 64
"""Lengths in words of the short and the long prompt."""


async def measure_engine_rate(
    client: Client, *, slots: int, tokens: int = 64
) -> InferenceEngineSpeed:
    """Measure the speed of a live engine with up to ``slots`` concurrent requests.

    Replies have up to ``tokens`` tokens. Raises ConfigError if the engine's replies are too short.
    """
    draw = random.Random(0)
    await _time_request(
        client, draw, _SHORT, 1
    )  # warm up: the first request includes initialization
    short = [await _time_request(client, draw, _SHORT, 1) for _ in range(ROUNDS)]
    long = [await _time_request(client, draw, _LONG, 1) for _ in range(ROUNDS)]
    more = median(each.usage.input_tokens for _, each in long) - median(
        each.usage.input_tokens for _, each in short
    )
    prompt_s = max(0.0, median(took for took, _ in long) - median(took for took, _ in short)) / max(
        more, 1
    )
    first_s = median(took - prompt_s * reply.usage.input_tokens for took, reply in short)
    points, at_once = [], 1
    while at_once <= slots:
        rounds = [await _step_s(client, draw, at_once, tokens, prompt_s) for _ in range(ROUNDS)]
        points.append((at_once, median(rounds)))
        at_once = min(2 * at_once, slots) if at_once < slots else slots + 1
    return rate_from_steps(points, prompt_s, max(0.0, first_s - points[0][1]))


async def _step_s(
    client: Client, draw: random.Random, at_once: int, tokens: int, prompt_s: float
) -> float:
    """Measure the seconds per decoding step with ``at_once`` concurrent sequences.

    The time for reading prompts is subtracted. Each sequence has ``tokens`` tokens. Raises
    ConfigError if the model's replies end too early.
    """
    timed = await asyncio.gather(
        *(_time_request(client, draw, _SHORT, tokens) for _ in range(at_once))
    )
    read_s = prompt_s * sum(reply.usage.input_tokens for _, reply in timed)
    steps = [max((took - read_s) / (reply.usage.output_tokens or 1), 0.0) for took, reply in timed]
    # Replies that ended early would measure fewer concurrent sequences.
    long_enough = [
        seconds
        for seconds, (_, reply) in zip(steps, timed, strict=True)
        if 2 * reply.usage.output_tokens >= tokens
    ]
    if not long_enough:
        longest = max(reply.usage.output_tokens for _, reply in timed)
        raise ConfigError(
            f"{client.name} ends its replies after {longest} of {tokens} tokens: too short to "
            "measure how fast it is; give another model of the same size"
        )
    return median(long_enough)


async def _time_request(
    client: Client, draw: random.Random, words: int, tokens: int
) -> tuple[float, Reply]:
    """Send a request with a random prompt to the engine, and return its duration in seconds and its
    reply."""
    text = " ".join(str(draw.randrange(10**4)) for _ in range(words))
    sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=draw.randrange(2**31))
    started = time.perf_counter()
    reply = await client.complete(Request((Message("user", text),), sampling, affinity=text))
    return time.perf_counter() - started, reply


_EARLIER = "processors.jsonl"
_BATCH = re.compile(r"batch(\d+)\.(decode|prefill)/steps")


class StepRolloutCpuTime(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded CPU time of one training step's rollouts."""

    step: int = 0
    cores: int
    """Number of cores that the run could use."""
    loop_s: float
    """CPU seconds of the event loop's thread: requests, replies, session messages."""
    sessions_s: float
    """CPU seconds of all child processes, in which sessions run."""
    engine: list[EngineStepTotals]


def read_step_cpu_times(run: Path, lines: Sequence[StepMetrics]) -> Iterator[StepRolloutCpuTime]:
    """Yield the recorded CPU time of each step of a run, given its folder and its metrics.

    Earlier versions recorded CPU times in a separate file, which is read as well.
    """
    for line in lines:
        if "cpu/loop_s" in line.values:
            yield _to_recorded_cpu(line)
    path = run / _EARLIER
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield msgspec.json.decode(text, type=StepRolloutCpuTime)


def _to_recorded_cpu(line: StepMetrics) -> StepRolloutCpuTime:
    values = line.values
    engine = []
    for name in values:
        if found := _BATCH.fullmatch(name):
            prefix = name.removesuffix("steps")
            engine.append(
                EngineStepTotals(
                    sequences=int(found[1]),
                    reads=found[2] == "prefill",
                    steps=int(values[name]),
                    tokens=int(values[prefix + "tokens"]),
                    read=int(values.get(prefix + "read", 0)),
                    cpu_s=values[prefix + "cpu_s"],
                )
            )
    return StepRolloutCpuTime(
        step=line.step,
        cores=int(values["cpu/cores"]),
        loop_s=values["cpu/loop_s"],
        sessions_s=values["cpu/sessions_s"],
        engine=engine,
    )
