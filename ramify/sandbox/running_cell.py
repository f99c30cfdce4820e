"""The host's state of a running cell: its output, its pending calls, and how long it has worked.

Decides when the clock runs, and what a branch that is forked in the middle of a cell inherits. Not
here: what is done with a cell that does not end (see ``session.py``).
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from ramify.errors import SessionDied
from ramify.sandbox import host_frames
from ramify.sandbox.base import Answer
from ramify.sandbox.guest.tails import HeadTailBuffer


class RunningCell:
    """One cell that is running."""

    __slots__ = (
        "answer",
        "bug",
        "calls",
        "changed",
        "chars",
        "clock_from",
        "code",
        "end",
        "id",
        "last_call",
        "limit_s",
        "loop",
        "output",
        "stopped",
        "tasks",
        "timer",
        "worked_s",
    )

    def __init__(
        self, id: int, code: str, answer: Answer, limit_s: float, max_output_bytes: int, now: float
    ) -> None:
        self.id = id
        self.code = code
        self.answer = answer
        self.limit_s = limit_s
        """Limit of working time; the time that the host takes to answer does not count."""
        self.loop = asyncio.get_running_loop()
        self.changed: asyncio.Future[None] = self.loop.create_future()
        """Wakes the task that waits for the end. Cancelling that task cancels this future, so the
        end itself is stored in ``end``."""
        self.end: tuple[host_frames.CellDoneFrame, Any] | SessionDied | None = None
        self.output = HeadTailBuffer(max_output_bytes)
        self.chars = 0
        """Number of characters printed, as counted by the guest."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Answer tasks in progress, by call id."""
        self.calls: dict[int, tuple[str, list[Any], dict[str, Any], int]] = {}
        """Pending calls by id: name, args, kwargs, and their size in bytes."""
        self.last_call = 0
        self.worked_s = 0.0
        self.clock_from: float | None = now
        """Time (of the event loop) since which the cell has been working; None while it waits for
        the host."""
        self.stopped: str | None = None
        """Reason for the interrupt in progress, or None."""
        self.bug: BaseException | None = None
        """Exception from ``answer`` that is a bug of the host."""
        self.timer: asyncio.TimerHandle | None = None

    def worked(self, now: float) -> float:
        return self.worked_s + (now - self.clock_from if self.clock_from is not None else 0.0)

    def copy(self, pending: dict[int, tuple[str, list[Any], dict[str, Any], int]]) -> RunningCell:
        """Copy the cell for a branch, at the moment of forking."""
        twin = RunningCell(self.id, self.code, self.answer, self.limit_s, 1, 0.0)
        twin.output = copy.deepcopy(self.output)
        twin.chars = self.chars
        twin.last_call = self.last_call
        twin.calls = dict(pending)
        twin.worked_s = self.worked_s
        twin.clock_from = None
        return twin

    def clock_stops(self, now: float) -> None:
        self.worked_s, self.clock_from = self.worked(now), None

    def text(self) -> str:
        return self.output.text(self.chars)

    def ends(self, end: tuple[host_frames.CellDoneFrame, Any] | SessionDied) -> None:
        self.end = end
        if not self.changed.done():
            self.changed.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the cell has ended, also after an earlier wait was cancelled."""
        if self.end is None:
            self.changed = self.loop.create_future()
            await asyncio.wait((self.changed,), timeout=timeout_s)
