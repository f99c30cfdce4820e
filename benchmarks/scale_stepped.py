"""Training run whose engines, trainer and publication take time only by sleeping, as the reference
for the simulator.

    items ── the real loop, its rollouts, sessions in this process ── replies by scripted engines
                      └── a trainer that sleeps for each token

The order of events is therefore that of the package, waits are real, and the machine's load has
little effect. A rollout looks at its context, asks plain questions or children, and answers. The
lengths of its replies are drawn from its seed; one in ten is many times longer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify import RLM, Limits
from ramify.clients.base import Price, Request
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.train.config import RlSpec, Schedule
from ramify.train.data.pack import PackingSpec
from ramify.train.losses.total_loss import LossSpec
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.train.stages import RlStage
from ramify.types.message import Message, Reply, Usage, VersionSpan
from tests.train.trainers import trainer_over

BASE_S, EACH_S, PROMPT_TOKEN_S = 8e-3, 5e-4, 5e-5
"""Seconds of an engine's step: fixed, per sequence, per prompt token."""
LEARN_S, LEARN_TOKEN_S, PUBLISH_S = 0.3, 2e-4, 0.1


class Shape(NamedTuple):
    """Settings that differ between runs."""

    engines: int = 1
    slots: int = 16
    concurrency: int = 32
    staleness: int = 0
    grace_steps: int = 4
    straggler_factor: float = 0.0
    items: int = 8
    group: int = 4
    steps: int = 12


class _Sequence:
    def __init__(self, new: int, tokens: int) -> None:
        self.new, self.tokens, self.done = new, tokens, 0
        self.versions: list[int] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Engine:
    """One engine. Every tick gives each sequence in a slot one token and takes time according to
    its work. Ticks are scheduled relative to the previous one, so that delays do not accumulate."""

    def __init__(self, slots: int, version: Callable[[], int]) -> None:
        self.in_flight = self.trees = 0
        self._slots, self._version = slots, version
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._debt = 0
        self._paused = asyncio.Event()
        self._paused.set()
        self._ticking: asyncio.Task[None] | None = None

    async def sample(self, new: int, tokens: int) -> list[int]:
        """Return the version of the weights that sampled each token."""
        sequence = _Sequence(new, tokens)
        self._waiting.append(sequence)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        await sequence.ended
        return sequence.versions

    async def _tick(self) -> None:
        at = time.monotonic()
        while self._running or self._waiting:
            if not self._paused.is_set():
                await self._paused.wait()
                at = time.monotonic()
            while self._waiting and len(self._running) < self._slots:
                self._running.append(self._waiting.popleft())
                self._debt += self._running[-1].new
            at += BASE_S + EACH_S * len(self._running) + PROMPT_TOKEN_S * self._debt
            self._debt = 0
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            for each in self._running:
                each.versions.append(self._version())
                if (
                    len(each.versions) >= each.tokens and not each.ended.done()
                ):  # cut as a straggler
                    each.ended.set_result(None)
            self._running = [each for each in self._running if not each.ended.done()]

    def pause(self) -> None:
        self._paused.clear()

    def resume_with_new_weights(self) -> None:
        """Continue with new weights: running sequences need a new prefill."""
        self._debt += sum(each.new + len(each.versions) for each in self._running)
        self._paused.set()


class SteppedClient:
    """Client for these engines: all calls of a tree use one engine, a new tree gets the least busy
    one."""

    name, window = "stepped:test", 100_000
    price: Price | None = Price(0.0, 0.0)

    def __init__(self, shape: Shape) -> None:
        self.version = 0
        self._ids = ScriptedByteTokenizer()
        self.engines = [Engine(shape.slots, lambda: self.version) for _ in range(shape.engines)]
        self._of_tree: dict[int, Engine] = {}
        self._cached: dict[tuple[int, str], int] = {}

    async def complete(self, request: Request) -> Reply:
        started = time.perf_counter()
        seed = request.sampling.seed or 0
        reply = self._ids.with_token_ids(Reply(Message("assistant", reply_text(request))), request)
        assert reply.prompt_ids is not None
        assert reply.token_ids is not None
        engine = self._of_tree.get(seed)
        if engine is None:
            engine = self._of_tree[seed] = min(
                self.engines, key=lambda each: (each.in_flight, each.trees)
            )
            engine.trees += 1
        call = (seed, request.affinity)
        cached = (
            len(request.known.ids)
            if request.known and self._cached.get(call) == self.version
            else 0
        )
        self._cached[call] = self.version
        engine.in_flight += 1
        try:
            versions = await engine.sample(len(reply.prompt_ids) - cached, len(reply.token_ids))
        finally:
            engine.in_flight -= 1
        usage = Usage(len(reply.prompt_ids), len(reply.token_ids), cached_tokens=cached, calls=1)
        return msgspec.structs.replace(
            reply, usage=usage, versions=_spans(versions), seconds=time.perf_counter() - started
        )

    async def close(self) -> None:
        """Nothing is open."""


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    cuts = [
        0,
        *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]),
        len(versions),
    ]
    return tuple(VersionSpan(a, b, versions[a]) for a, b in itertools.pairwise(cuts))


