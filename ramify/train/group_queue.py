"""Groups of rollouts that steps do not wait for: begun in the order of their items, taken when they
are whole.

    items ── begun while few enough are open ──> rollouts, as there is room ──> whole, read ──> taken by a step, or given up
                        ▲                                                                             │
                        └──────────────── one step more of them when the weights are newer ───────────┘

A group is *open* from when it is begun until a step takes it. With ``items`` groups a step and
weights that k steps made:

    may begin     at most (k + 1 + max_staleness) * items groups in all, so that what is whole waits for no more steps
    is taken      what is whole, oldest first. One whose rollouts take longer than the steps do is late; step k waits for
                  those that began at k - max_staleness - late, and for as many as later steps could not take in time

``max_staleness = 0`` is the synchronous run: a step's groups are those of its own items, whole and
in order. With dynamic sampling groups without a signal are given up for others, at most
``max_items`` a step. A rollout that takes ``straggler_factor`` times the median, while nothing else
is left that the step could wait for, is given up and its group goes on without it.

Decides which groups a step has. Leaves out what they teach (``stages.py``) and which weights
answer: those that are newest, also in the middle of a reply (``inference/``).
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
from ramify.train.admission_rules import room, suffice, too_slow
from ramify.train.group_records import GroupRecord, account
from ramify.train.rollout import GroupRollout, RolloutAttempt, Rollouter, close
from ramify.types.trajectory import Group

if TYPE_CHECKING:
    from ramify.train.stages import StepSampleSpec

Numbered = tuple[int, Group]
"""An item's running number and its group."""


class OpenGroup(msgspec.Struct, eq=False):
    """A group that was begun and not taken yet."""

    number: int
    """Of its item, running."""
    rolling: GroupRollout
    task: asyncio.Task[Group]
    """Ends when it is whole, and read."""
    step: int | None = None
    """Steps that had made the weights when its first rollout began; None while none has."""
    group: Group | None = None
    """Once it is whole."""
    has_no_signal: bool = False
    """It is whole, and nothing can be learnt from it."""

    @property
    def is_whole(self) -> bool:
        return self.group is not None

    def account(self, *, spare: bool = False) -> GroupRecord:
        """Where it is given up."""
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
    """Number of a group that goes on without rollouts that were given up -> their ids."""


