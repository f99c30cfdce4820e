"""Wait for data for some microseconds without sleeping, at either end of a session's connection.

To put a process to sleep and wake it up takes longer than a short cell or a quick answer. So both
ends look again and again at first. This pays only while no other session has work for the
processor, which the host knows: it says so in its frames (``"soon"``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

BUSY_S = 50e-6
"""Longest time without sleeping, in seconds."""
_MOST_SKIPS = 63
_FIRST_SKIPS = 7
"""Most sessions run a few cells that take longer, so the wait is left out at first."""
_clock = time.perf_counter
"""Saved before any cell has run."""


class BusyWait:
    """A bounded wait that learns: after each time that was too short, it is left out more often,
    and less often again after times that were long enough."""

    __slots__ = ("_missed", "_skips")

    def __init__(self) -> None:
        self._missed = self._skips = _FIRST_SKIPS
        """How often the wait is left out: after the next miss, about half as often, and from now
        on."""

    def until(self, has_arrived: Callable[[], object]) -> bool:
        """Call a function again and again, for at most ``BUSY_S`` seconds, until it returns
        something true. Returns False if it did not, or if the wait was left out."""
        if self._skips:
            self._skips -= 1
            return False
        end = _clock() + BUSY_S
        while not has_arrived():
            if _clock() > end:
                self._skips = self._missed = min(2 * self._missed + 1, _MOST_SKIPS)
                return False
        self._missed = max(self._missed - 1, 0)
        return True