def reply_text(request: Request) -> str:
    """Return the reply: code with a comment that extends it to the drawn length."""
    turn = sum(message.role == "assistant" for message in request.messages)
    draw = random.Random(
        f"{request.sampling.seed}/{request.affinity}/{turn}/{len(request.messages[0].content)}"
    )
    is_slow = random.Random(f"slow/{request.sampling.seed}").random() < 0.1
    num = min(int(draw.lognormvariate(2.5, 0.5)) * (5 if is_slow else 1), 250)
    depth = request.affinity.count(".")
    if depth:
        code = (
            "FINAL(1)" if turn or "plain" in request.messages[-1].content else "x=len(str(context))"
        )
    else:
        fan = draw.choice([1, 2, 3])
        asks = [
            f"r=rlm_query_batched(['ask']*{fan})",
            f"r=llm_query_batched(['plain']*{fan})",
            "r=1",
        ]
        code = draw.choice(asks) if turn == 1 else "FINAL(1)" if turn > 1 else "x=len(context)"
    return code + "#" + "." * num


class Sleeper:
    """Trainer backend that takes time and learns nothing."""

    packing = PackingSpec()
    version = 0

    def forward_backward(self, batches: Sequence[Any], loss: LossSpec) -> dict[str, float]:
        time.sleep(LEARN_S + LEARN_TOKEN_S * sum(map(len, batches)))
        return {"loss": 0.0}

    def optim_step(self) -> dict[str, float]:
        self.version += 1
        return {"grad_norm": 1.0, "lr": 0.0}

    def save(self, folder: Path) -> None:
        folder.mkdir()


class Publisher:
    """Publishes a new version to the client while the engines pause."""

    def __init__(self, client: SteppedClient) -> None:
        self._client = client

    @property
    def version(self) -> int:
        return self._client.version

    async def publish(self) -> None:
        for engine in self._client.engines:
            engine.pause()
        await asyncio.sleep(PUBLISH_S)
        self._client.version += 1
        self._client._ids.version = self._client.version
        for engine in self._client.engines:
            engine.resume_with_new_weights()

    async def put_engines_to_sleep(self) -> bool:
        return False

    def release_memory(self) -> None: ...

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)

    def load(self, folder: Path) -> None:
        """Do nothing: a publisher has nothing to load."""


def carry_out(out: Path, shape: Shape, seed: int = 0) -> None:
    """Run ``shape`` in the folder ``out`` and keep all rollouts."""
    asyncio.run(_run(out, shape, seed))


async def _run(out: Path, shape: Shape, seed: int) -> None:
    client = SteppedClient(shape)
    task = DatasetTask("stepped", generated("stepped", _item), TrajectoryRewardFunction(_worth))
    sample = RolloutBatchSpec(
        items=shape.items,
        max_staleness=shape.staleness,
        grace_steps=shape.grace_steps,
        straggler_factor=shape.straggler_factor or None,
    )
    options = RolloutOptions(group=shape.group, concurrency=shape.concurrency)
    limits = Limits(max_turns=6, max_reply_tokens=500, max_seconds=300, max_concurrency=1000)
    config = {
        "rl": {"sample": msgspec.to_builtins(sample), "rollout": msgspec.to_builtins(options)},
        "policy": {"slots": shape.slots},
        "inference": {"num": shape.engines},
    }

    async def evaluate(split: str) -> Mapping[str, float]:
        return {"validation/reward": 0.0}

    sandbox = SandboxSpec(provider="inprocess", allow_weaker=True)
    async with RLM(client, scaffold="tiny", limits=limits, sandbox=sandbox) as rlm:
        spec = RlSpec(steps=shape.steps, sample=sample, rollout=options)
        rollouts = TaskRolloutRunner(rlm, task, options, seed=seed)
        stage = RlStage(spec, spec.algorithm, task, rollouts)
        backend: Any = Sleeper()
        loop = trainer_over(
            out,
            [stage],
            lambda _: backend,
            Publisher(client),
            evaluate,
            schedule=Schedule(evaluate_every=None, save_rollouts_every=1),
            config=config,
        )
        await loop.run()


def _item(rng: random.Random) -> Item:
    return Item(f"{rng.randrange(10**6)}?", "text", gold=1)


def _worth(item: Item, trajectory: Any) -> float:
    """Return an arbitrary reward that differs within every group."""
    return random.Random(trajectory.id).random()
