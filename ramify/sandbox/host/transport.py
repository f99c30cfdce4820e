"""The transport between host and guest: a stream of bytes to one guest, and operations on its
process.

Decides how bytes move between a socket and the event loop at the lowest cost, and where a frame
ends. Not here: what the bytes mean (see ``session.py``) and what is at the other end (see each
provider).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxCapabilities
from ramify.sandbox.guest.frames import MAX_FRAME, HostGuestSharedMemory, ScratchBuffer
from ramify.sandbox.guest.values import ProtocolError


class Transport(Protocol):
    """Connection to one guest. All methods are called on the event loop's thread and return at
    once."""

    caps: SandboxCapabilities
    shared_buffers: HostGuestSharedMemory | None
    """Buffers for long blobs, if host and guest are on one machine."""

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        """Start reading: pass bytes to ``received``, which must not keep them, and call ``lost`` at
        the end of the stream."""
        ...

    def write(self, data: list[Any]) -> None:
        """Send buffers in order; some are sent later if the other end does not read."""
        ...

    def pause(self) -> None:
        """Stop reading until ``resume``."""
        ...

    def resume(self) -> None: ...

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the guest's main thread, if a cell is running and the
        transport supports this."""
        ...

    def kill(self) -> None:
        """End the guest, if the transport supports this; ``lost`` follows."""
        ...

    def leftover(self, start: int) -> bytes:
        """Return output that a dead guest printed but did not send, if the transport can read it:
        the guest's output file from ``start``."""
        ...

    async def exit_reason(self) -> str:
        """Reason why the guest ended, if known; waits briefly for the exit status."""
        ...

    def close(self) -> Awaitable[None] | None:
        """End the guest. Idempotent. Its process may take a moment to disappear. Returns what its
        caller must wait for, if there is anything."""
        ...


_MEANT = {70: "its process could not be set up", 71: "it got no new connection after a fork"}
"""Exit statuses that this package uses."""


