"""Queue groups of rollouts for the training steps that learn from them.

A group is several attempts at one item. Rollouts may run ahead of the training steps: groups begin
in the order of their items, and a step takes groups that are complete.

    items ── begin, up to a limit ──> rollouts ── complete ──> taken by a step, or given up
                      ▲                                                  │
                      └─────── newer weights: one step's groups more ────┘

A group is *open* from its beginning until a step takes it. Let each step take ``items`` groups,
and let the engine have the weights after k steps. Then these rules hold:

    may begin   at most (k + 1 + max_staleness) * items groups in all, so that a complete group
                waits for at most max_staleness steps
    is taken    complete groups, oldest first. Step k waits for groups that began at step
                k - max_staleness - grace_steps or before, and for as many others as later steps
                could not take in time

``max_staleness = 0`` is the synchronous case: each step waits for its own groups, in order. With
dynamic sampling, groups without a training signal are replaced by others, up to ``max_items``
groups per step.

If the task scores whole steps (``tasks/batch_scoring.py``), complete groups wait unscored. Once
there are enough for a step, those that it takes are scored with one call. If some turn out to have
no signal, dynamic sampling continues, and each further round has its own call.

A rollout is given up if it takes more than ``straggler_factor`` times the median while the step
waits for nothing else. Its group continues without it.

This module only decides which groups a step gets. What is learned from them is in ``stages.py``.
Requests are answered with the newest weights, even in the middle of a reply (``inference/``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median
from typing import Protocol, TypeVar

import msgspec

from ramify.errors import ConfigError
from ramify.progress import ProgressReporter, track_progress
from ramify.tasks.base import Item
from ramify.train.config_redaction import check_field_bounds, check_none_or_positive
from ramify.train.metrics import RolloutGroupRecord, group_record
from ramify.train.rollouts.difficulty_pool import NoSignalItemFilter
from ramify.train.rollouts.rollouter import (
    RolloutAttempt,
    RolloutGroupInProgress,
    TaskRolloutRunner,
    close_attempts,
)
from ramify.types.trajectory import Group, RolloutGroupOutcome

_MAX_SKIPPED = 10_000
"""Maximum number of items that the difficulty pool may skip in a row, so that a step always finds
items.
"""
_MOMENT_S = 1e-9
"""Tolerance for comparing times. Because of rounding, a computed time may be just below the time
that was waited for.
"""


class RolloutBatchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a step's rollouts: how many items each step of reinforcement learning samples, and
    how far sampling may run ahead of training."""

    items: int = 24
    """Number of task items per step."""
    first_item: int = 0
    """Index of the first item in the training split. After a stage with demonstrations, the default
    is the first item that was not demonstrated."""
    max_items: int | None = None
    """Dynamic sampling: maximum number of items that a step may start until ``items`` of them give
    a training signal. None: no dynamic sampling."""
    minibatches: int = 1
    """Number of optimizer steps into which a step's rollouts are split."""
    max_staleness: int = 0
    """How many steps rollouts may run ahead of training. 0: each step waits for its own rollouts.
    With 1 or more, rollouts continue while the trainer learns, and switch to newer weights as they
    arrive.
    """
    grace_steps: int = 4
    """With ``max_staleness`` above 0: how many more steps a slow rollout may run before a step
    waits for it. 0: no token is older than ``max_staleness`` steps, but any ``max_staleness + 1``
    steps take at least as long as the slowest rollout.
    """
    straggler_factor: float | None = None
    """Give up a rollout that takes longer than this multiple of the median duration, once its step
    waits for nothing else; None: never.
    """
    settled_share: float | None = None
    """Difficulty pool: fraction of the times a settled item comes up in which it is still sampled.
    An item is settled if its last group gave no signal, since all attempts or none solved it; a
    part of a mixture, if nearly all of its latest groups gave none. Needs an algorithm that drops
    groups without signal. None: every item is always sampled."""
    pause: bool = False
    """Pause new rollouts while the policy is evaluated, so that only rollouts in progress compete
    with the evaluation."""

    @property
    def max_token_staleness(self) -> int:
        """Maximum staleness, in steps, of a token that the trainer may learn from."""
        return self.max_staleness + self.grace_steps if self.max_staleness else 0

    def __post_init__(self) -> None:
        staleness = {"grace_steps": self.grace_steps, "max_staleness": self.max_staleness}
        check_field_bounds("rl.sample", least=0, **staleness)
        check_none_or_positive("rl.sample", "no dynamic sampling", max_items=self.max_items)
        check_none_or_positive("rl.sample", "never", straggler_factor=self.straggler_factor)
        if self.straggler_factor is not None and self.straggler_factor < 1:
            raise ConfigError(
                f"rl.sample: straggler_factor={self.straggler_factor:g} is a multiple of the "
                "median: at least 1, or null for never"
            )
        if self.settled_share is not None and not 0 < self.settled_share <= 1:
            raise ConfigError(
                f"rl.sample: settled_share={self.settled_share:g} is a share of turns: above 0 and "
                "at most 1, or null to ask every item"
            )
        check_field_bounds("rl.sample", least=1, items=self.items, minibatches=self.minibatches)
        if self.max_items is not None and self.max_items < self.items:
            raise ConfigError(
                f"rl.sample.max_items={self.max_items} must be at least rl.sample.items="
                f"{self.items}; give null for no dynamic sampling"
            )


