"""Decides how many rollouts run at once: as many as configured, but fewer while the engine's cache
cannot hold them.

    engine evicts sequences, or is full with others waiting  ──> limit * 3/4, once applied
    otherwise, if all slots are in use                       ──> limit + 1, up to the maximum

Additive increase and multiplicative decrease, checked at most once per ``every_s``. Rollouts start
in order of arrival. Not here: what a rollout is (``rollout.py``), and how an engine measures its
cache (``inference.base.CachePressure``).
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
"""Fill level of a cache above which waiting sequences wait for memory."""
_LESS = 0.75


class ConcurrencyController:
    """A semaphore whose limit follows the engine's cache: ``async with room``."""

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
    def follows(self) -> bool:
        """Whether the limit follows an engine."""
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
        """Admit no more rollouts until ``resume``; running ones continue."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._let_in()

    async def look(self) -> None:
        """Measure the engine's cache pressure, and adapt the limit."""
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
            self._looking = asyncio.get_running_loop().create_task(self.look())

    def _let_in(self) -> None:
        while self._waiting and self.used < self.limit and not self._is_paused:
            turn = self._waiting.popleft()
            if not turn.done():
                self.used += 1
                turn.set_result(None)
