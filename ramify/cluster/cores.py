"""CPU cores that the parts of a run share in simulated time.

    sessions      ── one process each; a session computes whenever it has a core
    the process   ── event loop ┐ one Python interpreter: only one computes at a time,
                     engine     ┘ and they take turns if both want to

If n processes want a core and there are C cores, each runs at a pace of min(1, C / n). All paces
change whenever a process begins or ends. Not here: the amount of work, which is given in CPU
seconds (see ``simulation_inputs.py``); and caches, memory bandwidth and turbo clocks.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count

from simpy import Environment, Event

from ramify.cluster.simulated_engine import SimulatedEngine


class SimulatedCores:
    """``num`` cores and the work that shares them."""

    def __init__(self, env: Environment, num: float, engine: SimulatedEngine | None) -> None:
        """``engine`` is the engine in the trainer's process; None if engines have their own
        devices."""
        self._env = env
        self._num = num
        self._engine = engine
        self._at = env.now
        self._alarm = 0
        self._ids = count()
        self._done_s = 0.0
        """CPU seconds that a session would have had if it had run since the beginning."""
        self._sessions: list[tuple[float, int, Event]] = []
        """Sessions, ordered by the ``_done_s`` at which they end."""
        self._loop: deque[tuple[float, Event]] = deque()
        """Work of the event loop in order: remaining CPU seconds and the event of its end."""
        self._pace = self._loop_pace = 0.0
        self.used_s = 0.0
        """CPU seconds used on all cores together."""
        self._wanting = 0
        if engine is not None:
            engine.on_wants_changed = self._changed

    def session(self, seconds: float) -> Event:
        """Compute for ``seconds`` of CPU time in a separate process."""
        done = self._env.event()
        self._catch_up()
        heapq.heappush(self._sessions, (self._done_s + seconds, next(self._ids), done))
        self._reschedule()
        return done

    def loop(self, seconds: float) -> Event:
        """Compute for ``seconds`` of CPU time in the event loop, after the work already queued."""
        done = self._env.event()
        self._catch_up()
        self._loop.append((seconds, done))
        self._reschedule()
        return done

    def settle(self) -> None:
        """Bring all counters up to the current time."""
        self._catch_up()
        self._reschedule()

    def _changed(self) -> None:
        """Handle a change of whether the engine wants a core."""
        self._catch_up()
        self._reschedule()

    def _catch_up(self) -> None:
        passed, self._at = self._env.now - self._at, self._env.now
        if passed <= 0:
            return
        self._done_s += passed * self._pace
        self.used_s += passed * self._pace * self._wanting
        if self._loop:
            left, done = self._loop[0]
            self._loop[0] = (left - passed * self._loop_pace, done)

    def _reschedule(self) -> None:
        """Set the pace of all work, and schedule a wake-up for when the first of it ends."""
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
        self._reschedule()


_ROUNDING_S = 1e-9