Numbered = tuple[int, Group]
"""An item's number together with its group."""


class QueuedRolloutGroup(msgspec.Struct, eq=False):
    """A rollout group that has begun and that no training step has taken yet."""

    number: int
    """Index of the group's item."""
    rolling: RolloutGroupInProgress
    task: asyncio.Task[Group]
    """Completes when all rollouts of the group have ended and their signals are computed. For a
    group that is scored together with others of its step, it completes before scoring, and signals
    are computed later.
    """
    step: int | None = None
    """Number of training steps behind the engine's weights at the time when the group's first
    rollout began; None if none has begun.
    """
    group: Group | None = None
    """The result, once the group is complete."""
    is_scored: bool = False
    """True if the group is complete and its rollouts have rewards."""
    has_no_signal: bool = False
    """True if the group is complete and nothing can be learned from it."""

    @property
    def is_whole(self) -> bool:
        return self.group is not None

    def unlearned_record(self, *, spare: bool = False) -> RolloutGroupRecord:
        """Return the record of a rollout group that no training step learns from.

        Pass ``spare=True`` if the step already had enough groups.
        """
        assert self.group is not None
        return group_record(
            self.number, self.group, None if spare else (), self.rolling.given_up_names
        )


class StepRolloutGroups(msgspec.Struct):
    """The rollout groups that one training step learns from, and records of abandoned groups."""

    groups: list[Numbered]
    given_up: list[RolloutGroupRecord]
    metrics: dict[str, float]
    notes: list[str]
    """Human-readable notes on the rollouts that were given up."""
    stragglers: dict[int, list[str]]
    """Ids of the rollouts that were given up while their group continued, keyed by group number."""


