"""Roll out task items: sample several attempts at each, and let the task score them.

All attempts share one engine.

    item ── group attempts, as slots become free ──> ``evaluate.attempt``: prepare, RLM, score
         ── once all are complete ──> Group

    A task that scores a whole step at once (``tasks/batch_scoring.py``): a rollout gives up its
    slot unscored, and ``score`` scores those of the step.

Each rollout has its own seed, which is derived from the run's seed, the rollout's name and its
item, never from its start time. A rollout that fails is recorded, and its group continues
(``attempt`` defines failures). The same holds for a rollout that is given up, and for one that was
cut at its deadline, since its reward would depend on the load of the machine.

This module also decides how many rollouts run at once: as many as configured, but fewer while the
engine's cache cannot hold them. Rollouts start in the order in which they were requested.

    engine evicts sequences, or is full with others waiting  ──> limit * 3/4, once applied
    otherwise, if all slots are in use                       ──> limit + 1, up to the maximum

Credit is assigned in ``advantages/``, the weights that answer are chosen by ``trainer.py``, the
order of items by ``group_queue.py``, and the pressure on an engine's cache is measured by
``inference.base.CachePressure``.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import (
    GRACE_S,
    AttemptAwaitingScore,
    attempt,
    choose_root_kind,
    score_attempts,
)
from ramify.inference.base import CachePressure
from ramify.logging import ComponentLogger
from ramify.progress import track_progress
from ramify.tasks.base import Item, Task
from ramify.tasks.batch_scoring import is_batch_scored
from ramify.train.branch_sampler import BranchOptions, branch_sampling_arguments
from ramify.train.config_redaction import check_field_bounds, check_none_or_positive
from ramify.train.placement.rollout_workers import RolloutWorkers
from ramify.train.traffic_training import RecordedTrafficTask, has_recorded_replies
from ramify.types.event import score_events
from ramify.types.trajectory import Group, Stop, Trajectory

Gauge = Callable[[], Awaitable[CachePressure | None]]
_FULL = 0.95
"""How full the engine's cache must be for queued sequences to count as waiting for memory."""
_LESS = 0.75


class RolloutConcurrencyLimiter:
    """A semaphore that limits how many rollouts run at once, used as ``async with controller``.

    The limit adapts to how full the engine's cache is.
    """

    def __init__(
        self, most: int, gauge: Gauge | None = None, *, least: int = 1, every_s: float = 1.0
    ) -> None:
        self.limit = most
        """Current limit of concurrent rollouts."""
        self.used = 0
        self._most = most
        self._least = min(least, most)
        self._gauge = gauge
        self._every_s = every_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_paused = False
        self._evicted: int | None = None
        self._looked = time.monotonic()
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_adaptive(self) -> bool:
        """True if the concurrency limit follows the engine's cache pressure, False if it is
        fixed."""
        return self._gauge is not None

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at the same time
                self._leave()
            raise

    async def __aexit__(self, *_: Any) -> None:
        self._leave()

    def pause(self) -> None:
        """Stop admitting rollouts until ``resume`` is called.

        Running rollouts continue.
        """
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._let_in()

    async def adjust_limit(self) -> None:
        """Adjust the concurrency limit to the current pressure on the engine's cache."""
        pressure = None if self._gauge is None else await self._gauge()
        if pressure is None:
            return
        before, self._evicted = self._evicted, pressure.evicted
        has_lost = before is not None and pressure.evicted > before
        if has_lost or (pressure.waiting and pressure.full >= _FULL):
            if self.used <= self.limit:  # otherwise the last decrease has yet to take effect
                self.limit = max(self._least, int(self.limit * _LESS))
        elif self._waiting and self.limit < self._most:
            self.limit += 1
        self._let_in()

    def _leave(self) -> None:
        self.used -= 1
        self._let_in()
        now = time.monotonic()
        if self._gauge is not None and now - self._looked >= self._every_s:
            self._looked = now
            self._looking = asyncio.get_running_loop().create_task(self.adjust_limit())

    def _let_in(self) -> None:
        while self._waiting and self.used < self.limit and not self._is_paused:
            turn = self._waiting.popleft()
            if not turn.done():
                self.used += 1
                turn.set_result(None)


