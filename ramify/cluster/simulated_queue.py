"""The queue of groups in simulated time, with the rules of the real one
(``train/rollouts/admission_rules.py``).

A test checks that both make the same decisions. Not here: the course of a rollout (see
``simulated_rollout.py``) and the time of learning (see ``simulate.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from statistics import median
from typing import Any, Protocol

from simpy import Environment, Event

from ramify.cluster.rollout_shapes import RolloutShape
from ramify.cluster.simulated_rollout import SimulatedRollout, SimulatedStage
from ramify.train.rollouts.admission_rules import AdmissionRules, room, suffice, too_slow

Draw = Callable[[int], tuple[Sequence[RolloutShape], bool]]
"""Group number -> its rollouts, and whether the group has no signal."""


class StragglerRules(AdmissionRules, Protocol):
    """The part of a setting that the queue uses; see ``simulate.SimulationSetting``."""

    @property
    def straggler_factor(self) -> float: ...


class SimulatedGroup:
    """A group that has begun and has not been taken by a step."""

    def __init__(
        self, number: int, attempts: Sequence[SimulatedRollout], has_no_signal: bool
    ) -> None:
        self.number = number
        self.attempts = attempts
        self.will_have_no_signal = has_no_signal
        self.step: int | None = None
        """Version of the weights when its first rollout began; None before."""
        self.is_whole = False

    @property
    def has_no_signal(self) -> bool:
        return self.is_whole and self.will_have_no_signal


class SimulatedQueue:
    """Groups of one run of ``num_steps`` steps."""

    def __init__(
        self,
        env: Environment,
        stage: SimulatedStage,
        rules: StragglerRules,
        draw: Draw,
        per_item: int,
        num_steps: int,
    ) -> None:
        self.num_stragglers = 0
        self._env = env
        self._stage = stage
        self._rules = rules
        self._draw = draw
        self._num_steps = num_steps
        self._step = self._next = 0
        self._open: list[SimulatedGroup] = []
        self._took_s: deque[float] = deque(maxlen=rules.items * per_item)
        self._news = env.event()

    def take(self, step: int) -> Generator[Event, Any, list[SimulatedGroup]]:
        """Wait for and return the groups of step ``step``."""
        self._at(step)
        while True:
            self._note_begun()
            self._begin()
            if suffice(self._rules, self._open, self._whole(), self._step):
                return self._take_groups()
            wait_s = self._give_up_slow_ones()
            yield (
                self._news
                if wait_s is None
                else self._env.any_of([self._news, self._env.timeout(wait_s)])
            )

    def newer(self, step: int) -> None:
        """Handle the weights of step ``step``: more groups may begin."""
        if self._rules.max_staleness:
            self._at(step)
            self._begin()

    # --- begin groups -----------------------------------------------------------------------------

    def _at(self, step: int) -> None:
        self._note_begun()
        self._step = step

    def _note_begun(self) -> None:
        for each in self._open:
            if each.step is None and any(attempt.began_at is not None for attempt in each.attempts):
                each.step = self._step

    def _begin(self) -> None:
        for _ in range(room(self._rules, self._open, self._step, self._num_steps)):
            rollouts, has_no_signal = self._draw(self._next)
            attempts = [SimulatedRollout(rollout, self._env.event()) for rollout in rollouts]
            group = SimulatedGroup(self._next, attempts, has_no_signal)
            self._next += 1
            self._open.append(group)
            self._env.process(self._play(group))

    def _play(self, group: SimulatedGroup) -> Generator[Event, Any, None]:
        for attempt in group.attempts:
            self._env.process(self._stage.play(attempt))
            attempt.over.callbacks.append(partial(self._over, attempt))
        yield self._env.all_of([attempt.over for attempt in group.attempts])
        group.is_whole = True
        news, self._news = self._news, self._env.event()
        news.succeed()

    def _over(self, attempt: SimulatedRollout, _: Event) -> None:
        if attempt.took_s is not None:
            self._took_s.append(attempt.took_s)

    # --- wait for groups --------------------------------------------------------------------------

    def _whole(self) -> list[SimulatedGroup]:
        return [each for each in self._open if each.is_whole]

    def _give_up_slow_ones(self) -> float | None:
        """Give up the rollouts that alone hold up the step. If there are none, return the seconds
        until there may be."""
        straggler_factor = self._rules.straggler_factor
        if not straggler_factor or 2 * len(self._took_s) < (self._took_s.maxlen or 0):
            return None
        bound = straggler_factor * median(self._took_s)
        left_s = [self._time_left(each, bound) for each in self._open]
        slow, wait_s = too_slow(self._rules, self._open, left_s, self._step)
        for each in slow:
            for attempt in _unfinished(each):
                self.num_stragglers += 1
                attempt.give_up()
        return wait_s

    def _time_left(self, group: SimulatedGroup, bound: float) -> float | None:
        began = [attempt.began_at for attempt in _unfinished(group)]
        known = [at for at in began if at is not None]
        return None if not known or len(known) < len(began) else max(known) + bound - self._env.now

    def _take_groups(self) -> list[SimulatedGroup]:
        """Remove and return the groups of a step; those with signal come first."""
        rules = self._rules
        whole = self._whole()
        zero_variance = [group for group in whole if group.has_no_signal]
        with_signal = [group for group in whole if not group.has_no_signal]
        groups = with_signal[: rules.items]
        groups += zero_variance[: rules.items - len(groups)]
        # A synchronous run also drops complete groups that the step does not need.
        closed = whole if not rules.max_staleness else [*groups, *zero_variance]
        self._open = [group for group in self._open if group not in closed]
        return groups


def _unfinished(group: SimulatedGroup) -> list[SimulatedRollout]:
    return [attempt for attempt in group.attempts if not attempt.over.triggered]