class RolloutGroupProducer:
    """Runs the rollout groups of one training stage, and passes them to the stage's steps.

    Call ``close`` to end all rollouts.
    """

    def __init__(
        self,
        rollouts: TaskRolloutRunner,
        items: Sequence[Item],
        sample: RolloutBatchSpec,
        num_steps: int,
        *,
        next_item: int,
        pending: Sequence[int] = (),
        read: Callable[[Group], Awaitable[None]] | None = None,
        has_no_signal: Callable[[Group], bool] = lambda group: False,
        pool: NoSignalItemFilter | None = None,
    ) -> None:
        """Create the queue for the rollout groups of one training stage.

        Rollouts begin when ``take`` or ``begin_groups_for_weights`` is called.

        ``next_item`` is the index of the first item that has not begun. If the run is resumed,
        ``pending`` holds the indices of items that were in progress when it stopped, and these
        begin first. ``read`` computes the signals of a group whose rollouts are complete.
        ``has_no_signal`` returns True if nothing can be learned from a complete group. ``pool``
        decides which items are skipped because they gave no signal recently.
        """
        self._rollouts = rollouts
        self._items = items
        self._sample = sample
        self._num_steps = num_steps
        self._next_item = next_item
        self._pending = deque(pending)
        self._read = read
        self._has_no_signal = has_no_signal
        self._pool = pool
        self._skipped: list[RolloutGroupRecord] = []
        """Records of skipped items that are not written yet."""
        self.by_id: dict[str, Item] = {}
        """Items of the open groups, by id."""
        self.open_groups: list[QueuedRolloutGroup] = []
        """The open groups, in the order in which they began."""
        self._step = 0
        self._begun_in_step = 0
        self._took_s: deque[float] = deque(maxlen=sample.items * rollouts.per_item)
        """Durations of the most recent rollouts in seconds, as many as one step has rollouts."""
        self._given_up: list[RolloutAttempt] = []
        """Rollouts that were given up and may still be ending."""
        self._notes: list[str] = []
        self._work: ProgressReporter | None = None
        """Progress display of the step that is waiting for its groups."""

    # --- for the stage

    async def take(self, step: int) -> StepRolloutGroups:
        """Wait until the rollout groups of the given step are complete, and return them.

        Raises unexpected errors of rollouts.
        """
        self._set_step(step)
        with track_progress(
            "rollouts", self._sample.items * self._rollouts.per_item, "attempts"
        ) as work:
            self._work = work
            while True:
                self._find_complete()
                self._report_progress()
                self._begin_groups()
                if not has_enough_groups(
                    self._sample, self.open_groups, self._completed_groups(), self._step
                ):
                    await self._wait()
                elif (
                    unscored := self._groups_to_score()
                ):  # scores may show that groups have no signal
                    await self._score(unscored)
                else:
                    break
            self._work = None
        return self._choose_groups()

    def begin_groups_for_weights(self, step: int) -> None:
        """Start the rollout groups that may begin once the engine has the weights of step ``step``.

        These are the weights after ``step`` training steps. Does nothing if ``max_staleness`` is 0.
        """
        if self._sample.max_staleness:
            self._set_step(step)
            self._begin_groups()

    def resume_position(self) -> tuple[int, list[int]]:
        """Return the next new task item and the items in progress, so that the run can resume
        there.

        Both are given as item indices.
        """
        return self._next_item, sorted(
            [*self._pending, *(entry.number for entry in self.open_groups)]
        )

    def take_skipped_records(self) -> list[RolloutGroupRecord]:
        """Return and clear the records of recently skipped task items.

        They cover the time since the last step or the last call of this method.
        """
        records, self._skipped = self._skipped, []
        return records

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context manager inside which no new rollouts begin, if ``sample.pause`` is set.

        Running rollouts continue.
        """
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
        tasks = [entry.task for entry in self.open_groups]
        for task in tasks:
            task.cancel()
        await close_attempts(
            [a for entry in self.open_groups for a in entry.rolling.attempts] + self._given_up
        )
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- beginning groups

    def _set_step(self, step: int) -> None:
        """Record that the engine now has the weights after training step ``step``."""
        self._note_begun()
        if step != self._step:
            self._step, self._begun_in_step = step, 0

    def _note_begun(self) -> None:
        for entry in self.open_groups:
            if entry.step is None and entry.rolling.has_begun:
                entry.step = self._step

    def _begin_groups(self) -> None:
        for _ in range(
            num_groups_to_begin(self._sample, self.open_groups, self._step, self._num_steps)
        ):
            number, item = self._take_next_item()
            # Names set seeds, and with staleness the step of a group's start depends on timing.
            name = (
                f"item={number}"
                if self._sample.max_staleness
                else f"step={self._step}/group={self._begun_in_step}"
            )
            self._begun_in_step += 1
            self.by_id[item.id] = item
            rolling = self._rollouts.begin(item, name, self._on_attempt_end)
            self.open_groups.append(
                QueuedRolloutGroup(number, rolling, asyncio.create_task(self._await_group(rolling)))
            )

    def _take_next_item(self) -> tuple[int, Item]:
        """Return the number of the next task item to roll out, and the item itself.

        Items that the difficulty pool skips are recorded as skipped.
        """
        if self._pending:
            number = self._pending.popleft()
            self._next_item = max(self._next_item, number + 1)
            return number, self._items[number % len(self._items)]
        last = self._next_item + _MAX_SKIPPED
        while True:
            number, self._next_item = self._next_item, self._next_item + 1
            item = self._items[number % len(self._items)]
            pool = self._pool
            if pool is None or number >= last or not pool.should_skip(number, item.id):
                return number, item
            self._skipped.append(
                RolloutGroupRecord(
                    number=number,
                    item=item.id,
                    version=None,
                    outcome=RolloutGroupOutcome.SKIPPED,
                    rollouts=[],
                )
            )

    async def _await_group(self, rolling: RolloutGroupInProgress) -> Group:
        group = await rolling.wait_for_group()
        if self._read is not None and not self._rollouts.is_scored_by_step(rolling.item):
            await self._read(group)
        return group

    def _on_attempt_end(self, attempt: RolloutAttempt) -> None:
        if attempt.took_s is not None:
            self._took_s.append(attempt.took_s)
        self._report_progress()

    def _report_progress(self) -> None:
        """Report how many rollouts have ended in the groups that are nearest to completion.

        Only as many groups as the step takes are counted.
        """
        if self._work is not None:
            over = sorted(
                (entry.rolling.num_ended for entry in self.open_groups if not entry.has_no_signal),
                reverse=True,
            )
            self._work.set_progress(sum(over[: self._sample.items]))

    # --- waiting for groups

    def _completed_groups(self) -> list[QueuedRolloutGroup]:
        return [each for each in self.open_groups if each.is_whole]

    def _find_complete(self) -> None:
        """Store the results of rollout groups that have been completed since the last check."""
        self._note_begun()
        for entry in self.open_groups:
            if entry.group is None and entry.task.done():
                entry.group = entry.task.result()
                if not self._rollouts.is_scored_by_step(entry.rolling.item):
                    self._note_scored(entry)

    def _note_scored(self, entry: QueuedRolloutGroup) -> None:
        """Record that a complete rollout group has been scored, and whether it gives a training
        signal."""
        assert entry.group is not None
        entry.is_scored = True
        entry.has_no_signal = bool(self._sample.max_items) and self._has_no_signal(entry.group)

    def _groups_to_score(self) -> list[QueuedRolloutGroup]:
        """Return the complete rollout groups that still have to be scored.

        If rollouts run ahead of the steps, only the groups that the next step will take are
        returned.
        """
        ready = [entry for entry in self._completed_groups() if not entry.has_no_signal]
        # A later step scores the rest; without staleness, this step closes all of them.
        if self._sample.max_staleness:
            ready = sorted(ready, key=lambda entry: entry.number)[: self._sample.items]
        return [entry for entry in ready if not entry.is_scored]

    async def _score(self, entries: Sequence[QueuedRolloutGroup]) -> None:
        """Score the rollouts of complete groups together, with one call into the task's code."""
        await self._rollouts.score([entry.rolling for entry in entries])
        if self._read is not None:
            await asyncio.gather(*(self._read(entry.group) for entry in entries if entry.group))
        for entry in entries:
            self._note_scored(entry)

    async def _wait(self) -> None:
        """Wait until another group is complete, or until it is time to check for slow rollouts."""
        running = [entry.task for entry in self.open_groups if entry.group is None]
        await asyncio.wait(
            running, timeout=self._give_up_slow_ones(), return_when=asyncio.FIRST_COMPLETED
        )

    def _give_up_slow_ones(self) -> float | None:
        """Give up slow rollouts if they are all that the step is waiting for.

        If nothing is given up, return how many seconds to wait before checking again, or None if no
        running rollout can become slow.
        """
        if not self._sample.straggler_factor or 2 * len(self._took_s) < (self._took_s.maxlen or 0):
            return None
        bound = self._sample.straggler_factor * median(self._took_s)
        left_s = [_time_left(each, bound) for each in self.open_groups]
        slow, wait_s = groups_to_give_up(self._sample, self.open_groups, left_s, self._step)
        for each in slow:
            for attempt in _unfinished_attempts(each):
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

    def _choose_groups(self) -> StepRolloutGroups:
        """Choose the complete rollout groups that the step learns from.

        Close them, and the groups that no step can take any more.
        """
        sample = self._sample
        whole = sorted(self._completed_groups(), key=lambda entry: entry.number)
        zero_variance, with_signal = (
            [entry for entry in whole if entry.has_no_signal],
            [entry for entry in whole if not entry.has_no_signal],
        )
        taken = with_signal[: sample.items]
        missing = sample.items - len(taken)
        # Only if dynamic sampling has used all its tries: there are no better groups.
        taken += zero_variance[:missing]
        given_up = [entry.unlearned_record() for entry in zero_variance[missing:]]
        closed = taken + zero_variance[missing:]
        if not sample.max_staleness:  # groups in excess would be too old for the next step
            given_up += [
                entry.unlearned_record(spare=True) for entry in with_signal[sample.items :]
            ]
            closed = whole
        closed_ids = {id(entry) for entry in closed}
        self.open_groups = [entry for entry in self.open_groups if id(entry) not in closed_ids]
        remaining = {entry.rolling.item.id for entry in self.open_groups}
        for item in self.by_id.keys() - remaining:
            del self.by_id[item]
        metrics = {"items": float(len(closed))}
        if sample.settled_share is not None:
            metrics["skipped_items"] = float(len(self._skipped))
        given_up += self.take_skipped_records()
        if sample.max_staleness:
            metrics["in_flight"] = float(len(self.open_groups))
        if sample.straggler_factor:
            metrics["stragglers"] = float(len(self._notes))
        if self._rollouts.room.is_adaptive:
            metrics["concurrency"] = float(self._rollouts.room.limit)
        self._given_up = [entry for entry in self._given_up if not entry.has_stopped]
        notes, self._notes = self._notes, []
        # All are complete; the condition is for the type checker.
        groups = [(entry.number, entry.group) for entry in taken if entry.group is not None]
        stragglers = {
            entry.number: names for entry in taken if (names := entry.rolling.given_up_names)
        }
        return StepRolloutGroups(groups, given_up, metrics, notes, stragglers)


