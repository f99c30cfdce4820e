"""Tracks the running cell of a session on the host: output, pending calls and working time.

This module defines the states of a session and builds the result of a cell. Each call of a cell to
the host is answered in its own task, and the number of pending calls is limited. While one is
pending, the clock of the cell counts only the CPU time of its other threads. A large answer is
encoded in a thread. The module also defines what a cell receives if an answer fails, and what a
branch inherits that is forked in the middle of a cell.

What the calls do is defined by the function that answers them (``Answer``). Stopping a cell that
does not end is done by ``session.py``.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ramify import step_time_accounting
from ramify.errors import HostCallError, SessionDied
from ramify.sandbox.base import Answer, CellResult, SandboxSpec
from ramify.sandbox.guest.message_frames import HALF_BYTES
from ramify.sandbox.guest.output import HeadTailBuffer
from ramify.sandbox.guest.value_encoding import (
    Buffer,
    ProtocolError,
    ValueEncoder,
    ValueEncodingError,
    encode_text_blobs,
)
from ramify.sandbox.host.session_frame_connection import (
    CellDoneFrame,
    GuestFrameConnection,
    HostCallFrame,
    run_in_codec_pool,
)
from ramify.sandbox.host.transport import do_nothing
from ramify.types.trajectory import Cell

MAX_CALLS = 1024
"""Maximum number of concurrent calls of one cell. Further calls wait in the socket."""
MAX_CALL_BYTES = 256 << 20
"""Maximum size in bytes of the arguments of all pending calls together."""
_MANY_ITEMS, _LONG_TEXT = 2000, 1 << 20


class CellWorkTimer:
    """A clock that measures how long a cell has worked, in seconds.

    While the cell waits for the host, only the CPU time of its other threads counts, if it can be
    measured.
    """

    __slots__ = ("_cpu_s", "_paused", "_since", "worked_s")

    def __init__(self, cpu_s: Callable[[], float] | None = None) -> None:
        """Create a clock that has not been started yet.

        ``cpu_s`` returns the CPU time that the session has used, in seconds, or None if that is
        unknown.
        """
        self.worked_s = 0.0
        """Working time of the cell in seconds, up to the last ``start``, ``pause`` or ``stop``."""
        self._cpu_s = cpu_s
        self._since: float | None = None
        self._paused: tuple[float, float] | None = None
        """(wall time, CPU time) at the last ``pause``, or None if the clock is not paused."""

    def start(self) -> None:
        self.stop()
        step_time_accounting.begin_part("sessions")
        self._since = time.monotonic()

    def pause(self) -> None:
        """Pause the clock while the cell waits for the host.

        Until it is started again, only the CPU time of the cell's other threads counts.
        """
        self.stop()
        if self._cpu_s is not None:
            self._paused = time.monotonic(), self._cpu_s()

    def stop(self) -> None:
        if self._since is not None:
            step_time_accounting.end_part("sessions")
        self.worked_s, self._since, self._paused = self.working_s(), None, None

    def working_s(self) -> float:
        if self._since is not None:
            return self.worked_s + time.monotonic() - self._since
        if self._paused is None or self._cpu_s is None:
            return self.worked_s
        wall_s, cpu_s = time.monotonic() - self._paused[0], self._cpu_s() - self._paused[1]
        return self.worked_s + max(0.0, min(wall_s, cpu_s))


class PendingHostCall(NamedTuple):
    """A call from a cell to the host that has not been answered yet."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    weight: int
    """Estimated memory that the call uses, in bytes."""


