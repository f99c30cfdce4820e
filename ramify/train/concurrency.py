"""How many rollouts go on at once: as many as were asked for, fewer while the engine's cache cannot
hold them.

    engine throws sequences out, or is full and lets others wait   ──> a quarter fewer, once those that are too many have ended
    else, and all places are taken                                 ──> one more, up to the most

Additive increase and multiplicative decrease, looked at no more than once in ``every_s``. In order
of arrival. Leaves out what a rollout is (``rollout.py``), and how an engine knows
(``inference.base.Pressure``).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ramify.inference.base import CachePressure

Gauge = Callable[[], Awaitable[CachePressure | None]]
_FULL = 0.95
"""Share of a cache from which on what waits, waits for memory."""
_LESS = 0.75


class ConcurrencyController:
    """Places that rollouts take while they go on: ``async with room``."""

    def __init__(
        self, most: int, gauge: Gauge | None = None, *, least: int = 1, every_s: float = 1.0
    ) -> None:
        self.limit = most
        """Rollouts at once, as of now."""
        self.used = 0
        self._most, self._least, self._gauge, self._every_s = most, min(least, most), gauge, every_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_paused = False
        self._evicted: int | None = None
        self._looked = time.monotonic()
        self._looking: asyncio.Task[None] | None = None

    @property
    def follows(self) -> bool:
        """Whether it follows an engine."""
        return self._gauge is not None

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in and cancelled in the same moment
                self._leave()
            raise

    async def __aexit__(self, *_: Any) -> None:
        self._leave()

    def pause(self) -> None:
        """Let nobody in until ``resume``; who is inside goes on."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._let_in()

    async def look(self) -> None:
        """Ask how full the engine is, and follow it."""
        pressure = None if self._gauge is None else await self._gauge()
        if pressure is None:
            return
        before, self._evicted = self._evicted, pressure.evicted
        has_lost = before is not None and pressure.evicted > before
        if has_lost or (pressure.waiting and pressure.full >= _FULL):
            if self.used <= self.limit:  # else the last decrease has yet to show
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
            self._looking = asyncio.get_running_loop().create_task(self.look())

    def _let_in(self) -> None:
        while self._waiting and self.used < self.limit and not self._is_paused:
            turn = self._waiting.popleft()
            if not turn.done():
                self.used += 1
                turn.set_result(None)