def _unfinished_attempts(group: QueuedRolloutGroup) -> list[RolloutAttempt]:
    return [attempt for attempt in group.rolling.attempts if not attempt.result.done()]


def _time_left(group: QueuedRolloutGroup, bound: float) -> float | None:
    """Return the seconds until all running rollouts of a group count as slow.

    A rollout counts as slow after ``bound`` seconds. Returns None if no rollout is running, or if
    one has not begun yet.
    """
    began = [attempt.began_at for attempt in _unfinished_attempts(group)]
    if not began or None in began:
        return None
    return max(at for at in began if at is not None) + bound - time.monotonic()


# --- the rules: which groups may begin, and which ones a step waits for


class RolloutAdmissionOptions(Protocol):
    """Interface of options that limit the rollout groups in progress and their tokens' staleness.

    Training and the simulator both provide them.
    """

    @property
    def items(self) -> int: ...
    @property
    def max_items(self) -> int | None: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def max_token_staleness(self) -> int: ...


class StartedRolloutGroup(Protocol):
    """The interface of a rollout group that has begun and that no training step has taken yet."""

    step: int | None
    """Number of training steps behind the engine's weights at the time when the group's first
    rollout began; None if none has begun.
    """

    @property
    def is_whole(self) -> bool:
        """True if all rollouts of the group are complete and their training signals are
        computed."""
        ...

    @property
    def has_no_signal(self) -> bool:
        """True if the group of rollouts is complete but gives no training signal."""
        ...


