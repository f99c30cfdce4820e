"""Busy-wait for data for some microseconds before sleeping. Both ends of a session's connection use
this.

To put a process to sleep and wake it up takes longer than a short cell or a quick answer. So both
ends look again and again at first. This pays only while no other session has work for the
processor, which the host knows: it says so in its frames (``"soon"``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

BUSY_S = 50e-6
"""Maximum time of one busy wait, in seconds."""
_MOST_SKIPS = 63
_FIRST_SKIPS = 7
"""Initial number of skipped waits. Most sessions run only a few cells, which take longer than a
wait."""
_clock = time.perf_counter
"""Saved before any cell runs, so that a cell cannot replace it."""


class BusyWait:
    """A short busy wait that adapts to its success. After a wait that was too short, later waits
    are skipped more often. After a wait that was long enough, they are skipped less often."""

    __slots__ = ("_missed", "_skips")

    def __init__(self) -> None:
        self._missed = self._skips = _FIRST_SKIPS
        """A penalty that doubles with each miss, and the number of waits still to skip."""

    def until(self, has_arrived: Callable[[], object]) -> bool:
        """Call ``has_arrived`` repeatedly for at most ``BUSY_S`` seconds, until it returns
        something true. Returns False if that never happens, or if the wait was skipped."""
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
