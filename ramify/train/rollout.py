"""Groups of rollouts: several attempts at each item, through the one engine, scored by the task.

    item ── group attempts, as there is room for ──> ``evaluate.attempt``: prepare, RLM, score ──> Group, once all are over

Decides the seeds: each rollout has its own, from the run's seed, its name and its item, and never
from the time at which it began. A rollout that fails is recorded and its group goes on (``attempt``
says what is a failure); so is one that is given up, and one that was cut at its deadline, whose
reward would depend on how busy the machine is. Leaves out credit (``algorithms/``), which weights
answer (``training_loop.py``), and which items come when (``group_queue.py``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import GRACE_S, attempt, is_direct
from ramify.progress import report_progress
from ramify.tasks.base import Item, Task
from ramify.train.concurrency import ConcurrencyController, Gauge
from ramify.train.placement.rollout_workers import RolloutSource
from ramify.train.roots import RootCount
from ramify.types.trajectory import Group, Stop, Trajectory


class RolloutOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How items are rolled out."""

    group: int = 8
    """Attempts at each item."""
    concurrency: int = 128
    """Rollouts at once; each holds a session, and its children one each."""
    min_concurrency: int = 8
    """Where the engine tells how full its cache is: how few at once there may be while sequences
    are thrown out of it; 0 for ``concurrency`` whatever it tells."""
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    grace_s: float = GRACE_S
    """How long past its own deadline (``limits.max_seconds``) a rollout is waited for before it
    counts as stalled. The same holds for a task's ``prepare`` and ``score``."""
    direct: bool = False
    """Whether one plain call may answer a short context, without a session. Such a rollout trains
    no recursive model."""

    def __post_init__(self) -> None:
        if (
            min(self.group, self.concurrency) < 1
            or not self.temperature > 0
            or not self.grace_s > 0
        ):
            raise ConfigError(
                f"rollout group={self.group} and concurrency={self.concurrency} must be at least "
                "1, "
                f"temperature={self.temperature} and grace_s={self.grace_s} above 0"
            )
        if self.min_concurrency < 0:
            raise ConfigError(f"rollout min_concurrency={self.min_concurrency} must be at least 0")

    def sampling(self, max_tokens: int, seed: int, *, greedy: bool = False) -> Sampling:
        if greedy:
            return Sampling(max_tokens, 0.0, seed=seed, logprobs=True)
        return Sampling(
            max_tokens, self.temperature, self.top_p, seed=seed, logprobs=True, top_k=self.top_k
        )


class RolloutAttempt:
    """One rollout, from when it was asked for to its end."""

    def __init__(
        self,
        name: str,
        item: Item,
        room: ConcurrencyController,
        run: Callable[[], Coroutine[Any, Any, Trajectory]],
        over: Callable[[RolloutAttempt], None],
    ) -> None:
        """``over`` is called when it has ended, or was given up."""
        self.name = name
        self.began_at: float | None = None
        """By the monotonic clock; None while it waits for a place."""
        self.took_s: float | None = None
        """None while it goes on, and where it was given up."""
        self.was_given_up = False
        self.result: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._item, self._room, self._run_it, self._over = item, room, run, over
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it goes on any more."""
        return self._task.done()

    def give_up(self, why: str) -> None:
        """Let its group go on without it. It may take a while to end; nobody waits for that."""
        if not self.result.done():
            gone = Trajectory(
                self.name,
                self._item.question,
                task=self._item.id,
                errors=[why],
                stop=Stop.CANCELLED,
            )
            self.was_given_up = True
            self.result.set_result(gone)
            self._over(self)
        self._task.cancel()

    async def close(self) -> None:
        """End it, and wait for that."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.result.cancel()

    async def _run(self) -> Trajectory:
        async with self._room:
            self.began_at = time.monotonic()
            trajectory = await self._run_it()
            self.took_s = time.monotonic() - self.began_at
            return trajectory

    def _ended(self, task: asyncio.Task[Trajectory]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.result.done():
            return
        if task.cancelled():
            self.result.cancel()
        elif error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())
            self._over(self)


class GroupRollout:
    """A group on its way: the attempts at one item."""

    def __init__(
        self, item: Item, attempts: Sequence[RolloutAttempt], greedy: RolloutAttempt | None
    ) -> None:
        self.item = item
        self.attempts = [*attempts, *([greedy] if greedy is not None else [])]
        self._greedy = greedy

    async def whole(self) -> Group:
        """Once all are over, without those that were given up, of which nothing is known. Raises
        what is a bug in one of them, as soon as it comes."""
        await asyncio.gather(*(each.result for each in self.attempts))
        found = [
            each.result.result()
            for each in self.attempts
            if each is not self._greedy and not each.was_given_up
        ]
        return Group(
            self.item.id, found, self._greedy.result.result() if self._greedy is not None else None
        )

    @property
    def given_up(self) -> list[str]:
        """Names of the rollouts that the group goes on without."""
        return [
            each.name for each in self.attempts if each is not self._greedy and each.was_given_up
        ]

    @property
    def num_over(self) -> int:
        """Of its rollouts."""
        return sum(each.result.done() for each in self.attempts)

    @property
    def began(self) -> bool:
        """Whether any of its rollouts has."""
        return any(each.began_at is not None for each in self.attempts)