_log = ComponentLogger("train")


class RolloutOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for rolling out items: the number of attempts, their concurrency, and sampling."""

    group: int = 8
    """Number of attempts per item."""
    concurrency: int = 128
    """Maximum number of rollouts that run at once. Each uses one session, and each of its
    recursive children another one.
    """
    min_concurrency: int | None = 8
    """Lowest concurrency that the run falls back to while the engine's cache is too full. It has
    an effect if the engine reports its cache pressure. None: always ``concurrency``.
    """
    temperature: float = 1.0
    """Temperature at which rollouts are sampled."""
    top_p: float | None = None
    """Nucleus sampling: sample only from the most likely tokens whose probabilities add up to this
    value; None: from all tokens."""
    top_k: int | None = None
    """Sample only from this number of most likely tokens; None: from all tokens."""
    grace_s: float = GRACE_S
    """Seconds that a rollout may exceed its deadline (``limits.max_seconds``) before it counts as
    stalled. The same limit applies to each call of a task's ``prepare`` and ``score``, and to
    scoring a whole step together.
    """
    replay_routes: bool = False
    """Routing replay for mixture-of-experts models (2510.11370): train each sampled token with the
    experts that the engine chose for it, which replies then report.
    """
    direct: bool = False
    """Whether a single plain call may answer an item with a short context, without a session. Such
    a rollout does not train recursion.
    """
    branch: BranchOptions | None = None
    """Fork the sessions of rollouts, for estimators that compare continuations (``branch``,
    ``vine``, ``entropy_branch``); None: no forks."""

    def __post_init__(self) -> None:
        check_field_bounds("rl.rollout", least=1, group=self.group, concurrency=self.concurrency)
        check_field_bounds(
            "rl.rollout", above=0, temperature=self.temperature, grace_s=self.grace_s
        )
        check_none_or_positive(
            "rl.rollout", "always concurrency", min_concurrency=self.min_concurrency
        )
        if self.branch is not None and self.direct:
            raise ConfigError(
                "rl.rollout.branch forks sessions, and with rl.rollout.direct=true a rollout may "
                "have none: set direct=false, or branch=null"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"rl.rollout.top_p={self.top_p:g} must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"rl.rollout.top_k={self.top_k} must be at least 1; give null for all"
            )

    def sampling(self, max_tokens: int, seed: int, *, greedy: bool = False) -> Sampling:
        if greedy:
            return Sampling(max_tokens, 0.0, seed=seed, logprobs=True)
        return Sampling(
            max_tokens, self.temperature, self.top_p, seed=seed, logprobs=True, top_k=self.top_k
        )


class RolloutAttempt:
    """One rollout of a task item, from its request until it ends or is given up."""

    def __init__(
        self,
        name: str,
        item: Item,
        room: RolloutConcurrencyLimiter,
        run: Callable[[], Coroutine[Any, Any, Trajectory]],
        over: Callable[[RolloutAttempt], None],
    ) -> None:
        """Request a rollout, which starts as soon as the concurrency limit allows it.

        ``over`` is called with this attempt once the rollout has ended or was given up.
        """
        self.name = name
        self.began_at: float | None = None
        """Monotonic time at which the rollout began. None while it waits for a slot."""
        self.took_s: float | None = None
        """Duration in seconds; None while the rollout is running, or if it was given up."""
        self.was_given_up = False
        self.result: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._item = item
        self._room = room
        self._run_it = run
        self._over = over
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_task_end)

    @property
    def has_stopped(self) -> bool:
        """True once the rollout has fully stopped, even after it was given up."""
        return self._task.done()

    def give_up(self, why: str) -> None:
        """Give up this rollout: cancel it, and let its group continue without it.

        The rollout may take a while to stop, but nothing waits for that.
        """
        if not self.result.done():
            self.was_given_up = True
            self.result.set_result(self._without_result(why))
            self._over(self)
        self._task.cancel()

    def _without_result(self, why: str) -> Trajectory:
        return Trajectory(
            self.name,
            self._item.question,
            task=self._item.id,
            errors=[why],
            stop=Stop.CANCELLED,
        )

    async def close(self) -> None:
        """Cancel the rollout, and wait until it has stopped."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.result.cancel()

    async def _run(self) -> Trajectory:
        async with self._room:
            self.began_at = time.monotonic()
            try:
                trajectory = await self._run_it()
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Something inside was cancelled, not this rollout: it has failed, the run has not.
                at = traceback.extract_tb(error.__traceback__)[-1]
                why = f"{self.name} was cancelled from inside, at {at.filename}:{at.lineno}"
                _log.error("rollout_cancelled", why, error=error)
                trajectory = self._without_result(why)
            self.took_s = time.monotonic() - self.began_at
            return trajectory

    def _on_task_end(self, task: asyncio.Task[Trajectory]) -> None:
        # Read even if it is not used, since asyncio logs exceptions that were never retrieved.
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


