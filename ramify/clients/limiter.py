"""Limit of the requests in flight to one model, which rate limits narrow."""

from __future__ import annotations

import asyncio
from collections import deque


class Limiter:
    """Allows ``max_in_flight`` requests at a time, first come, first served, and fewer after rate
    limits. For one event loop.

    The gate starts fully open. A rate limit halves its width, once for all requests that were in
    flight together, and pauses all requests for the time that the server asked for. Every success
    widens the gate again, by about a thirtieth of the limit per round of requests. The gate owns no
    task: a request that leaves admits the next one, so an uncontended pass costs a microsecond.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.in_flight = 0
        self.passed = 0
        """Number of requests that succeeded so far."""
        self._most = max_in_flight
        self._allowed = float(max_in_flight)
        self._step = max(1.0, max_in_flight / 32)
        self._round = 0
        """Number of the current round. Requests of one round entered at the same width, and only
        the first rate limit of a round narrows it."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._opens_at: float | None = None
        """Event-loop time at which a pause ends."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_slowed(self) -> bool:
        """Whether a rate limit pauses or narrows the gate."""
        return self._opens_at is not None or self.width < self._most

    @property
    def width(self) -> int:
        """Maximum number of requests in flight now."""
        return int(self._allowed)

    def opens_in_s(self) -> float:
        """Seconds until the current pause ends; 0 if there is none."""
        return (
            0.0
            if self._opens_at is None
            else max(0.0, self._opens_at - asyncio.get_running_loop().time())
        )

    async def acquire(self) -> int:
        """Wait for a slot. Returns the round, to be passed to ``slow_down``."""
        if self._waiting or self._opens_at is not None or self.in_flight >= self.width:
            await self._wait_for_slot()
        else:
            self.in_flight += 1
        return self._round

    def release(self) -> None:
        self.in_flight -= 1
        if self._waiting:
            self._admit()

    def speed_up(self) -> None:
        """Record a success and widen the gate."""
        self.passed += 1
        if self._allowed < self._most:
            self._allowed = min(self._most, self._allowed + self._step / self._allowed)

    def slow_down(self, round: int, pause_s: float) -> None:
        """Record a rate limit of a request from ``round`` and admit no request for ``pause_s``."""
        if round == self._round:
            self._round += 1
            self._allowed = max(1.0, min(self._allowed, self.in_flight) / 2)
        opens_at = asyncio.get_running_loop().time() + pause_s
        if self._opens_at is None or opens_at > self._opens_at:
            self._opens_at = opens_at
            self._schedule_open()

    async def _wait_for_slot(self) -> None:
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        self._admit()
        try:
            await slot
        except asyncio.CancelledError:
            # The slot was handed over at the moment of cancellation, so pass it on.
            if slot.done() and not slot.cancelled():
                self.release()
            raise

    def _admit(self) -> None:
        if self._opens_at is not None:
            return
        while self._waiting and self.in_flight < self.width:
            slot = self._waiting.popleft()
            if not slot.done():
                self.in_flight += 1
                slot.set_result(None)

    def _schedule_open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._opens_at is not None
        self._timer = asyncio.get_running_loop().call_at(self._opens_at, self._open)

    def _open(self) -> None:
        self._opens_at = self._timer = None
        self._admit()