class PendingHostCalls:
    """The pending calls of one running cell to the host.

    A separate task answers each of them.
    """

    __slots__ = ("_clock", "_last_id", "_on_bug", "answer", "bug", "pending", "tasks", "wire")

    def __init__(
        self,
        wire: GuestFrameConnection,
        clock: CellWorkTimer,
        answer: Answer,
        on_bug: Callable[[], None],
    ) -> None:
        """Create a registry for the calls that one cell makes to the host.

        ``on_bug`` is called if answering a call raises an unexpected exception, which is then
        stored in ``bug``.
        """
        self.wire = wire
        self._clock = clock
        self._on_bug = on_bug
        self._last_id = 0
        self.answer = answer
        self.bug: BaseException | None = None
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks that are answering calls, by call id."""
        self.pending: dict[int, PendingHostCall] = {}

    def accept_call(
        self, message: HostCallFrame, value: Any, weight: int, stopped: str | None
    ) -> None:
        """Register a new call from the cell and start to answer it.

        If the cell is being stopped, ``stopped`` is the reason and the call is refused. Raises
        ProtocolError for a malformed call.
        """
        if message.id <= self._last_id:
            raise ProtocolError(
                f"call {message.id} arrived out of order, after call {self._last_id}"
            )
        self._last_id = message.id
        match value:
            case [list() as args, dict() as kwargs] if all(isinstance(key, str) for key in kwargs):
                pass
            case _:
                raise ProtocolError("a call without [args, kwargs]")
        if stopped is not None:
            reason = f"the cell is being stopped ({stopped})"
            self._refuse(message.id, HostCallError("Interrupted", reason))
            return
        if not self.tasks:
            self._clock.pause()
        self.pending[message.id] = PendingHostCall(message.name, args, kwargs, weight)
        self.start_answering(message.id)
        if (
            len(self.tasks) >= MAX_CALLS
            or sum(call.weight for call in self.pending.values()) > MAX_CALL_BYTES
        ):
            self.wire.pause_receiving("calls")

    def start_answering(self, id: int) -> None:
        """Start the task that answers a pending call."""
        self.tasks[id] = asyncio.get_running_loop().create_task(self._answer(id, self.pending[id]))

    def inherit(self, other: PendingHostCalls, pending: dict[int, PendingHostCall]) -> None:
        """Take over the cell's pending calls from the session from which this branch was forked."""
        self.pending, self._last_id = pending, other._last_id

    async def _answer(self, id: int, call: PendingHostCall) -> None:
        """Compute the answer to one call of the cell, and send it to the session.

        Every failure becomes an error in the cell, and an unexpected one is also stored in ``bug``.
        """
        # Long texts stay unencoded until it is known whether they fit into the shared buffers.
        encoder = ValueEncoder(defers=self.wire.transport.shared_buffers is not None)
        failure: HostCallError | None = None
        data = None
        try:
            value = await self.answer(call.name, call.args, call.kwargs)
            is_large = _is_large(value)
            data = (
                await run_in_codec_pool(_encode, encoder, value)
                if is_large
                else encoder.encode(value)
            )
        except HostCallError as error:
            failure = error
        except ValueEncodingError as error:
            failure = HostCallError("TypeError", f"{call.name}: {error}")
        except asyncio.CancelledError:  # not raised again, because the cell waits for an answer
            failure = HostCallError("Interrupted", f"{call.name} was cut off")
        except Exception as error:  # noqa: BLE001  (a bug of the host, not of the cell: ``run`` raises it)
            self.bug = error
            failure = HostCallError("HostFailed", f"{call.name} failed in the host")
        if not self._settle(id):
            return
        if failure is not None:
            self._refuse(id, failure)
        else:
            self.wire.send({"op": "ret", "id": id, "value": data}, encoder)
        if self.bug is not None:
            self._on_bug()
        else:
            self.wire.read_at_once()

    def _refuse(self, id: int, error: HostCallError) -> None:
        encoder = ValueEncoder()
        try:
            data = encoder.encode(error.data)
        except ValueEncodingError:
            encoder, data = ValueEncoder(), {}
        header = {"op": "err", "id": id, "kind": error.kind, "message": str(error), "value": data}
        self.wire.send(header, encoder)

    def _settle(self, id: int) -> bool:
        """Remove a call from the pending calls once its answer is ready.

        Returns False if its cell has already ended.
        """
        self.tasks.pop(id, None)
        is_waiting = self.pending.pop(id, None) is not None
        if not self.tasks and is_waiting:
            self._clock.start()
        self.wire.resume_receiving("calls")
        return is_waiting

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    def discard_unanswered(self) -> None:
        """Stop the cell's clock and discard its pending calls, because the cell has ended."""
        self._clock.stop()
        self.pending.clear()

    async def cancel_and_wait(self, timeout_s: float) -> None:
        """Cancel the answers in progress, and wait up to ``timeout_s`` seconds for their tasks."""
        if tasks := list(self.tasks.values()):
            self.cancel()
            await asyncio.wait(tasks, timeout=timeout_s)