class RolloutGroupInProgress:
    """A group of rollouts in progress: all attempts at one task item."""

    def __init__(
        self, item: Item, attempts: Sequence[RolloutAttempt], greedy: RolloutAttempt | None
    ) -> None:
        self.item = item
        self.attempts = [*attempts, *([greedy] if greedy is not None else [])]
        self._greedy = greedy

    async def wait_for_group(self) -> Group:
        """Wait for all attempts, and return the whole group.

        Attempts that were given up are left out. An unexpected error of an attempt is raised as
        soon as it occurs.
        """
        await asyncio.gather(*(attempt.result for attempt in self.attempts))
        trajectories = [
            attempt.result.result()
            for attempt in self.attempts
            if attempt is not self._greedy and not attempt.was_given_up
        ]
        return Group(
            self.item.id,
            trajectories,
            self._greedy.result.result() if self._greedy is not None else None,
        )

    def unscored(self, *, every_line: bool) -> list[AttemptAwaitingScore]:
        """Return the complete rollouts that have no score yet.

        With ``every_line``, each branch of a forked rollout is scored, and not only the rollout as
        a whole.
        """
        return [
            AttemptAwaitingScore(self.item, trajectory, every_line and each is not self._greedy)
            for each in self.attempts
            if not each.was_given_up and (trajectory := each.result.result()).awaits_score
        ]

    @property
    def given_up_names(self) -> list[str]:
        """The names of the rollouts that were given up while the group continued."""
        return [
            attempt.name
            for attempt in self.attempts
            if attempt is not self._greedy and attempt.was_given_up
        ]

    @property
    def num_ended(self) -> int:
        """The number of the group's rollouts that have ended."""
        return sum(attempt.result.done() for attempt in self.attempts)

    @property
    def has_begun(self) -> bool:
        """True if any rollout of the group has begun."""
        return any(attempt.began_at is not None for attempt in self.attempts)


