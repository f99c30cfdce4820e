"""The calls of a running cell to the host: one task for each, while the cell's clock pauses.

Decides how many calls may be pending, that a large answer is encoded in a thread, and what a cell
receives if an answer fails. Not here: what the calls do (``Answer``), and the cell's end (see
``session.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from ramify.errors import HostCallError
from ramify.sandbox import host_frames
from ramify.sandbox.base import Answer
from ramify.sandbox.guest.values import CodecError, ProtocolError, ValueEncoder, encoded
from ramify.sandbox.session_wire import SessionWire, in_thread
from ramify.sandbox.shared_buffers import HALF_BYTES

MAX_CALLS = 1024
"""Concurrent calls of one cell; beyond this limit its frames wait in the socket."""
MAX_CALL_BYTES = 256 << 20
"""Maximum size of the arguments of all pending calls together."""
_MANY_ITEMS, _LONG_TEXT = 2000, 1 << 20


class CellClock:
    """The time that a cell has worked, in seconds; time in which it waits for the host does not
    count."""

    __slots__ = ("_since", "worked_s")

    def __init__(self) -> None:
        self.worked_s = 0.0
        """The time up to the last ``stop``."""
        self._since: float | None = None

    def start(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def stop(self) -> None:
        self.worked_s, self._since = self.worked(), None

    def worked(self) -> float:
        if self._since is None:
            return self.worked_s
        return self.worked_s + asyncio.get_running_loop().time() - self._since


class PendingCall(NamedTuple):
    """A call that is not answered yet."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    weight: int
    """Estimate of the memory that it uses, in bytes."""


class CellCalls:
    """The pending calls of one cell."""

    __slots__ = ("_clock", "_last_id", "_on_bug", "answer", "bug", "pending", "tasks", "wire")

    def __init__(
        self, wire: SessionWire, clock: CellClock, answer: Answer, on_bug: Callable[[], None]
    ) -> None:
        """``on_bug``: called if ``answer`` fails unexpectedly; ``bug`` is its exception."""
        self.wire = wire
        self._clock = clock
        self._on_bug = on_bug
        self._last_id = 0
        self.answer = answer
        self.bug: BaseException | None = None
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Answers in progress, by call id."""
        self.pending: dict[int, PendingCall] = {}

    def take(
        self, message: host_frames.HostCallFrame, value: Any, weight: int, stopped: str | None
    ) -> None:
        """Answer a call. ``stopped``: why the cell is being stopped. Raises ProtocolError."""
        if message.id <= self._last_id:
            raise ProtocolError(f"call {message.id} after call {self._last_id}")
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
            self._clock.stop()
        self.pending[message.id] = PendingCall(message.name, args, kwargs, weight)
        self.begin(message.id)
        if (
            len(self.tasks) >= MAX_CALLS
            or sum(call.weight for call in self.pending.values()) > MAX_CALL_BYTES
        ):
            self.wire.hold("calls")

    def begin(self, id: int) -> None:
        """Start to answer a pending call."""
        self.tasks[id] = asyncio.get_running_loop().create_task(self._answer(id, self.pending[id]))

    def inherit(self, other: CellCalls, pending: dict[int, PendingCall]) -> None:
        """Continue with calls of ``other`` that were pending."""
        self.pending, self._last_id = pending, other._last_id

    async def _answer(self, id: int, call: PendingCall) -> None:
        encoder = ValueEncoder(defers=self.wire.transport.shared_buffers is not None)
        failure: HostCallError | None = None
        data = None
        try:
            value = await self.answer(call.name, call.args, call.kwargs)
            is_large = _is_large(value)
            data = await in_thread(_encode, encoder, value) if is_large else encoder.encode(value)
        except HostCallError as error:
            failure = error
        except CodecError as error:
            failure = HostCallError("TypeError", f"{call.name}: {error}")
        except asyncio.CancelledError:
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

    def _refuse(self, id: int, error: HostCallError) -> None:
        encoder = ValueEncoder()
        try:
            data = encoder.encode(error.data)
        except CodecError:
            encoder, data = ValueEncoder(), {}
        header = {"op": "err", "id": id, "kind": error.kind, "message": str(error), "value": data}
        self.wire.send(header, encoder)

    def _settle(self, id: int) -> bool:
        """Remove a call that was answered. Returns False if its cell has ended."""
        self.tasks.pop(id, None)
        is_waiting = self.pending.pop(id, None) is not None
        if not self.tasks and is_waiting:
            self._clock.start()
        self.wire.release("calls")
        return is_waiting

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    def end(self) -> None:
        """Forget the pending calls: their cell has ended."""
        self._clock.stop()
        self.pending.clear()

    async def wait(self, timeout_s: float) -> None:
        """Cancel the answers that are still in progress, and wait for them."""
        if tasks := list(self.tasks.values()):
            self.cancel()
            await asyncio.wait(tasks, timeout=timeout_s)


def _encode(encoder: ValueEncoder, value: Any) -> Any:
    """Encode a large value, with its long strings."""
    data = encoder.encode(value)
    if sum(map(len, encoder.blobs)) > HALF_BYTES:  # too long for the shared buffers
        encoder.blobs = encoded(encoder.blobs)
    return data


def _is_large(value: Any) -> bool:
    """Return True if encoding ``value`` may delay other sessions. Looks at part of it only."""
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