G = TypeVar("G", bound=StartedRolloutGroup)


def num_groups_to_begin(
    rules: RolloutAdmissionOptions, begun: Sequence[StartedRolloutGroup], step: int, num_steps: int
) -> int:
    """Return how many more rollout groups may begin while the engine has the weights of step
    ``step``.

    These are the weights after ``step`` of the ``num_steps`` training steps.
    """
    num_zero_variance = sum(group.has_no_signal for group in begun)
    ahead = min(rules.max_staleness, num_steps - step - 1)
    free = (1 + ahead) * rules.items - (len(begun) - num_zero_variance)
    if not rules.max_items:
        return free
    # This step may try ``max_items`` groups; those begun ahead are for later steps.
    if rules.max_staleness or not begun:
        return min(free, ahead * rules.items + rules.max_items - len(begun))
    # Without staleness, groups begin in rounds; each round is as large as should be enough.
    if not all(group.is_whole for group in begun):
        return 0
    return num_replacement_groups(
        rules.items, len(begun) - num_zero_variance, len(begun), rules.max_items
    )


def has_enough_groups(
    rules: RolloutAdmissionOptions,
    begun: Sequence[StartedRolloutGroup],
    whole: Sequence[StartedRolloutGroup],
    step: int,
) -> bool:
    """Return True if the complete rollout groups in ``whole`` suffice to start step ``step``.

    ``begun`` holds all groups that have begun, complete or not.
    """
    # Groups that are completed later would be too old for the next step.
    if not rules.max_staleness and len(whole) < len(begun):
        return False
    complete = {id(group) for group in whole}
    num_with_signal = sum(not group.has_no_signal for group in whole)
    has_tried_all = len(whole) >= (rules.max_items or float("inf"))
    if num_with_signal < rules.items and not has_tried_all:
        return False
    # A group that began at step s must be taken by step s + max_token_staleness. Of the groups due
    # by ``step + later``, the steps after this one can take ``later * items``. All others must be
    # complete now.
    for later in range(rules.max_token_staleness + 1):
        last = step + later - rules.max_token_staleness
        due = [
            group
            for group in begun
            if not group.has_no_signal and group.step is not None and group.step <= last
        ]
        if sum(id(group) in complete for group in due) < len(due) - later * rules.items:
            return False
    return True


