"""Groups of rollouts: several attempts at each of a step's items, through the one engine, scored by the task.

    items ── concurrency at once ──> prepare ── RLM (sessions, children, the policy's client) ──> score ──> [Group]

Decides the seeds (each rollout has its own, from the run's seed, the step, the item and the attempt), how long anything
may wait, and what is a failure: a rollout that ends in an error not of the policy's own making keeps what happened in
``errors``, gets no reward, and its group goes on without it. What the policy did to itself (a prompt grown past its
window, a session killed three times) is scored like any other answer. Leaves out credit (``algorithms/``), and which
weights answer (``loop.py``).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.engine.running import Result
from ramify.errors import ConfigError, RamifyError, Refused, SessionDied
from ramify.tasks.base import Item, Start, Task, scored
from ramify.types.trajectory import Group, Stop, Trajectory


class RolloutOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How items are rolled out."""

    group: int = 8
    """Attempts at each item."""
    concurrency: int = 128
    """Rollouts at once; each holds a session, and its children one each."""
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    grace_s: float = 30.0
    """How long past its own deadline (``limits.max_seconds``) a rollout is waited for before it counts as stalled. The
    same holds for a task's ``prepare`` and ``score``."""

    def __post_init__(self) -> None:
        if min(self.group, self.concurrency) < 1 or not self.temperature > 0 or not self.grace_s > 0:
            raise ConfigError(
                f"rollout group={self.group} and concurrency={self.concurrency} must be at least 1, "
                f"temperature={self.temperature} and grace_s={self.grace_s} above 0"
            )

    def sampling(self, max_tokens: int, seed: int) -> Sampling:
        return Sampling(max_tokens, self.temperature, self.top_p, seed=seed, logprobs=True, top_k=self.top_k)


class Rollouts:
    """Rolls items of one task out with one ``RLM``, which its owner keeps open (``async with rlm``), so that all rollouts
    share one sandbox and one client."""

    def __init__(
        self, rlm: RLM, task: Task, options: RolloutOptions, *, seed: int = 0, on_stall: Callable[[str], None] = print
    ) -> None:
        """``on_stall`` is told where a rollout stood that did not end."""
        self._rlm, self._task, self._options, self._seed, self._on_stall = rlm, task, options, seed, on_stall

    async def groups(self, items: Sequence[Item], step: int) -> list[Group]:
        """One group per item, in order, each with its rollouts in order; what failed is among them. Raises only what is
        a bug, or a cancellation."""
        room = asyncio.Semaphore(self._options.concurrency)

        async def one(item: Item, index: int, attempt: int) -> Trajectory:
            async with room:
                return await self._rollout(item, f"step={step}/group={index}/rollout={attempt}")

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    [tasks.create_task(one(item, index, attempt)) for attempt in range(self._options.group)]
                    for index, item in enumerate(items)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [
            Group(item.id, [task.result() for task in attempts]) for item, attempts in zip(items, running, strict=True)
        ]

    async def _rollout(self, item: Item, name: str) -> Trajectory:
        try:
            start = await self._prepared(item)
        except RamifyError as error:
            return Trajectory(name, item.question, task=item.id, errors=[str(error)], stop=Stop.ERROR)
        try:
            trajectory, failure = await self._run(item, start, name)
        finally:
            about = start.on_end() if start.on_end is not None else {}
        trajectory.id, trajectory.task = name, item.id
        trajectory.metadata = {**trajectory.metadata, **about}
        if failure is None:
            failure = await self._scored(item, trajectory)
        if failure is not None:
            trajectory.errors.append(failure)
        return trajectory

    async def _prepared(self, item: Item) -> Start:
        try:
            async with asyncio.timeout(self._options.grace_s):
                return await self._task.prepare(item)
        except RamifyError:
            raise
        except Exception as error:
            raise RamifyError(f"task '{self._task.name}', item {item.id}: prepare raised {error!r}") from error

    async def _run(self, item: Item, start: Start, name: str) -> tuple[Trajectory, str | None]:
        """The rollout and, where it is not to be scored, why."""
        limits = self._rlm.limits
        seed = random.Random(f"{self._seed}/{name}/{item.id}").getrandbits(31)
        about = {"task": item.id, "rollout": name}
        sampling = self._options.sampling(limits.max_reply_tokens, seed)
        running = self._rlm.start(start, item.question, metadata=about, sampling=sampling)
        ending = asyncio.ensure_future(running.result())
        try:
            await asyncio.wait([ending], timeout=limits.max_seconds + self._options.grace_s)
            if ending.done():
                return ending.result().trajectory, _failure(ending.result())
            self._on_stall(f"rollout {name} (run {running.id}) did not end in time; tasks stand at:\n{_stacks()}")
            return running.recorder.trajectory, f"it did not end within {limits.max_seconds:g} s, and was given up"
        except RamifyError as error:  # before it began: no session, no model
            return running.recorder.trajectory, str(error)
        finally:
            running.cancel()
            await asyncio.wait([ending], timeout=self._options.grace_s)

    async def _scored(self, item: Item, trajectory: Trajectory) -> str | None:
        """Score it; why that was not possible, if so."""
        try:
            async with asyncio.timeout(self._options.grace_s):
                await asyncio.to_thread(scored, self._task, item, trajectory)
        except RamifyError as error:
            return str(error)
        except TimeoutError:
            return f"task '{self._task.name}', item {item.id}: its score took more than {self._options.grace_s:g} s"
        return None


def _failure(result: Result) -> str | None:
    """Why the rollout is not to be scored, if so."""
    failure = result.failure
    is_its_own = isinstance(failure, SessionDied) or (isinstance(failure, Refused) and failure.too_long)
    if result.stop is not Stop.ERROR or is_its_own:
        return None
    return result.error or "it ended in an error that was not said"


def _stacks() -> str:
    """Where the tasks of this loop wait: how many at each place, the most crowded first."""
    places = Counter(" > ".join(_frames(task.get_coro())) for task in asyncio.all_tasks())
    return "\n".join(f"{count} x {place}" for place, count in places.most_common())


def _frames(waiting: Any) -> Iterator[str]:
    """File, line and function of each coroutine that waits for the next."""
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        waiting = waiting.cr_await