class TaskRolloutRunner:
    """Rolls out one task's items with a single ``RLM``, whose sandbox and client all rollouts
    share.

    The owner keeps the ``RLM`` open with ``async with rlm``.
    """

    def __init__(
        self,
        rlm: RLM,
        task: Task,
        options: RolloutOptions,
        *,
        seed: int = 0,
        greedy: bool = False,
        gauge: Gauge | None = None,
        rollout_worker: RolloutWorkers | None = None,
    ) -> None:
        """Create a runner that samples rollouts for the items of ``task``.

        ``greedy`` adds one rollout of each item at temperature 0 (``Group.greedy``). ``gauge``
        measures the pressure on the engine's cache, which limits concurrency; None: concurrency is
        fixed. ``rollout_worker`` runs the rollouts in other processes; None: they run in this
        process.
        """
        self._rollout_worker = rollout_worker
        self._rlm = rlm
        self._task = task
        self._options = options
        self._seed = seed
        self._greedy = greedy
        self._stored: dict[str, str] = {}
        """Map the name of each rollout that is not scored yet to its run in the run store."""
        self.per_item = options.group + greedy
        """Attempts per item, including the greedy one."""
        followed = gauge if options.min_concurrency is not None else None
        self.room = RolloutConcurrencyLimiter(
            options.concurrency, followed, least=options.min_concurrency or 1
        )

    def begin(
        self, item: Item, name: str, over: Callable[[RolloutAttempt], None] = lambda _: None
    ) -> RolloutGroupInProgress:
        """Begin a group of rollouts that all attempt the task item ``item``.

        Each attempt starts when a slot is free. ``over`` is called after each attempt. The attempts
        must be ended with ``close_attempts``.
        """

        def one(number: int | str) -> RolloutAttempt:
            rollout_name, task = f"{name}/rollout={number}", self._task
            if (
                isinstance(task, RecordedTrafficTask)
                and has_recorded_replies(item)
                and isinstance(number, int)
            ):
                run = functools.partial(task.recorded_rollout, item, rollout_name, number)
            else:
                run = functools.partial(self._run_rollout, item, rollout_name, number == "greedy")
            return RolloutAttempt(rollout_name, item, self.room, run, over)

        return RolloutGroupInProgress(
            item,
            [one(number) for number in range(self._options.group)],
            one("greedy") if self._greedy else None,
        )

    def is_scored_by_step(self, item: Item) -> bool:
        """Return True if rollouts of ``item`` are scored together with all others of the training
        step."""
        return is_batch_scored(self._task, item)

    async def score(self, groups: Sequence[RolloutGroupInProgress]) -> None:
        """Score the rollouts of complete groups that have no rewards yet, with a single call of the
        task.

        If a rollout cannot be scored, the reason is added to its ``errors``.
        """
        every_line = self._options.branch is not None
        attempts = [each for group in groups for each in group.unscored(every_line=every_line)]
        await score_attempts(self._task, attempts, self._options.grace_s)
        for each in attempts:
            run = self._stored.pop(each.trajectory.id, "")
            if run and self._rlm.store is not None and each.trajectory.rewards:
                took_s = time.time() - each.trajectory.started_at
                events = score_events(each.trajectory, took_s)
                await asyncio.to_thread(self._rlm.store.append, run, events)

    async def count_planned_modes(self, items: Sequence[Item]) -> RootModeCounts:
        """Count how many root calls of ``items`` will be plain calls and how many will have a
        session.

        No model is called.
        """
        options = self._options
        if isinstance(self._task, RecordedTrafficTask):
            return RootModeCounts(len(items), 0, self._rlm.limits.max_depth, is_recorded=True)
        # Without plain calls, all items of a task begin alike.
        looked_at = items if options.direct else items[:1]
        checks = (
            choose_root_kind(
                self._rlm, self._task, item, direct=options.direct, grace_s=options.grace_s
            )
            for item in looked_at
        )
        kinds = await asyncio.gather(*checks)
        depth = self._rlm.limits.max_depth
        if "conversations" in kinds:
            return RootModeCounts(len(items), 0, depth, is_conducted=True)
        return RootModeCounts(len(items), kinds.count("plain call"), depth)

    async def groups(
        self,
        items: Sequence[Item],
        step: int,
        what: str = "rollouts",
        after: Callable[[Group], Awaitable[None]] | None = None,
    ) -> list[Group]:
        """Roll out each task item as a group, and return the groups in the order of the items.

        The groups include failed rollouts. Only unexpected errors and cancellations are raised.

        ``what`` is the label of this work in progress reports. ``after`` is applied to each group
        as soon as it is complete, while others continue.
        """

        async def whole(rolling: RolloutGroupInProgress) -> Group:
            group = await rolling.wait_for_group()
            if after is not None and not self.is_scored_by_step(rolling.item):
                await after(group)
            return group

        with track_progress(what, len(items) * self.per_item, "attempts") as work:
            names = (f"step={step}/group={index}" for index in range(len(items)))
            begun = [
                self.begin(item, name, lambda _: work.advance())
                for item, name in zip(items, names, strict=True)
            ]
            try:
                async with asyncio.TaskGroup() as tasks:
                    found = [tasks.create_task(whole(pending)) for pending in begun]
                # These have rewards only once the whole step is scored, so ``after`` has to wait.
                late = [each for each in begun if self.is_scored_by_step(each.item)]
                await self.score(late)
                if after is not None:
                    await asyncio.gather(
                        *[after(await pending.wait_for_group()) for pending in late]
                    )
            except BaseExceptionGroup as errors:  # the first error cancelled the other tasks
                raise errors.exceptions[0] from None
            finally:
                await close_attempts([attempt for pending in begun for attempt in pending.attempts])
        return [pending.result() for pending in found]

    async def _run_rollout(self, item: Item, name: str, greedy: bool) -> Trajectory:
        seed = random.Random(f"{self._seed}/{name}/{item.id}").getrandbits(31)
        sampling = self._options.sampling(self._rlm.limits.max_reply_tokens, seed, greedy=greedy)
        branch = None if greedy else self._options.branch
        is_late = self.is_scored_by_step(item)
        if self._rollout_worker is not None:
            return self._unless_cut(
                await self._rollout_worker.sample_rollout(item, name, sampling, branch)
            )
        rollout = await attempt(
            self._rlm,
            self._task,
            item,
            name=name,
            sampling=sampling,
            metadata={"rollout": name},
            grace_s=self._options.grace_s,
            direct=self._options.direct,
            on_start=functools.partial(self._stored.__setitem__, name) if is_late else None,
            is_scored=not is_late,
            **branch_sampling_arguments(branch, self._rlm.limits),
        )
        rollout = self._unless_cut(rollout)
        if not rollout.awaits_score:
            self._stored.pop(name, None)
        return rollout

    def _unless_cut(self, rollout: Trajectory) -> Trajectory:
        """Mark ``rollout`` as failed and remove its rewards if a deadline cut it off.

        So the load of a machine never influences a reward. Other rollouts are returned unchanged.
        """
        stops = [rollout.stop, *(call.stop for call in rollout.calls)]
        if (rollout.rewards or rollout.awaits_score) and Stop.DEADLINE in stops:
            rollout.rewards, rollout.call_rewards = {}, {}
            rollout.awaits_score = False
            rollout.errors.append(
                f"{rollout.id} was cut at its deadline, and nothing is learned from it: raise "
                f"limits.max_seconds ({self._rlm.limits.max_seconds:g}), or lower "
                f"rl.rollout.concurrency ({self._options.concurrency})"
            )
        return rollout


