"""A cell under way, as the host keeps it: what it printed, what it asked for, how long it worked.

Decides when the clock runs, and what a branch that is forked in the middle has of its cell. Leaves
out what is done with a cell that does not end (``session.py``).
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
    """One cell under way."""

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
        """Of work; the time that the host takes to answer is not counted."""
        self.loop = asyncio.get_running_loop()
        self.changed: asyncio.Future[None] = self.loop.create_future()
        """Wakes whoever waits for the end. Cancelling them cancels it, so it does not hold the end
        itself."""
        self.end: tuple[host_frames.CellDoneFrame, Any] | SessionDied | None = None
        self.output = HeadTailBuffer(max_output_bytes)
        self.chars = 0
        """Characters printed, as the guest counts them."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Answers under way, by the number of the call."""
        self.calls: dict[int, tuple[str, list[Any], dict[str, Any], int]] = {}
        """What is asked under each number: name, arguments and their weight in bytes."""
        self.last_call = 0
        self.worked_s = 0.0
        self.clock_from: float | None = now
        """Since when it works again, by the loop's clock; None while the host does."""
        self.stopped: str | None = None
        """Why it is being interrupted."""
        self.bug: BaseException | None = None
        """What an answer raised that is a fault of the host's."""
        self.timer: asyncio.TimerHandle | None = None

    def worked(self, now: float) -> float:
        return self.worked_s + (now - self.clock_from if self.clock_from is not None else 0.0)

    def copy(self, pending: dict[int, tuple[str, list[Any], dict[str, Any], int]]) -> RunningCell:
        """The same cell in a branch, at the moment of forking."""
        twin = RunningCell(self.id, self.code, self.answer, self.limit_s, 1, 0.0)
        twin.output, twin.chars = copy.deepcopy(self.output), self.chars
        twin.last_call, twin.calls = self.last_call, dict(pending)
        twin.worked_s, twin.clock_from = self.worked_s, None
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
        """Until it ended, again after a cancellation."""
        if self.end is None:
            self.changed = self.loop.create_future()
            await asyncio.wait((self.changed,), timeout=timeout_s)