class GroupQueue:
    """The groups of one stage. ``close`` ends what still goes on."""

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
        """``next_item`` is the number of the first item that was never begun, ``pending`` of those
        that were begun before, by a run that this one goes on from: they are begun first. ``read``
        is done with each group when all its rollouts are over; ``is_silent`` says of a whole group
        whether nothing can be learnt from it."""
        self._rollouts, self._items, self._sample, self._num_steps = (
            rollouts,
            items,
            sample,
            num_steps,
        )
        self._next_item, self._again = next_item, deque(pending)
        self._read, self._is_silent = read, has_no_signal
        self.by_id: dict[str, Item] = {}
        """The items of groups that were begun and not taken."""
        self._open: list[OpenGroup] = []
        """In the order in which they were begun."""
        self._step, self._begun_in_step = 0, 0
        self._took_s: deque[float] = deque(maxlen=sample.items * rollouts.per_item)
        """Of the rollouts that ended last, as many as a step has."""
        self._given_up: list[RolloutAttempt] = []
        """Rollouts that may still be about to end."""
        self._notes: list[str] = []
        self._work: ProgressTask | None = None
        """That of the step which waits."""

    # --- for who learns
    # --------------------------------------------------------------------------------------------

    async def take(self, step: int) -> StepGroups:
        """The groups of step ``step``, once they are there. Raises what is a bug in a rollout."""
        self._at(step)
        with report_progress(
            "rollouts", self._sample.items * self._rollouts.per_item, "attempts"
        ) as work:
            self._work = work
            while True:
                self._look()
                self._tell()
                self._begin()
                if suffice(self._sample, self._open, self._whole(), self._step):
                    break
                await self._wait()
            self._work = None
        return self._taken()

    def newer(self, step: int) -> None:
        """The weights are those that ``step`` steps made: begin what may be begun now."""
        if self._sample.max_staleness:
            self._at(step)
            self._begin()

    def state(self) -> tuple[int, list[int]]:
        """(the number of the first item that was never begun, those of groups that were begun and
        not taken)."""
        return self._next_item, sorted([*self._again, *(each.number for each in self._open)])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No rollout begins inside, where the recipe wants that; those that have begun go on."""
        if not self._sample.pause:
            yield
            return
        self._rollouts.room.pause()
        try:
            yield
        finally:
            self._rollouts.room.resume()

    async def close(self) -> None:
        """End all rollouts, and wait for that."""
        tasks = [each.task for each in self._open]
        for task in tasks:
            task.cancel()
        await close([a for each in self._open for a in each.rolling.attempts] + self._given_up)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what begins
    # -----------------------------------------------------------------------------------------------

    def _at(self, step: int) -> None:
        """The weights are those that ``step`` steps made."""
        self._note_begun()
        if step != self._step:
            self._step, self._begun_in_step = step, 0

    def _note_begun(self) -> None:
        for each in self._open:
            if each.step is None and each.rolling.began:
                each.step = self._step

    def _begin(self) -> None:
        for _ in range(room(self._sample, self._open, self._step, self._num_steps)):
            number = self._again.popleft() if self._again else self._next_item
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
        self._tell()

    def _tell(self) -> None:
        """How far the step is that waits: the rollouts that are over of the groups it is nearest to
        having."""
        if self._work is not None:
            over = sorted(
                (each.rolling.num_over for each in self._open if not each.has_no_signal),
                reverse=True,
            )
            self._work.at(sum(over[: self._sample.items]))

    # --- what is waited for
    # ----------------------------------------------------------------------------------------

    def _whole(self) -> list[OpenGroup]:
        return [each for each in self._open if each.is_whole]

    def _look(self) -> None:
        """See which groups have become whole."""
        self._note_begun()
        for each in self._open:
            if each.group is None and each.task.done():
                each.group = each.task.result()
                each.has_no_signal = bool(self._sample.max_items) and self._is_silent(each.group)

    async def _wait(self) -> None:
        """Until another group is whole, or it is time to look for slow rollouts again."""
        running = [each.task for each in self._open if each.group is None]
        await asyncio.wait(
            running, timeout=self._give_up_slow_ones(), return_when=asyncio.FIRST_COMPLETED
        )

    def _give_up_slow_ones(self) -> float | None:
        """Give up the rollouts that alone hold the step up, if any do; else seconds until some
        might."""
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
        whole = sorted(self._whole(), key=lambda each: each.number)
        zero_variance, with_signal = (
            [each for each in whole if each.has_no_signal],
            [each for each in whole if not each.has_no_signal],
        )
        taken = with_signal[: sample.items]
        missing = sample.items - len(taken)
        taken += zero_variance[:missing]
        given_up = [each.account() for each in zero_variance[missing:]]
        gone = taken + zero_variance[missing:]
        if not sample.max_staleness:  # those beyond would be too old for the next step
            given_up += [each.account(spare=True) for each in with_signal[sample.items :]]
            gone = whole
        away = {id(each) for each in gone}
        self._open = [each for each in self._open if id(each) not in away]
        left = {each.rolling.item.id for each in self._open}
        for item in self.by_id.keys() - left:
            del self.by_id[item]
        metrics = {"items": float(len(gone))}
        if sample.max_staleness:
            metrics["in_flight"] = float(len(self._open))
        if sample.straggler_factor:
            metrics["stragglers"] = float(len(self._notes))
        if self._rollouts.room.follows:
            metrics["concurrency"] = float(self._rollouts.room.limit)
        self._given_up = [each for each in self._given_up if not each.is_over]
        notes, self._notes = self._notes, []
        groups = [(each.number, each.group) for each in taken if each.group is not None]
        stragglers = {each.number: names for each in taken if (names := each.rolling.given_up)}
        return StepGroups(groups, given_up, metrics, notes, stragglers)


def _unfinished(each: OpenGroup) -> list[RolloutAttempt]:
    return [attempt for attempt in each.rolling.attempts if not attempt.result.done()]


def _time_left(each: OpenGroup, bound: float) -> float | None:
    """Seconds until all rollouts of the group that go on have taken more than ``bound``; None where
    none goes on, or one has yet to begin."""
    began = [attempt.began_at for attempt in _unfinished(each)]
    if not began or None in began:
        return None
    return max(at for at in began if at is not None) + bound - time.monotonic()