async def close_attempts(attempts: Iterable[RolloutAttempt]) -> None:
    """Cancel running attempts, and wait until they have stopped."""
    await asyncio.gather(*(each.close() for each in attempts))


ITEMS = 20
"""Number of items, from the first one that the run will roll out, for which root calls are
counted.
"""


class RootModeCounts(msgspec.Struct, frozen=True):
    """Counts of how a run's first root calls will be answered: by one plain call or recursively.

    A recursive root call has a session and may call children.
    """

    items: int
    """Number of items that were counted."""
    direct: int
    """Number of items that one plain call answers, without a session."""
    depth: int
    """``limits.max_depth``. With 0 no root may call a child, so none is recursive."""
    is_conducted: bool = False
    """True if the task itself conducts the conversations of its items, without recursive calls."""
    is_recorded: bool = False
    """True if the rollouts are replies that were recorded from live traffic."""

    @property
    def num_recursive(self) -> int:
        """The number of task items whose root call gets a sandboxed session and may call
        children."""
        is_other = self.is_conducted or self.is_recorded
        return self.items - self.direct if self.depth and not is_other else 0

    def metrics(self) -> dict[str, float]:
        return {"recursive_roots": float(self.num_recursive), "direct_roots": float(self.direct)}

    def sentence(self) -> str:
        """Return the counts as a sentence for the user."""
        if self.is_recorded:
            return "the rollouts are replies that were recorded from live traffic"
        if self.is_conducted:
            return "the task itself holds the conversations of its items, without sessions"
        head = f"{self.num_recursive} of the first {self.items} items begin with a recursive root"
        if self.num_recursive:
            head += f" (a session, with children down to depth {self.depth})"
        reasons = []
        if self.direct:
            reasons.append(
                f"one plain call answers {self.direct} of them (rl.rollout.direct=false gives each "
                "a session)"
            )
        if not self.depth and self.direct < self.items:
            reasons.append(
                f"{self.items - self.direct} have a session, and limits.max_depth=0 allows no "
                "children"
            )
        return head + (": " + "; ".join(reasons) if reasons else "")


def next_items(items: Sequence[Item], first: int) -> list[Item]:
    """Return the first task items that a run rolls out, beginning with item number ``first``.

    After the last item, the run starts over with item 0.
    """
    return [items[(first + number) % len(items)] for number in range(min(ITEMS, len(items)))]