def _encode(encoder: ValueEncoder, value: Any) -> Any:
    """Encode a large value as an answer to a call from the sandboxed session.

    If its long strings do not fit into the shared buffers, they are converted to bytes now.
    """
    data = encoder.encode(value)
    if sum(map(len, encoder.blobs)) > HALF_BYTES:  # too long for the shared buffers
        encoder.blobs = encode_text_blobs(encoder.blobs)
    return data


def _is_large(value: Any) -> bool:
    """Return True if encoding a value might take long enough to delay other sessions.

    Only part of the value is inspected.
    """
    stack, left = [value], _MANY_ITEMS
    while stack:
        part = stack.pop()
        if isinstance(part, str | bytes):
            left -= len(part) * _MANY_ITEMS // _LONG_TEXT
        elif isinstance(part, dict | list | tuple | set | frozenset):
            left -= len(part)
            if left >= 0:
                stack += part.values() if isinstance(part, dict) else part
        if left < 0:
            return True
    return False


End = tuple[CellDoneFrame, Any] | SessionDied


class RunningCell:
    """The host's record of a cell that is running, such as its output and its pending calls."""

    __slots__ = (
        "_changed",
        "_max_output_bytes",
        "_output",
        "calls",
        "chars",
        "clock",
        "code",
        "end",
        "id",
        "limit_s",
        "stopped",
        "timer",
    )

    def __init__(
        self,
        id: int,
        code: str,
        answer: Answer,
        *,
        wire: GuestFrameConnection,
        limit_s: float,
        max_output_bytes: int,
        on_bug: Callable[[], None],
    ) -> None:
        """Create the host's record of a cell that has not started yet.

        ``on_bug`` is called if answering a call fails unexpectedly. It must not refer to this cell:
        that would create a reference cycle, and collecting the cycle costs as much as running the
        cell.
        """
        self.id = id
        self.code = code
        self.limit_s = limit_s
        """Limit of working time in seconds, measured by the cell's ``CellWorkTimer``."""
        self.clock = CellWorkTimer(getattr(wire.transport, "cpu_s", None))
        self.calls = PendingHostCalls(wire, self.clock, answer, on_bug)
        self._changed: asyncio.Future[None] | None = None
        """Wakes the task that waits for the end of the cell. The end itself is stored in ``end``,
        because cancelling that task also cancels this future."""
        self.end: End | None = None
        self._max_output_bytes = max_output_bytes
        self._output: HeadTailBuffer | None = None
        """Output so far; None until the cell prints something."""
        self.chars = 0
        """Number of characters printed, as counted by the guest."""
        self.stopped: str | None = None
        """Reason why the cell is being interrupted, or None."""
        self.timer: asyncio.TimerHandle | None = None
        """Timer of the next interrupt."""

    @property
    def remaining_s(self) -> float:
        """The remaining working time in seconds."""
        return self.limit_s - self.clock.working_s()

    @property
    def is_waiting(self) -> bool:
        """True while the cell waits for the host to answer a call."""
        return self.end is None and self.stopped is None and bool(self.calls.tasks)

    def copy(
        self,
        pending: dict[int, PendingHostCall],
        wire: GuestFrameConnection,
        on_bug: Callable[[], None],
    ) -> RunningCell:
        """Copy the record of a running cell for a branch that was forked while the cell ran.

        ``pending`` holds the calls that were unanswered when the branch was forked.
        """
        import copy

        twin = RunningCell(
            self.id,
            self.code,
            self.calls.answer,
            wire=wire,
            limit_s=self.limit_s,
            max_output_bytes=self._max_output_bytes,
            on_bug=on_bug,
        )
        twin._output = copy.deepcopy(self._output)
        twin.chars = self.chars
        twin.clock.worked_s = self.clock.working_s()
        twin.calls.inherit(self.calls, pending)
        return twin

    def append_output(self, data: Buffer, skipped: int, chars: int) -> None:
        """Append printed bytes to the cell's output.

        ``skipped`` is the number of bytes lost just before them. ``chars`` is the number of
        characters printed so far.
        """
        if self._output is None:
            self._output = HeadTailBuffer(self._max_output_bytes)
        self._output.add(data, skipped)
        self.chars = chars

    def stdout(self) -> str:
        """Return the cell's output so far.

        Long output is shortened in the middle.
        """
        return "" if self._output is None else self._output.text(self.chars)

    def mark_ended(self, end: End) -> None:
        self.calls.discard_unanswered()
        self.end = end
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def until_done(self) -> End:
        """Wait until the cell has ended, and return its outcome."""
        if self.end is None:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        assert self.end is not None
        return self.end

    async def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until the cell has ended.

        May be called again after an earlier wait was cancelled.
        """
        if self.end is None:
            self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._changed,), timeout=timeout_s)


class CellTimeoutTimer:
    """A timer that calls a function when a cell has used up its working time.

    It is reused for the next cell, because setting a new timer costs as much as sending the
    messages of a short cell.
    """

    __slots__ = ("_cell", "_loop", "_ring", "_timer")

    def __init__(self, ring: Callable[[RunningCell, str], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._cell: RunningCell | None = None

    def watch(self, cell: RunningCell | None) -> None:
        """Start to watch the working time of ``cell``, or stop watching if it is None.

        Pass None if no cell is running.
        """
        self._cell = cell
        if cell is None:
            return
        due = self._loop.time() + cell.remaining_s
        if self._timer is not None and self._timer.when() > due:
            self.cancel()
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._on_timer_due)

    def _on_timer_due(self) -> None:
        self._timer = None
        if self._cell is not None and self._cell.remaining_s <= 0:
            self._ring(self._cell, "time")
        else:  # the clock was paused for a while, or another cell runs
            self.watch(self._cell)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Cancel the timer, and drop its references so that the session can be freed at once."""
        self.cancel()
        self._cell, self._ring = None, do_nothing


