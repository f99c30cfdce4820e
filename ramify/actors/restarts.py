"""Decide whether to restart a lost process or to give up on it.

    restarts = ProcessRestartLimiter(3, log, "worker")
    restarts.decide_restart(1, "worker 1 ended")  True: restart it; False: 4 losses in a row
    restarts.decide_restart(1, "no memory")       the same for a restart that failed
    restarts.record_recovery(1, "worker 1 is back")
    restarts.record_success(1)                     it did its work: earlier losses no longer count

A loss leaves one log record with the reason: ``restart``, or ``worker_lost`` if the process is
given up. A restart that fails leaves ``restart_failed``. The caller decides what counts as work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from ramify.errors import RamifyError
from ramify.logging import ComponentLogger, tag_logs_with_outermost_run

LONGEST_PAUSE_S = 30.0
T = TypeVar("T")


Name = str | int


class ProcessRestartLimiter:
    """Decides whether to restart a lost process.

    It counts how often in a row each process was lost without doing any work in between.
    """

    def __init__(self, restarts: int, log: ComponentLogger, kind: str) -> None:
        """Create a limiter that allows each process ``restarts`` restarts in a row before giving up
        on it.

        The count begins again when the process succeeds. ``kind`` says in log records what the
        processes are: ``worker``, ``service``, …
        """
        self._restarts = restarts
        self._log = log
        self._kind = kind
        self._losses: Counter[Name] = Counter()
        self._away: set[Name] = set()
        """Processes that are being restarted."""

    def decide_restart(
        self,
        name: Name,
        why: str,
        again: str = "it is restarted",
        given_up: str = "it is given up",
        *,
        event: str = "restart",
        **fields: Any,
    ) -> bool:
        """Record in the log that a process was lost or could not be restarted.

        Returns True if the process should be restarted.

        The log record says ``why`` the process was lost, followed by ``again`` if it is restarted
        and by ``given_up`` if it is not. ``event`` is the name of the record of a restart, and
        ``fields`` are added to the record.
        """
        is_restarted = self.count_loss(name)
        if name in self._away:
            event, again = "restart_failed", "it is tried again"
        if is_restarted:
            self._away.add(name)
        with tag_logs_with_outermost_run():
            self._log.warning(
                event if is_restarted else f"{self._kind}_lost",
                "; ".join(filter(None, (why, again if is_restarted else given_up))),
                shown=True,
                attempt=self._losses[name],
                **{self._kind: name, **fields},
            )
        return is_restarted

    def count_loss(self, name: Name) -> bool:
        """Count the loss of a process, or a failed restart, without logging it.

        Returns True if the process should be restarted.
        """
        self._losses[name] += 1
        return self._losses[name] <= self._restarts

    def record_recovery(self, name: Name, text: str) -> None:
        """Record that a restarted process is running again, and print a message on the console.

        The log record has level DEBUG, because the restart itself is already logged.
        """
        self.record_restart(name)
        self._log.debug("back", text, shown=True, **{self._kind: name})

    def record_restart(self, name: Name) -> None:
        """Record that a process is running again, so that its next failure is logged as a new
        loss."""
        self._away.discard(name)

    def record_success(self, name: Name) -> None:
        """Record that a process worked successfully, and reset its count of losses."""
        self._losses[name] = 0

    def reset_all_losses(self) -> None:
        self._losses.clear()

    def num_consecutive_losses(self, name: Name) -> int:
        """Return how many times in a row a process has been lost."""
        return self._losses[name]

    def transfer_losses_to_replacement(self, name: Name, new_name: Name) -> None:
        """Transfer the loss count of a process to the process that replaces it under a new name."""
        self._losses[new_name] = self._losses[name]

    def pause_s(self, name: Name) -> float:
        """Return how many seconds to wait before the next restart: 1, 2, 4, … up to 30."""
        return min(LONGEST_PAUSE_S, 2.0 ** self.num_consecutive_losses(name) / 2)


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel several asyncio tasks, and wait until all of them have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def retry_until_started(
    start: Callable[[], Awaitable[T]], on_failure: Callable[[Exception], bool], pause_s: float = 0.0
) -> T | None:
    """Call ``start`` until it succeeds, and return its result.

    After each error, the function ``on_failure`` returns True to try again after ``pause_s``
    seconds, or False to give up and return None.
    """
    while True:
        try:
            return await start()
        except (RamifyError, OSError, EOFError) as error:
            if not on_failure(error):
                return None
        await asyncio.sleep(pause_s)