class Rollouter:
    """Rolls items of one task out with one ``RLM``, which its owner keeps open (``async with
    rlm``), so that all rollouts share one sandbox and one client."""

    def __init__(
        self,
        rlm: RLM,
        task: Task,
        options: RolloutOptions,
        *,
        seed: int = 0,
        on_stall: Callable[[str], None] = print,
        greedy: bool = False,
        gauge: Gauge | None = None,
        rollout_worker: RolloutSource | None = None,
    ) -> None:
        """``on_stall`` is told where a rollout stood that did not end. ``greedy``: one more rollout
        of each item, at temperature 0, beside its group (``Group.greedy``). ``gauge`` tells how
        full the engine's cache is. ``runner``: who rolls out, where that is not this process."""
        self._rollout_worker = rollout_worker
        self._rlm, self._task, self._options, self._seed, self._on_stall = (
            rlm,
            task,
            options,
            seed,
            on_stall,
        )
        self._greedy = greedy
        self.per_item = options.group + greedy
        """Attempts at each item, the greedy one among them."""
        followed = gauge if options.min_concurrency else None
        self.room = ConcurrencyController(
            options.concurrency, followed, least=options.min_concurrency
        )

    def begin(
        self, item: Item, name: str, over: Callable[[RolloutAttempt], None] = lambda _: None
    ) -> GroupRollout:
        """The group ``name`` of attempts at ``item``, each of which begins when there is room for
        it; ``over`` is called after each. To be ended by ``close``."""

        def one(number: int | str) -> RolloutAttempt:
            whole = f"{name}/rollout={number}"
            return RolloutAttempt(
                whole, item, self.room, lambda: self._rollout(item, whole, number == "greedy"), over
            )

        return GroupRollout(
            item,
            [one(number) for number in range(self._options.group)],
            one("greedy") if self._greedy else None,
        )

    async def roots(self, items: Sequence[Item]) -> RootCount:
        """How the roots of ``items`` will begin. No model is asked."""
        direct = 0
        if self._options.direct:
            grace_s = self._options.grace_s
            asked = (is_direct(self._rlm, self._task, item, grace_s) for item in items)
            direct = sum(await asyncio.gather(*asked))
        return RootCount(len(items), direct, self._rlm.limits.max_depth)

    async def groups(
        self,
        items: Sequence[Item],
        step: int,
        what: str = "rollouts",
        after: Callable[[Group], Awaitable[None]] | None = None,
    ) -> list[Group]:
        """One group per item, in order, each with its rollouts in order; what failed is among them.
        ``what`` is said of it while it goes on. ``after`` is done with each group as soon as it is
        whole, while others go on. Raises only what is a bug, or a cancellation."""

        async def whole(rolling: GroupRollout) -> Group:
            group = await rolling.whole()
            if after is not None:
                await after(group)
            return group

        with report_progress(what, len(items) * self.per_item, "attempts") as work:
            names = (f"step={step}/group={index}" for index in range(len(items)))
            begun = [
                self.begin(item, name, lambda _: work.more())
                for item, name in zip(items, names, strict=True)
            ]
            try:
                async with asyncio.TaskGroup() as tasks:
                    found = [tasks.create_task(whole(each)) for each in begun]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                await close([attempt for each in begun for attempt in each.attempts])
        return [each.result() for each in found]

    async def _rollout(self, item: Item, name: str, greedy: bool) -> Trajectory:
        seed = random.Random(f"{self._seed}/{name}/{item.id}").getrandbits(31)
        sampling = self._options.sampling(self._rlm.limits.max_reply_tokens, seed, greedy=greedy)
        if self._rollout_worker is not None:
            return self._unless_cut(await self._rollout_worker.attempt(item, name, sampling))
        rollout = await attempt(
            self._rlm,
            self._task,
            item,
            name=name,
            sampling=sampling,
            metadata={"rollout": name},
            grace_s=self._options.grace_s,
            on_stall=self._on_stall,
            direct=self._options.direct,
        )
        return self._unless_cut(rollout)

    def _unless_cut(self, rollout: Trajectory) -> Trajectory:
        """``rollout``, without rewards if the deadline cut it: how busy a machine is must not
        become a reward."""
        stops = [rollout.stop, *(call.stop for call in rollout.calls)]
        if rollout.rewards and Stop.DEADLINE in stops:
            rollout.rewards, rollout.call_rewards = {}, {}
            rollout.errors.append(
                f"{rollout.id} was cut at its deadline, and nothing is learnt from it: raise "
                "limits.max_seconds "
                f"({self._rlm.limits.max_seconds:g}), or lower rl.rollout.concurrency "
                f"({self._options.concurrency})"
            )
        return rollout


async def close(attempts: Iterable[RolloutAttempt]) -> None:
    """End what still goes on."""
    await asyncio.gather(*(each.close() for each in attempts))