def how_it_ended(status: int) -> str:
    """Describe an exit status (as ``subprocess`` gives it) in words."""
    if status >= 0:
        return _MEANT.get(status, f"its process exited with status {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"its process was killed by signal {-status} ({name})"


class ForkingTransport(Transport, Protocol):
    """A transport whose guest can fork into two processes."""

    async def prepare_branch(self) -> None:
        """Finish everything that must be done before ``begin_branch``. Raises SandboxError."""
        ...

    def begin_branch(self, frame: list[Any], moved: Callable[[], None]) -> Transport:
        """Send ``frame``, allow one process to be created, and return the transport to the branch.
        ``moved`` is called if the session itself gets a new stream and new files."""
        ...

    def check_apart(self) -> None:
        """Raise SandboxError if the session and its branch share memory."""
        ...

    def end_branch(self, transport: Any) -> None:
        """End the fork: the branch behind ``transport`` has started or will not start. No more
        processes may be created."""
        ...


SCRATCH_BYTES = 1 << 18
_MOST_READS = 16
"""More reads than a socket can hold data for."""
MAX_UNSENT_BYTES = 64 << 20
"""Maximum number of bytes waiting to be sent to a guest; beyond it, the host stops reading from the
guest until the guest has read."""


def ignored(*_: Any) -> None:
    """Do nothing with what still arrives for a closed session or stream.

    This function takes the place of their callbacks. So no cycle of references is left for the
    garbage collector, which would stop the event loop while it searches the whole host.
    """


class ReadBuffers:
    """What all transports of one sandbox share: read buffers, whose data is only valid until the
    next read, and the tasks that wait for processes that were killed."""

    __slots__ = ("endings", "shared_buffers", "stream")

    def __init__(self) -> None:
        self.endings: set[asyncio.Task[None]] = set()
        self.stream = bytearray(SCRATCH_BYTES)
        self.shared_buffers = ScratchBuffer()


class FrameAssembler:
    """Turns bytes from a guest into complete frames: views that are valid until the next ``feed``.
    If the caller stops early, the rest is kept."""

    __slots__ = ("_held", "_max_bytes", "_need")

    def __init__(self, max_bytes: int = MAX_FRAME) -> None:
        """``max_bytes`` is the maximum size of a frame."""
        self._max_bytes = max_bytes
        self._held: bytearray | None = None
        self._need = 0

    def is_one(self, data: memoryview) -> bool:
        """Return True if ``data`` is exactly one frame, and nothing was read before."""
        size = len(data)
        return self._held is None and size >= 9 and int.from_bytes(data[:4], "little") == size - 4

    def feed(self, data: memoryview) -> Generator[memoryview, None, None]:
        if self._held is not None:
            self._held += data
            if len(self._held) < self._need:
                return
            data, self._held = memoryview(self._held), None
        at, end = 0, len(data)
        self._need = 4
        try:
            while end - at >= 4:
                size = int.from_bytes(data[at : at + 4], "little")
                if not 5 <= size <= self._max_bytes:
                    raise ProtocolError(
                        f"a frame of {size:,} bytes, where 5 to {self._max_bytes:,} are allowed"
                    )
                if end - at < 4 + size:
                    self._need = 4 + size
                    return
                at += 4 + size
                yield data[at - size : at]
        finally:
            if at < end:
                self._held = bytearray(data[at:])

    def keep(self, data: memoryview) -> None:
        """Keep ``data`` for the next ``feed``."""
        if self._held is None:
            self._held, self._need = bytearray(), 0
        self._held += data

    def held_bytes(self) -> int:
        """Return the size of the unfinished frames."""
        return len(self._held) if self._held is not None else 0


class SocketStream:
    """Byte stream over a socket, without an asyncio transport: this saves two callbacks per round
    trip."""

    __slots__ = (
        "_backlog",
        "_is_paused",
        "_loop",
        "_lost",
        "_received",
        "_scratch",
        "_sock",
        "_unsent",
        "_view",
    )

    def __init__(self, sock: socket.socket, scratch: bytearray) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._scratch = scratch
        """Shared by all streams of an event loop, since ``received`` does not keep its data."""
        self._view = memoryview(scratch)
        self._backlog: deque[memoryview] | None = None
        self._unsent = 0
        """Number of bytes in the backlog."""
        self._is_paused = False

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        self._received = received
        self._lost = lost
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            count = self._sock.recv_into(self._scratch)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count:
            self._received(self._view[:count])
        else:
            self.pause()
            self._lost()

    def pause(self) -> None:
        self._is_paused = True
        self._listen()

    def resume(self) -> None:
        self._is_paused = False
        self._listen()

    def _listen(self) -> None:
        """Start or stop reading: a guest that sends requests but does not read the answers must not
        fill the host's memory with them."""
        fd = self._sock.fileno()
        if fd < 0:
            return
        if self._is_paused or self._unsent > MAX_UNSENT_BYTES:
            self._loop.remove_reader(fd)
        else:
            self._loop.add_reader(fd, self._readable)

    def drain(self) -> None:
        """Read what has already arrived, and no more."""
        with contextlib.suppress(OSError):
            for _ in range(_MOST_READS):
                count = self._sock.recv_into(self._scratch)
                if not count:
                    break
                self._received(self._view[:count])

    def successor(self, sock: socket.socket) -> SocketStream:
        """Close this stream and return the stream over ``sock`` that replaces it."""
        self.close()
        stream = SocketStream(sock, self._scratch)
        stream.start_reading(self._received, self._lost)
        return stream

    def lose(self) -> None:
        """Report the end of the stream: the other end is gone."""
        self._lost()

    def write_with(self, data: list[Any], fds: Sequence[int]) -> None:
        """Send buffers and file descriptors in one message. Raises SandboxError if not all bytes
        fit."""
        count = -1
        if self._backlog is None:
            with contextlib.suppress(OSError):
                count = self._sock.sendmsg(
                    data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                )
        if count != sum(map(len, data)):
            raise SandboxError("the session does not read what it is sent")

    def write(self, data: list[Any]) -> None:
        if self._backlog is not None:
            self._queue(self._backlog, [memoryview(part) for part in data])
            return
        try:
            count = self._sock.send(data[0]) if len(data) == 1 else self._sock.sendmsg(data[:64])
        except (BlockingIOError, InterruptedError):
            count = 0
        except OSError:
            return  # the reader will see the end of the stream
        if count < sum(map(len, data)):
            remaining = self._after(deque(memoryview(part) for part in data), count)
            self._backlog = deque()
            self._queue(self._backlog, remaining)
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _queue(self, backlog: deque[memoryview], parts: Iterable[memoryview]) -> None:
        unsent_before = self._unsent
        for part in parts:
            backlog.append(part)
            self._unsent += len(part)
        if unsent_before <= MAX_UNSENT_BYTES < self._unsent:
            self._listen()

    @staticmethod
    def _after(parts: deque[memoryview], count: int) -> deque[memoryview]:
        while parts and count >= len(parts[0]):
            count -= len(parts.popleft())
        if count:
            parts[0] = parts[0][count:]
        return parts

    def _writable(self) -> None:
        backlog = self._backlog
        assert backlog is not None
        unsent_before = self._unsent
        try:
            count = self._sock.send(backlog[0])
            self._after(backlog, count)
            self._unsent -= count
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            backlog.clear()
            self._unsent = 0
        if self._unsent <= MAX_UNSENT_BYTES < unsent_before:
            self._listen()
        if not backlog:
            self._backlog = None
            self._loop.remove_writer(self._sock.fileno())

    def end(self) -> None:
        """Close the stream for good; what is still on its way is ignored."""
        self.close()
        self._received = self._lost = ignored

    def close(self) -> None:
        # By number: asyncio describes a socket that it does not find, with four system calls.
        fd = self._sock.fileno()
        if fd >= 0:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            with contextlib.suppress(OSError):
                self._sock.close()