class CellLimits(NamedTuple):
    """The time and output limits of one session, which come from ``SandboxSpec``."""

    cell_s: float
    grace_s: float
    max_output_bytes: int


def limits_of(spec: SandboxSpec) -> CellLimits:
    return CellLimits(spec.cell_s, spec.grace_s, spec.max_output_bytes)


class SessionStatus(enum.Enum):
    """The state of a session, such as idle or busy.

    It decides which requests are allowed next.
    """

    IDLE = "idle"
    BUSY = "busy"
    """A cell or a request is in progress."""
    SUSPENDED = "suspended"
    """A branch that was forked in the middle of a cell. ``resume`` continues that cell."""
    ENDED = "ended"


def result_of(cell: RunningCell, done: CellDoneFrame, note: Any) -> CellResult:
    """Build the result of a cell from the message that reports the end of the cell.

    ``note`` holds what the session's ``after_cell`` hooks returned.
    """
    shown = Cell(
        code=cell.code,
        stdout=cell.stdout(),
        value=done.value,
        error=done.error,
        seconds=cell.clock.worked_s,
        stdout_chars=done.chars,
        restored=tuple(done.restored),
    )
    return CellResult(shown, note, cell.stopped)


class GuestReportedError(Exception):
    """Raised on the host if the code in the sandbox could not fulfil a request.

    ``kind`` is the name of the exception class in the guest.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
