"""The host's state of a running cell: its output, its pending calls, and how long it has worked.

Decides what a branch that is forked in the middle of a cell inherits. Not here: what is done with a
cell that does not end (see ``session.py``).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from ramify.errors import SessionDied
from ramify.sandbox import host_frames
from ramify.sandbox.base import Answer
from ramify.sandbox.guest.tails import HeadTailBuffer
from ramify.sandbox.session_calls import CellCalls, CellClock, PendingCall
from ramify.sandbox.session_wire import SessionWire

End = tuple[host_frames.CellDoneFrame, Any] | SessionDied


class RunningCell:
    """One cell that is running."""

    __slots__ = (
        "_changed",
        "calls",
        "chars",
        "clock",
        "code",
        "end",
        "id",
        "limit_s",
        "output",
        "stopped",
        "timer",
    )

    def __init__(
        self,
        id: int,
        code: str,
        answer: Answer,
        *,
        wire: SessionWire,
        limit_s: float,
        output: HeadTailBuffer,
        on_bug: Callable[[RunningCell], None],
    ) -> None:
        """``on_bug``: called if ``answer`` fails unexpectedly."""
        self.id = id
        self.code = code
        self.limit_s = limit_s
        """Limit of working time; the time that the host takes to answer does not count."""
        self.clock = CellClock()
        self.calls = CellCalls(wire, self.clock, answer, lambda: on_bug(self))
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Wakes the task that waits for the end. Cancelling that task cancels this future, so the
        end itself is stored in ``end``."""
        self.end: End | None = None
        self.output = output
        self.chars = 0
        """Number of characters printed, as counted by the guest."""
        self.stopped: str | None = None
        """Reason for the interrupt in progress, or None."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """True while the cell waits for the host."""
        return self.end is None and self.stopped is None and bool(self.calls.tasks)

    def copy(
        self,
        pending: dict[int, PendingCall],
        wire: SessionWire,
        on_bug: Callable[[RunningCell], None],
    ) -> RunningCell:
        """Copy the cell for a branch, which was forked while these calls were ``pending``."""
        twin = RunningCell(
            self.id,
            self.code,
            self.calls.answer,
            wire=wire,
            limit_s=self.limit_s,
            output=copy.deepcopy(self.output),
            on_bug=on_bug,
        )
        twin.chars = self.chars
        twin.clock.worked_s = self.clock.worked()
        twin.calls.inherit(self.calls, pending)
        return twin

    def ends(self, end: End) -> None:
        self.calls.end()
        self.end = end
        if not self._changed.done():
            self._changed.set_result(None)

    async def until_done(self) -> End:
        """Wait for the end of the cell."""
        await self._changed
        assert self.end is not None
        return self.end

    async def wait(self, timeout_s: float) -> None:
        """Wait until the cell has ended, also after an earlier wait was cancelled."""
        if self.end is None:
            self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._changed,), timeout=timeout_s)
