"""A run's queue of groups in simulated time, by the rules of the real one
(``train/admission_rules.py``).

A test has both of them decide the same. Leaves out what a rollout is (``simulated_rollout.py``) and
what learning takes.
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
from ramify.train.admission_rules import AdmissionRules, room, suffice, too_slow

Draw = Callable[[int], tuple[Sequence[RolloutShape], bool]]
"""A group's number -> its rollouts, and whether nothing can be learnt from it."""


class StragglerRules(AdmissionRules, Protocol):
    """What of a setting decides here; see ``simulate.SimulationSetting``."""

    @property
    def straggler_factor(self) -> float: ...


class SimulatedGroup:
    """A group that was begun and not taken yet."""

    def __init__(
        self, number: int, attempts: Sequence[SimulatedRollout], has_no_signal: bool
    ) -> None:
        self.number, self.attempts, self.is_silent_then = number, attempts, has_no_signal
        self.step: int | None = None
        """Steps that had made the weights when its first rollout began; None while none has."""
        self.is_whole = False

    @property
    def has_no_signal(self) -> bool:
        return self.is_whole and self.is_silent_then


class SimulatedQueue:
    """The groups of one run of ``num_steps`` steps."""

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
        self._env, self._stage, self._rules, self._draw, self._num_steps = (
            env,
            stage,
            rules,
            draw,
            num_steps,
        )
        self._step = self._next = 0
        self._open: list[SimulatedGroup] = []
        self._took_s: deque[float] = deque(maxlen=rules.items * per_item)
        self._news = env.event()

    def take(self, step: int) -> Generator[Event, Any, list[SimulatedGroup]]:
        """The groups of step ``step``, once they are there."""
        self._at(step)
        while True:
            self._note_begun()
            self._begin()
            if suffice(self._rules, self._open, self._whole(), self._step):
                return self._taken()
            wait_s = self._give_up_slow_ones()
            yield (
                self._news
                if wait_s is None
                else self._env.any_of([self._news, self._env.timeout(wait_s)])
            )

    def newer(self, step: int) -> None:
        """The weights are those that ``step`` steps made."""
        if self._rules.max_staleness:
            self._at(step)
            self._begin()

    # --- what begins
    # ---------------------------------------------------------------------------------------------

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
            self._env.process(self._played(group))

    def _played(self, group: SimulatedGroup) -> Generator[Event, Any, None]:
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

    # --- what is waited for
    # --------------------------------------------------------------------------------------

    def _whole(self) -> list[SimulatedGroup]:
        return [each for each in self._open if each.is_whole]

    def _give_up_slow_ones(self) -> float | None:
        """Give up the rollouts that alone hold the step up, if any do; else seconds until some
        might."""
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

    def _time_left(self, each: SimulatedGroup, bound: float) -> float | None:
        began = [attempt.began_at for attempt in _unfinished(each)]
        known = [at for at in began if at is not None]
        return None if not known or len(known) < len(began) else max(known) + bound - self._env.now

    def _taken(self) -> list[SimulatedGroup]:
        rules = self._rules
        whole = self._whole()
        zero_variance, with_signal = (
            [each for each in whole if each.has_no_signal],
            [each for each in whole if not each.has_no_signal],
        )
        taken = with_signal[: rules.items]
        taken += zero_variance[: rules.items - len(taken)]
        gone = whole if not rules.max_staleness else [*taken, *zero_variance]
        self._open = [each for each in self._open if each not in gone]
        return taken


def _unfinished(each: SimulatedGroup) -> list[SimulatedRollout]:
    return [attempt for attempt in each.attempts if not attempt.over.triggered]