def groups_to_give_up(
    rules: RolloutAdmissionOptions, begun: Sequence[G], left_s: Sequence[float | None], step: int
) -> tuple[list[G], float | None]:
    """Find the rollout groups whose slow rollouts are all that the training step is waiting for.

    ``left_s`` holds, for each group in ``begun``, the seconds until all its running rollouts count
    as slow. The value is None if no rollout is running or one has yet to begin.

    Returns the groups and None, if there are such groups. Otherwise returns an empty list and the
    seconds until there may be some; these are None if there is nothing to wait for.
    """
    slow = [
        group
        for group, left in zip(begun, left_s, strict=True)
        if left is not None and left <= _MOMENT_S
    ]
    others = [group for group in begun if not any(group is slow_group for slow_group in slow)]
    whole = [group for group in begun if group.is_whole]
    if has_enough_groups(rules, begun, others, step) or not has_enough_groups(
        rules, begun, [*whole, *slow], step
    ):
        return [], min(
            (left for left in left_s if left is not None and left > _MOMENT_S), default=None
        )
    num = next(
        num
        for num in range(len(slow) + 1)
        if has_enough_groups(rules, begun, [*whole, *slow[:num]], step)
    )
    return slow[:num], None


def num_replacement_groups(wanted: int, kept: int, tried: int, max_tried: int) -> int:
    """Return how many more groups to roll out in dynamic sampling (DAPO, 2503.14476).

    Of ``tried`` groups, ``kept`` had a training signal, and ``wanted`` are needed. It assumes that
    the same fraction of the new groups has a signal. The total never exceeds ``max_tried``.

    wanted 8, 2 of 8 kept, at most 32: 24 more.  6 of 8 kept: 3 more.
    """
    missing = wanted - kept
    if missing <= 0:
        return 0
    expected = math.ceil(missing * tried / kept) if kept else missing
    return max(0, min(expected, max_tried - tried))
