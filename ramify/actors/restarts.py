"""When a process that was lost is restarted, and when it is given up.

    restarts = RestartCount(3)
    restarts.failed("worker 1")      True: restart it; False: it was lost 4 times in a row
    restarts.succeeded("worker 1")   it did its work in between: earlier losses no longer count

Not here: what counts as work (its caller decides that), and the record of the decision, which its
caller writes with the reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from ramify.errors import RamifyError

LONGEST_PAUSE_S = 30.0
T = TypeVar("T")


class RestartCount:
    """How often each process was lost without any success in between."""

    def __init__(self, restarts: int) -> None:
        """``restarts``: how many losses in a row are answered by a restart."""
        self._restarts = restarts
        self._losses: Counter[Hashable] = Counter()

    def failed(self, name: Hashable = "") -> bool:
        """Count a loss, or a restart that failed; returns whether to restart it."""
        self._losses[name] += 1
        return self._losses[name] <= self._restarts

    def succeeded(self, name: Hashable = "") -> None:
        """Record that the process did its work: earlier losses no longer count."""
        self._losses[name] = 0

    def all_succeeded(self) -> None:
        self._losses.clear()

    def num_losses(self, name: Hashable = "") -> int:
        """Losses in a row."""
        return self._losses[name]

    def moved(self, name: Hashable, new_name: Hashable) -> None:
        """Continue counting under another name."""
        self._losses[new_name] = self._losses[name]

    def pause_s(self, name: Hashable = "") -> float:
        """Seconds to wait before the next restart: 1, 2, 4, … up to 30."""
        return min(LONGEST_PAUSE_S, 2.0 ** self.num_losses(name) / 2)


async def until_started(
    start: Callable[[], Awaitable[T]], on_failure: Callable[[Exception], bool], pause_s: float = 0.0
) -> T | None:
    """The result of ``start``, which is called again as long as ``on_failure`` returns True for its
    error; None if it is given up."""
    while True:
        try:
            return await start()
        except (RamifyError, OSError, EOFError) as error:
            if not on_failure(error):
                return None
        await asyncio.sleep(pause_s)
