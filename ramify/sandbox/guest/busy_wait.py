"""Busy-wait for data for some microseconds before sleeping.

Both ends of a session's connection use this.

Putting a process to sleep and waking it up takes longer than a short cell or a quick answer. Both
ends therefore poll for a short time before they sleep. This is worthwhile only while no other
session needs the CPU. The host knows whether that is so, and says it in its frames (``"soon"``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

BUSY_S = 50e-6
"""Maximum time of one busy wait, in seconds."""
_MOST_SKIPS = 63
_FIRST_SKIPS = 7
"""Number of busy waits to skip at first. Most sessions run only a few cells, each of which takes
longer than a busy wait may last."""
_clock = time.perf_counter
"""The clock function, saved before any cell runs so that a cell cannot replace it."""


class AdaptiveBusyWait:
    """A short busy wait that is tried less often if it rarely succeeds.

    After a wait that ended too early, more of the later waits are skipped. After a successful wait,
    fewer are skipped.
    """

    __slots__ = ("_missed", "_skips")

    def __init__(self) -> None:
        self._missed = self._skips = _FIRST_SKIPS
        """``_missed`` is a penalty, which doubles each time a wait ends before data arrives.
        ``_skips`` is the number of waits still to skip."""

    def until(self, has_arrived: Callable[[], object]) -> bool:
        """Poll ``has_arrived`` until it returns a true value, for at most ``BUSY_S`` seconds.

        Returns False if that never happens, or if the wait was skipped.
        """
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
