"""Figures of live traffic: what recording keeps and costs, and what training makes of thumbs.

    python benchmarks/agents.py --part traffic [--quick]

Everything runs on the small random policy of the tests, on the CPU. Not here: HTTP, whose cost is
that of the endpoint (``agents_endpoint.py``).
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import Figure

from ramify.clients.base import KnownPrefix, Request, Sampling
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import load_policy, save_policy
from ramify.serve.redaction import RedactionRules
from ramify.serve.traffic_recorder import PolicyFactsForRecorder, ServedTrafficRecorder
from ramify.store.folder_store import Store
from ramify.train.advantages.reinforce_pp import ReinforcePP
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Schedule, TaskSpec
from ramify.train.execute import train
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.types.message import Message, Reply
from tests.inference.helpers import policy
from tests.train.small import small

PROMPT_TOKENS = 2000
NUM_TOKENS = 8


def figures(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        yield from _recording(Path(folder), 16 if quick else 64)
        yield from _learning(Path(folder), 512 if quick else 1024, 32 if quick else 64)


def _recording(folder: Path, num_users: int) -> Iterator[Figure]:
    """Ids of concurrent users against the engine's log, and CPU time of one request."""
    made = policy(max_position_embeddings=2 * PROMPT_TOKENS)
    described = PolicyFactsForRecorder.from_policy(made)
    logged: set[tuple[int, ...]] = set()
    cpu: list[float] = []

    async def user(engine: LocalClient, recorder: ServedTrafficRecorder, number: int) -> None:
        messages: tuple[Message, ...] = (Message("user", _text(number)),)
        known = None
        for turn in range(3):
            request = Request(messages, Sampling(NUM_TOKENS, 1.0, logprobs=True), known=known)
            reply = await engine.complete(request)
            ids = (*(reply.prompt_ids or ()), *(reply.token_ids or ()))
            logged.add(ids)
            await recorder.record(f"{number}/{turn}", 0, request, reply)
            messages = (*messages, reply.message, Message("user", f"and {turn}, ann@x.org?"))
            known = KnownPrefix(len(messages) - 1, ids)

    async def go() -> None:
        engine = LocalClient(made, slots=32)
        recorder = ServedTrafficRecorder(folder / "ids", described, RedactionRules(defaults=False))
        await asyncio.gather(*(user(engine, recorder, number) for number in range(num_users)))
        await recorder.close()
        request = Request((Message("user", _text(0)),), Sampling(NUM_TOKENS, 1.0, logprobs=True))
        reply = await engine.complete(request)
        await engine.close()
        recorder = ServedTrafficRecorder(folder / "cost", described)
        for number in range(200):
            before = time.process_time()
            await recorder.record(f"{number}", 0, request, reply)
            cpu.append((time.process_time() - before) * 1e3)
        await recorder.close()

    asyncio.run(go())
    stored = set(_paths(Store(folder / "ids")))
    num = len(logged)
    yield Figure(
        "traffic: recorded replies with the engine's ids", len(stored & logged), "", {}, least=num
    )
    yield Figure(
        "traffic: recorded replies that are not the engine's", len(stored - logged), "", {}, 0
    )
    name = f"traffic: CPU time of recording a request of {PROMPT_TOKENS:,} tokens"
    yield Figure(name, median(cpu), "ms", {}, floor=20.0)


def _text(number: int) -> str:
    return f"user {number} " + "x y " * (PROMPT_TOKENS // 4)


def _paths(store: Store) -> Iterator[tuple[int, ...]]:
    for id in store.ids():
        run = store.load(id)
        for call in run.calls:
            for turn in range(len(call.turns)):
                path = run.path(call, turn)
                if path is not None:
                    yield tuple(path.ids)


def _learning(folder: Path, num_replies: int, steps: int) -> Iterator[Figure]:
    """Share of even ids among sampled ones, before and after training from thumbs for them."""
    gains, errors = [], []
    for seed in range(3):
        made = policy(seed, sharpness=1.0)
        save_policy(made, folder / f"policy{seed}")
        replies = asyncio.run(_thumbs(folder, seed, num_replies))
        before = [_even(reply) for reply in replies]
        run = small(
            policy=PolicySpec(path=str(folder / f"policy{seed}"), slots=16),
            warmup=None,
            sft=None,
            task=TaskSpec(name="tests.train.small:even", traffic=str(folder / f"store{seed}")),
            rl=RlSpec(
                steps=steps,
                algorithm=ReinforcePP(),
                sample=RolloutBatchSpec(items=8),
                rollout=RolloutOptions(group=8),
                optim=OptimizerSpec(lr=1e-2, schedule="linear"),
            ),
            evaluate=EvaluateSpec(num=2, final=(), keep="last"),
            schedule=Schedule(evaluate_every=None),
            seed=seed,
            scaffold="bare",
        )
        train(run, folder / f"out{seed}")
        after = [
            _even(reply) for reply in asyncio.run(_sampled(folder / f"out{seed}" / "policy", 256))
        ]
        gains.append(fmean(after) - fmean(before))
        errors.append(math.hypot(_error(before), _error(after)))
    for seed, (gain, error) in enumerate(zip(gains, errors, strict=True)):
        name = f"traffic: gain in even ids from thumbs, in standard errors, seed {seed}"
        yield Figure(name, gain / error, "", {"gain": round(gain, 4)}, least=3.0)


async def _thumbs(folder: Path, seed: int, num: int) -> list[Reply]:
    made = load_policy(folder / f"policy{seed}")
    recorder = ServedTrafficRecorder(
        folder / f"store{seed}", PolicyFactsForRecorder.from_policy(made)
    )
    replies = await _sampled(folder / f"policy{seed}", num, recorder)
    await recorder.close()
    return replies


async def _sampled(
    folder: Path, num: int, recorder: ServedTrafficRecorder | None = None
) -> list[Reply]:
    """Replies of a policy; with ``recorder`` they are recorded, and get a thumb up if more than
    half of their ids are even, and else a thumb down."""
    engine, numbers = LocalClient(load_policy(folder), slots=32), random.Random(0)

    async def one(number: int) -> Reply:
        message = Message("user", f"{numbers.random()}?")
        request = Request((message,), Sampling(NUM_TOKENS, 1.0, seed=number, logprobs=True))
        reply = await engine.complete(request)
        if recorder is not None:
            await recorder.record(f"{number}", 0, request, reply)
            await recorder.record_feedback(f"{number}", 0, float(_even(reply) > 0.5), "")
        return reply

    try:
        return await asyncio.gather(*(one(number) for number in range(num)))
    finally:
        await engine.close()


def _even(reply: Reply) -> float:
    ids = reply.token_ids or ()
    return sum(id % 2 == 0 for id in ids) / len(ids)


def _error(values: Sequence[float]) -> float:
    mean = fmean(values)
    return (fmean([(value - mean) ** 2 for value in values]) / len(values)) ** 0.5
