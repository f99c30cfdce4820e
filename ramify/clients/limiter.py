"""How many requests may be on the wire at once: a first-come, first-served gate that gives way to
rate limits.

It begins wide open. A rate limit halves it, once for all requests that were on the wire together,
and stops everyone until the time that the server asked for; every success widens it again, by about
a thirtieth of the limit for each round of requests. It owns no task: a turn is handed over by
whoever leaves, so an uncontended pass costs a microsecond.

It does not decide whether a request is tried again, or when: that is the pool's.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Limiter:
    """At most ``max_in_flight`` at a time, fewer after rate limits. For one event loop."""

    def __init__(self, max_in_flight: int) -> None:
        self.in_flight = 0
        self.passed = 0
        """Requests that succeeded so far."""
        self._most = max_in_flight
        self._allowed = float(max_in_flight)
        self._step = max(1.0, max_in_flight / 32)
        self._round = 0
        """Requests of one round entered under the same width; only the first rate limit of a round
        narrows it."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._opens_at: float | None = None
        """Event loop's time at which a pause ends."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def width(self) -> int:
        """How many may be in flight now."""
        return int(self._allowed)

    def opens_in_s(self) -> float:
        """Seconds until a pause ends; 0 where there is none."""
        return (
            0.0
            if self._opens_at is None
            else max(0.0, self._opens_at - asyncio.get_running_loop().time())
        )

    async def acquire(self) -> int:
        """Wait for a turn. Returns the round, which ``slow_down`` wants back."""
        if self._waiting or self._opens_at is not None or self.in_flight >= self.width:
            await self._turn()
        else:
            self.in_flight += 1
        return self._round

    def release(self) -> None:
        self.in_flight -= 1
        if self._waiting:
            self._admit()

    def speed_up(self) -> None:
        """A request succeeded."""
        self.passed += 1
        if self._allowed < self._most:
            self._allowed = min(self._most, self._allowed + self._step / self._allowed)

    def slow_down(self, round: int, pause_s: float) -> None:
        """A request that entered in ``round`` met a rate limit: nobody enters for ``pause_s``."""
        if round == self._round:
            self._round += 1
            self._allowed = max(1.0, min(self._allowed, self.in_flight) / 2)
        opens_at = asyncio.get_running_loop().time() + pause_s
        if self._opens_at is None or opens_at > self._opens_at:
            self._opens_at = opens_at
            self._wind()

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if (
                turn.done() and not turn.cancelled()
            ):  # the turn was handed over in the moment of the cancellation
                self.release()
            raise

    def _admit(self) -> None:
        if self._opens_at is not None:
            return
        while self._waiting and self.in_flight < self.width:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def _wind(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._opens_at is not None
        self._timer = asyncio.get_running_loop().call_at(self._opens_at, self._open)

    def _open(self) -> None:
        self._opens_at = self._timer = None
        self._admit()
