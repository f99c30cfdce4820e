"""A queue of rollout groups that run ahead of the steps: begun in the order of their items, taken
when complete.

    items ── begin, up to a limit ──> rollouts ── complete ──> taken by a step, or given up
                      ▲                                                  │
                      └─────── newer weights: one step's groups more ────┘

A group is *open* from its beginning until a step takes it. With ``items`` groups per step and
weights after k steps:

    may begin   at most (k + 1 + max_staleness) * items groups in all, so that a complete group
                waits for at most max_staleness steps
    is taken    complete groups, oldest first. Step k waits for groups that began at step
                k - max_staleness - grace_steps or before, and for as many others as later steps
                could not take in time

``max_staleness = 0`` is the synchronous run: each step waits for its groups, in order.
With dynamic sampling, groups without a signal are replaced by others, up to ``max_items`` per step.
A rollout that takes more than ``straggler_factor`` times the median, while the step waits for
nothing else, is given up, and its group continues without it.

Decides which groups a step has. Not here: what they teach (``stages.py``), and which weights
answer; the newest ones do, even in the middle of a reply (``inference/``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from ramify.progress import ProgressTask, report_progress
from ramify.tasks.base import Item
from ramify.train.group_records import GroupRecord, account
from ramify.train.rollouts.admission_rules import room, suffice, too_slow
from ramify.train.rollouts.rollouter import GroupRollout, RolloutAttempt, Rollouter, close
from ramify.types.trajectory import Group

if TYPE_CHECKING:
    from ramify.train.rollouts.admission_rules import StepSampleSpec

Numbered = tuple[int, Group]
"""(number of an item, its group)"""


class OpenGroup(msgspec.Struct, eq=False):
    """A group that has begun and that no step has taken yet."""

    number: int
    """Number of its item."""
    rolling: GroupRollout
    task: asyncio.Task[Group]
    """Completes when the group is complete and its signals are computed."""
    step: int | None = None
    """Number of steps behind the weights when its first rollout began; None if none has begun."""
    group: Group | None = None
    """The result, once the group is complete."""
    has_no_signal: bool = False
    """Whether it is complete and nothing can be learned from it."""

    @property
    def is_whole(self) -> bool:
        return self.group is not None

    def account(self, *, spare: bool = False) -> GroupRecord:
        """The record of a group that is given up. ``spare``: it was more than the step needed."""
        assert self.group is not None
        return account(self.number, self.group, None if spare else (), self.rolling.given_up)


class StepGroups(msgspec.Struct):
    """The groups of one step."""

    groups: list[Numbered]
    given_up: list[GroupRecord]
    metrics: dict[str, float]
    notes: list[str]
    """Which rollouts were given up, in sentences."""
    stragglers: dict[int, list[str]]
    """Number of a group that continues without rollouts that were given up -> their ids."""


class GroupQueue:
    """The groups of one stage. ``close`` ends all rollouts."""

    def __init__(
        self,
        rollouts: Rollouter,
        items: Sequence[Item],
        sample: StepSampleSpec,
        num_steps: int,
        *,
        next_item: int,
        pending: Sequence[int] = (),
        read: Callable[[Group], Awaitable[None]] | None = None,
        has_no_signal: Callable[[Group], bool] = lambda group: False,
    ) -> None:
        """``next_item`` is the number of the first item that has never begun. ``pending`` are
        numbers of items that an earlier run, which this one resumes, had begun: they begin first.
        ``read`` computes the signals of a group whose rollouts are complete. ``has_no_signal``
        returns True if nothing can be learned from a complete group."""
        self._rollouts = rollouts
        self._items = items
        self._sample = sample
        self._num_steps = num_steps
        self._next_item = next_item
        self._pending = deque(pending)
        self._read = read
        self._has_no_signal = has_no_signal
        self.by_id: dict[str, Item] = {}
        """Items of the open groups, by id."""
        self._open: list[OpenGroup] = []
        """In the order in which they began."""
        self._step = 0
        self._begun_in_step = 0
        self._took_s: deque[float] = deque(maxlen=sample.items * rollouts.per_item)
        """Durations of the latest rollouts, as many as a step has."""
        self._given_up: list[RolloutAttempt] = []
        """Rollouts that were given up and may still be ending."""
        self._notes: list[str] = []
        self._work: ProgressTask | None = None
        """Progress of the step that is waiting."""

    # --- for the stage

    async def take(self, step: int) -> StepGroups:
        """The groups of step ``step``, once they are complete. Raises unexpected errors of
        rollouts."""
        self._set_step(step)
        with report_progress(
            "rollouts", self._sample.items * self._rollouts.per_item, "attempts"
        ) as work:
            self._work = work
            while True:
                self._find_complete()
                self._report_progress()
                self._begin()
                if suffice(self._sample, self._open, self._whole(), self._step):
                    break
                await self._wait()
            self._work = None
        return self._taken()

    def newer(self, step: int) -> None:
        """The weights are those after ``step`` steps: begin the groups that may begin now."""
        if self._sample.max_staleness:
            self._set_step(step)
            self._begin()

    def state(self) -> tuple[int, list[int]]:
        """(number of the first item that has never begun, numbers of items of the open groups)"""
        return self._next_item, sorted([*self._pending, *(entry.number for entry in self._open)])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no rollouts inside, if ``sample.pause`` is set; running ones continue."""
        if not self._sample.pause:
            yield
            return
        self._rollouts.room.pause()
        try:
            yield
        finally:
            self._rollouts.room.resume()

    async def close(self) -> None:
        """Cancel all rollouts, and wait until they have ended."""
        tasks = [entry.task for entry in self._open]
        for task in tasks:
            task.cancel()
        await close([a for entry in self._open for a in entry.rolling.attempts] + self._given_up)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- beginning groups

    def _set_step(self, step: int) -> None:
        """The weights are those after ``step`` steps."""
        self._note_begun()
        if step != self._step:
            self._step, self._begun_in_step = step, 0

    def _note_begun(self) -> None:
        for entry in self._open:
            if entry.step is None and entry.rolling.began:
                entry.step = self._step

    def _begin(self) -> None:
        for _ in range(room(self._sample, self._open, self._step, self._num_steps)):
            number = self._pending.popleft() if self._pending else self._next_item
            self._next_item = max(self._next_item, number + 1)
            item = self._items[number % len(self._items)]
            name = (
                f"item={number}"
                if self._sample.max_staleness
                else f"step={self._step}/group={self._begun_in_step}"
            )
            self._begun_in_step += 1
            self.by_id[item.id] = item
            rolling = self._rollouts.begin(item, name, self._over)
            self._open.append(
                OpenGroup(number, rolling, asyncio.create_task(self._rolled(rolling)))
            )

    async def _rolled(self, rolling: GroupRollout) -> Group:
        group = await rolling.whole()
        if self._read is not None:
            await self._read(group)
        return group

    def _over(self, attempt: RolloutAttempt) -> None:
        if attempt.took_s is not None:
            self._took_s.append(attempt.took_s)
        self._report_progress()

    def _report_progress(self) -> None:
        """Report the step's progress: completed rollouts in the groups that are nearest to
        completion."""
        if self._work is not None:
            over = sorted(
                (entry.rolling.num_over for entry in self._open if not entry.has_no_signal),
                reverse=True,
            )
            self._work.at(sum(over[: self._sample.items]))

    # --- waiting for groups

    def _whole(self) -> list[OpenGroup]:
        return [each for each in self._open if each.is_whole]

    def _find_complete(self) -> None:
        """Find groups that have become complete."""
        self._note_begun()
        for entry in self._open:
            if entry.group is None and entry.task.done():
                entry.group = entry.task.result()
                entry.has_no_signal = bool(self._sample.max_items) and self._has_no_signal(
                    entry.group
                )

    async def _wait(self) -> None:
        """Wait until another group is complete, or until it is time to check for slow rollouts."""
        running = [entry.task for entry in self._open if entry.group is None]
        await asyncio.wait(
            running, timeout=self._give_up_slow_ones(), return_when=asyncio.FIRST_COMPLETED
        )

    def _give_up_slow_ones(self) -> float | None:
        """Give up the rollouts that alone hold up the step, if there are any. Otherwise return the
        seconds until there may be some."""
        if not self._sample.straggler_factor or 2 * len(self._took_s) < (self._took_s.maxlen or 0):
            return None
        bound = self._sample.straggler_factor * median(self._took_s)
        left_s = [_time_left(each, bound) for each in self._open]
        slow, wait_s = too_slow(self._sample, self._open, left_s, self._step)
        for each in slow:
            for attempt in _unfinished(each):
                self._give_up(attempt, bound)
        return wait_s

    def _give_up(self, attempt: RolloutAttempt, bound: float) -> None:
        why = (
            f"{attempt.name} was given up: it took more than {bound:.3g} s, "
            f"{self._sample.straggler_factor:g} times the median, and "
            "the step waited for nothing else (rl.sample.straggler_factor)"
        )
        self._notes.append(why)
        self._given_up.append(attempt)
        attempt.give_up(why)

    def _taken(self) -> StepGroups:
        sample = self._sample
        whole = sorted(self._whole(), key=lambda entry: entry.number)
        zero_variance, with_signal = (
            [entry for entry in whole if entry.has_no_signal],
            [entry for entry in whole if not entry.has_no_signal],
        )
        taken = with_signal[: sample.items]
        missing = sample.items - len(taken)
        taken += zero_variance[:missing]
        given_up = [entry.account() for entry in zero_variance[missing:]]
        closed = taken + zero_variance[missing:]
        if not sample.max_staleness:  # groups in excess would be too old for the next step
            given_up += [entry.account(spare=True) for entry in with_signal[sample.items :]]
            closed = whole
        closed_ids = {id(entry) for entry in closed}
        self._open = [entry for entry in self._open if id(entry) not in closed_ids]
        remaining = {entry.rolling.item.id for entry in self._open}
        for item in self.by_id.keys() - remaining:
            del self.by_id[item]
        metrics = {"items": float(len(closed))}
        if sample.max_staleness:
            metrics["in_flight"] = float(len(self._open))
        if sample.straggler_factor:
            metrics["stragglers"] = float(len(self._notes))
        if self._rollouts.room.follows:
            metrics["concurrency"] = float(self._rollouts.room.limit)
        self._given_up = [entry for entry in self._given_up if not entry.is_over]
        notes, self._notes = self._notes, []
        groups = [(entry.number, entry.group) for entry in taken if entry.group is not None]
        stragglers = {entry.number: names for entry in taken if (names := entry.rolling.given_up)}
        return StepGroups(groups, given_up, metrics, notes, stragglers)


def _unfinished(group: OpenGroup) -> list[RolloutAttempt]:
    return [attempt for attempt in group.rolling.attempts if not attempt.result.done()]


def _time_left(group: OpenGroup, bound: float) -> float | None:
    """Seconds until all running rollouts of the group have taken more than ``bound``; None if none
    is running, or one has yet to begin."""
    began = [attempt.began_at for attempt in _unfinished(group)]
    if not began or None in began:
        return None
    return max(at for at in began if at is not None) + bound - time.monotonic()
