"""When a process that was lost is restarted, and when it is given up.

    restarts = ProcessRestartLimiter(3, log, "worker")
    restarts.failed(1, "worker 1 ended")    True: restart it; False: it was lost 4 times in a row
    restarts.failed(1, "no memory")         the same for a restart that failed
    restarts.back(1, "worker 1 is back")
    restarts.succeeded(1)                   it did its work: earlier losses no longer count

A loss leaves one log record with the reason: ``restart``, or ``worker_lost`` if the process is
given up. A restart that fails leaves ``restart_failed``. Not here: what counts as work (its caller
decides that).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from ramify.errors import RamifyError
from ramify.logging import ComponentLogger, in_outermost_run

LONGEST_PAUSE_S = 30.0
T = TypeVar("T")


Name = str | int


class ProcessRestartLimiter:
    """How often each process was lost without any success in between."""

    def __init__(self, restarts: int, log: ComponentLogger, kind: str) -> None:
        """``restarts`` is the number of losses in a row after which a process is still restarted.
        ``kind`` says in log records what the processes are: ``worker``, ``service``, …"""
        self._restarts = restarts
        self._log = log
        self._kind = kind
        self._losses: Counter[Name] = Counter()
        self._away: set[Name] = set()
        """Processes that are being restarted."""

    def failed(
        self,
        name: Name,
        why: str,
        again: str = "it is restarted",
        given_up: str = "it is given up",
        *,
        event: str = "restart",
        **fields: Any,
    ) -> bool:
        """Count the loss of a process, or a failed restart, and log it. Returns whether to restart
        the process.

        The log record says ``why`` the process was lost and what follows: ``again`` for a restart,
        or ``given_up``. ``event`` is the name of the record of a restart, and ``fields`` are added
        to the record.
        """
        is_restarted = self.lost(name)
        if name in self._away:
            event, again = "restart_failed", "it is tried again"
        if is_restarted:
            self._away.add(name)
        with in_outermost_run():
            self._log.warning(
                event if is_restarted else f"{self._kind}_lost",
                "; ".join(filter(None, (why, again if is_restarted else given_up))),
                shown=True,
                attempt=self._losses[name],
                **{self._kind: name, **fields},
            )
        return is_restarted

    def lost(self, name: Name) -> bool:
        """Count the loss of a process, or a failed restart, without logging it. Returns whether to
        restart the process."""
        self._losses[name] += 1
        return self._losses[name] <= self._restarts

    def back(self, name: Name, text: str) -> None:
        """Record that a restart has succeeded, and show ``text`` on a console. The log record has
        level DEBUG, because the restart itself is already logged."""
        self.started(name)
        self._log.debug("back", text, shown=True, **{self._kind: name})

    def started(self, name: Name) -> None:
        """Record that a restart has succeeded: the next failure is another loss."""
        self._away.discard(name)

    def succeeded(self, name: Name) -> None:
        """Record that the process did its work: earlier losses no longer count."""
        self._losses[name] = 0

    def all_succeeded(self) -> None:
        self._losses.clear()

    def num_losses(self, name: Name) -> int:
        """Return how often in a row the process was lost."""
        return self._losses[name]

    def moved(self, name: Name, new_name: Name) -> None:
        """Continue the count of process ``name`` under ``new_name``."""
        self._losses[new_name] = self._losses[name]

    def pause_s(self, name: Name) -> float:
        """Seconds to wait before the next restart: 1, 2, 4, … up to 30."""
        return min(LONGEST_PAUSE_S, 2.0 ** self.num_losses(name) / 2)


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks`` and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def until_started(
    start: Callable[[], Awaitable[T]], on_failure: Callable[[Exception], bool], pause_s: float = 0.0
) -> T | None:
    """Call ``start`` until it succeeds, and return its result. After an error, ``on_failure``
    decides: if it returns True, ``start`` is called again after ``pause_s`` seconds; otherwise None
    is returned."""
    while True:
        try:
            return await start()
        except (RamifyError, OSError, EOFError) as error:
            if not on_failure(error):
                return None
        await asyncio.sleep(pause_s)
