"""Groups of rollouts: several attempts at each of a step's items, through the one engine, scored by the task.

    items ── group attempts at each, concurrency at once ──> ``evaluate.attempt``: prepare, RLM, score ──> [Group]

Decides the seeds: each rollout has its own, from the run's seed, the step, the item and the attempt. A rollout that fails
is recorded and its group goes on (``attempt`` says what is a failure). Leaves out credit (``algorithms/``), and which
weights answer (``loop.py``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import GRACE_S, attempt
from ramify.progress import doing
from ramify.tasks.base import Item, Task
from ramify.types.trajectory import Group, Trajectory


class RolloutOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How items are rolled out."""

    group: int = 8
    """Attempts at each item."""
    concurrency: int = 128
    """Rollouts at once; each holds a session, and its children one each."""
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    grace_s: float = GRACE_S
    """How long past its own deadline (``limits.max_seconds``) a rollout is waited for before it counts as stalled. The
    same holds for a task's ``prepare`` and ``score``."""

    def __post_init__(self) -> None:
        if min(self.group, self.concurrency) < 1 or not self.temperature > 0 or not self.grace_s > 0:
            raise ConfigError(
                f"rollout group={self.group} and concurrency={self.concurrency} must be at least 1, "
                f"temperature={self.temperature} and grace_s={self.grace_s} above 0"
            )

    def sampling(self, max_tokens: int, seed: int, *, greedy: bool = False) -> Sampling:
        if greedy:
            return Sampling(max_tokens, 0.0, seed=seed, logprobs=True)
        return Sampling(max_tokens, self.temperature, self.top_p, seed=seed, logprobs=True, top_k=self.top_k)


class Rollouts:
    """Rolls items of one task out with one ``RLM``, which its owner keeps open (``async with rlm``), so that all rollouts
    share one sandbox and one client."""

    def __init__(
        self, rlm: RLM, task: Task, options: RolloutOptions, *, seed: int = 0, on_stall: Callable[[str], None] = print,
        greedy: bool = False,
    ) -> None:  # fmt: skip
        """``on_stall`` is told where a rollout stood that did not end. ``greedy``: one more rollout of each item, at
        temperature 0, beside its group (``Group.greedy``)."""
        self._rlm, self._task, self._options, self._seed, self._on_stall = rlm, task, options, seed, on_stall
        self._greedy = greedy

    async def groups(
        self, items: Sequence[Item], step: int, what: str = "rollouts",
        after: Callable[[Group], Awaitable[None]] | None = None, first: int = 0,
    ) -> list[Group]:  # fmt: skip
        """One group per item, in order, each with its rollouts in order; what failed is among them. ``what`` is said of
        it while it goes on. ``after`` is done with each group as soon as it is whole, while others go on. ``first``: index
        of the first one, where the step has others before. Raises only what is a bug, or a cancellation."""
        room = asyncio.Semaphore(self._options.concurrency)

        async def one(item: Item, index: int, number: int | str) -> Trajectory:
            async with room:
                name = f"step={step}/group={index}/rollout={number}"
                trajectory = await self._rollout(item, name, number == "greedy")
                work.more()
                return trajectory

        async def whole(
            item: Item, attempts: Sequence[asyncio.Task[Trajectory]], sure: asyncio.Task[Trajectory] | None
        ) -> Group:
            group = Group(item.id, [await each for each in attempts], None if sure is None else await sure)
            if after is not None:
                await after(group)
            return group

        num = len(items) * (self._options.group + self._greedy)
        try:
            with doing(what, num, "attempts") as work:
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        [tasks.create_task(one(item, index, number)) for number in range(self._options.group)]
                        for index, item in enumerate(items, first)
                    ]
                    greedy = [
                        tasks.create_task(one(item, index, "greedy")) if self._greedy else None
                        for index, item in enumerate(items, first)
                    ]
                    groups = [tasks.create_task(whole(*each)) for each in zip(items, running, greedy, strict=True)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [each.result() for each in groups]

    async def _rollout(self, item: Item, name: str, greedy: bool) -> Trajectory:
        seed = random.Random(f"{self._seed}/{name}/{item.id}").getrandbits(31)
        sampling = self._options.sampling(self._rlm.limits.max_reply_tokens, seed, greedy=greedy)
        return await attempt(
            self._rlm, self._task, item, name=name, sampling=sampling, metadata={"rollout": name},
            grace_s=self._options.grace_s, on_stall=self._on_stall,
        )  # fmt: skip
