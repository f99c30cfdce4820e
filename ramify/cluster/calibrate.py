"""Measurement of a live engine's rate: requests of one token, a long prompt, and 1, 2, 4 … requests
at once.

    rate = await calibrate(client, slots=64)

It is meant for engines about which a run says too little: one that was never full, or a model
without a run. Prompts are random words, which no cache holds. It takes a few minutes on a slow
engine, and costs tokens on a paid one.
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import median

from ramify.clients.base import Client, Request, Sampling
from ramify.cluster.rate import EngineRate, from_steps
from ramify.errors import ConfigError
from ramify.types.message import Message, Reply

ROUNDS = 3
_SHORT, _LONG = 8, 64
"""Number of words in a prompt."""


async def calibrate(client: Client, *, slots: int, tokens: int = 64, seed: int = 0) -> EngineRate:
    """Measure the rate of the engine behind ``client`` with up to ``slots`` sequences and replies
    of up to ``tokens`` tokens. Raises ConfigError if its replies are too short."""
    draw = random.Random(seed)
    await _timed(client, draw, _SHORT, 1)  # warm up: the first request includes initialization
    short = [await _timed(client, draw, _SHORT, 1) for _ in range(ROUNDS)]
    long = [await _timed(client, draw, _LONG, 1) for _ in range(ROUNDS)]
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
    return from_steps(points, prompt_s, max(0.0, first_s - points[0][1]))


async def _step_s(
    client: Client, draw: random.Random, at_once: int, tokens: int, prompt_s: float
) -> float:
    """Return the seconds of a step with ``at_once`` sequences."""
    timed = await asyncio.gather(*(_timed(client, draw, _SHORT, tokens) for _ in range(at_once)))
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


async def _timed(
    client: Client, draw: random.Random, words: int, tokens: int
) -> tuple[float, Reply]:
    """Make a request and return (seconds, reply)."""
    text = " ".join(str(draw.randrange(10**4)) for _ in range(words))
    sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=draw.randrange(2**31))
    started = time.perf_counter()
    reply = await client.complete(Request((Message("user", text),), sampling, affinity=text))
    return time.perf_counter() - started, reply
