"""Processors that parts of a run share, in simulated time: sessions, the trainer's process, and who
waits in it for whom.

    sessions    ── each a process: computes whenever it has a core
    the process ── loop ┐ one interpreter, so that one of them computes at a time; where both want to, they take turns
                   engine┘

With n that want a core, and C cores, each gets min(1, C / n) of one. Everybody's pace changes
whenever somebody begins or ends. Leaves out what each has to do, which is given in seconds of a
core (``simulation_inputs.py``), and caches, memory and turbo.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count

from simpy import Environment, Event

from ramify.cluster.simulated_engine import SimulatedEngine


class SimulatedCores:
    """``num`` cores, and what wants them."""

    def __init__(self, env: Environment, num: float, engine: SimulatedEngine | None) -> None:
        """``engine``: the one in the trainer's process; None where engines have devices of their
        own."""
        self._env, self._num, self._engine = env, num, engine
        self._at, self._alarm, self._ids = env.now, 0, count()
        self._done_s = 0.0
        """Seconds of a core that each session has had since the beginning, had it been there all
        along."""
        self._sessions: list[tuple[float, int, Event]] = []
        """By the ``_done_s`` at which they end."""
        self._loop: deque[tuple[float, Event]] = deque()
        """Work of the loop, one after the other: seconds of a core that are left, and its end."""
        self._pace = self._loop_pace = 0.0
        self.used_s = 0.0
        """Seconds of all cores together that something was computed."""
        self._wanting = 0
        if engine is not None:
            engine.told = self._changed

    def session(self, seconds: float) -> Event:
        """Compute so long in a process of one's own."""
        done = self._env.event()
        self._catch_up()
        heapq.heappush(self._sessions, (self._done_s + seconds, next(self._ids), done))
        self._go_on()
        return done

    def loop(self, seconds: float) -> Event:
        """Compute so long in the event loop, after what is there already."""
        done = self._env.event()
        self._catch_up()
        self._loop.append((seconds, done))
        self._go_on()
        return done

    def settle(self) -> None:
        """Bring what is counted up to now."""
        self._catch_up()
        self._go_on()

    def _changed(self) -> None:
        """The engine has begun or ended to want a core."""
        self._catch_up()
        self._go_on()

    def _catch_up(self) -> None:
        passed, self._at = self._env.now - self._at, self._env.now
        if passed <= 0:
            return
        self._done_s += passed * self._pace
        self.used_s += passed * self._pace * self._wanting
        if self._loop:
            left, done = self._loop[0]
            self._loop[0] = (left - passed * self._loop_pace, done)

    def _go_on(self) -> None:
        """Give everybody their pace, and wake up when the first of them ends."""
        engine_wants, loop_wants = self._engine is not None and self._engine.wants, bool(self._loop)
        wanting = self._wanting = len(self._sessions) + (engine_wants or loop_wants)
        self._pace = min(1.0, self._num / wanting) if wanting else 0.0
        self._loop_pace = self._pace / (1 + engine_wants)
        if self._engine is not None:
            self._engine.pace = self._pace / (1 + loop_wants) if engine_wants else 1.0
        self._alarm += 1
        alarm, ends = self._alarm, []
        if self._sessions:
            ends.append((self._sessions[0][0] - self._done_s) / self._pace)
        if self._loop:
            ends.append(self._loop[0][0] / self._loop_pace)
        if ends:
            self._env.timeout(max(0.0, min(ends))).callbacks.append(lambda _: self._wake(alarm))

    def _wake(self, alarm: int) -> None:
        if alarm != self._alarm:  # something changed meanwhile
            return
        self._catch_up()
        while self._sessions and self._sessions[0][0] <= self._done_s + _ROUNDING_S:
            heapq.heappop(self._sessions)[2].succeed()
        if self._loop and self._loop[0][0] <= _ROUNDING_S:
            self._loop.popleft()[1].succeed()
        self._go_on()


_ROUNDING_S = 1e-9
