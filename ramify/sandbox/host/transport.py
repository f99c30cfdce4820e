"""The transport between the host and a guest, the code that runs in the sandbox.

It is a byte stream with operations on the guest's process.

This module moves bytes between a socket and the event loop at the lowest cost, and finds where a
message ("frame") ends. What the bytes mean is decided by ``session.py``, and what is at the other
end by each provider.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import mmap
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxCapabilities
from ramify.sandbox.guest.busy_wait import AdaptiveBusyWait
from ramify.sandbox.guest.message_frames import MAX_FRAME, HostGuestSharedMemory, ReusableBuffer
from ramify.sandbox.guest.value_encoding import ProtocolError


class GuestTransport(Protocol):
    """A connection to one guest, the code that runs in a sandbox.

    All methods are called on the thread of the event loop and return at once.
    """

    caps: SandboxCapabilities
    shared_buffers: HostGuestSharedMemory | None
    """Buffers for long blobs, if host and guest are on the same machine."""

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        """Start reading the bytes that the sandboxed session sends.

        ``received`` is called with the bytes that arrive, and must not keep them. ``lost`` is
        called at the end of the stream.
        """
        ...

    def write(self, data: list[Any]) -> None:
        """Send the contents of several buffers to the sandboxed session, in order.

        Data that the other end does not read at once is kept and sent later.
        """
        ...

    def pause(self) -> None:
        """Stop reading from the sandboxed session until ``resume`` is called."""
        ...

    def resume(self) -> None: ...

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the guest's main thread if a cell is running there.

        Does nothing if the transport does not support interrupts.
        """
        ...

    def kill(self) -> None:
        """Kill the guest, if the transport supports this.

        The callback ``lost`` is called as soon as the stream has ended.
        """
        ...

    def unsent_output(self, start: int) -> bytes:
        """Return the output that an ended session printed but did not send, if it can be read.

        ``start`` is the offset in the guest's output file.
        """
        ...

    async def exit_reason(self) -> str:
        """Return the reason why the guest ended, if it is known.

        Waits briefly for the exit status.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """End the guest.

        Calling this twice is harmless. Returns an awaitable if the caller must wait until the
        process is gone, otherwise None.
        """
        ...


_MEANT = {70: "its process could not be set up", 71: "it got no new connection after a fork"}
"""Exit statuses of this package's own processes, and what they mean."""


def how_it_ended(status: int) -> str:
    """Describe in words how a process ended.

    ``status`` is its exit status as ``subprocess`` reports it.
    """
    if status >= 0:
        return _MEANT.get(status, f"its process exited with status {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"its process was killed by signal {-status} ({name})"


class ForkingTransport(GuestTransport, Protocol):
    """A transport to a guest whose process can be forked.

    The session then continues as two processes.
    """

    async def prepare_branch(self) -> None:
        """Prepare a session so that it can be forked with ``fork_branch``.

        Raises SandboxError if the session cannot be forked.
        """
        ...

    def fork_branch(self, frame: list[Any], moved: Callable[[], None]) -> GuestTransport:
        """Ask the session to fork once, and return the connection to the new branch.

        ``moved`` is called if the fork also gives the original session a new stream and new files.
        """
        ...

    def check_memory_isolated(self) -> None:
        """Raise SandboxError if a session and its new branch still share memory."""
        ...

    def finish_forking(self, transport: Any) -> None:
        """Finish a fork, and revoke the session's permission to create a process.

        Call this once the branch has started, or certainly will not start.
        """
        ...


# More than the default buffer of a Unix socket (208 KiB), so one read usually takes everything.
SCRATCH_BYTES = 1 << 18
_MOST_READS = 16
"""Maximum number of consecutive reads of a socket. This is more than enough to read all data that
its buffer can hold."""
MAX_UNSENT_BYTES = 64 << 20
"""Limit on bytes waiting to be sent. Above it, the host stops reading from the guest."""


def do_nothing(*_: Any) -> None:
    """Do nothing, in place of the callbacks of a session or stream that has been closed.

    Used as the callback for data that still arrives for a closed session or stream.

    Replacing the original callbacks with this function avoids a cycle of references. Only the
    garbage collector could free such a cycle, and it would stop the event loop while it searches
    the whole host.
    """


class SandboxConnectionState:
    """Buffers and background tasks that all connections of one sandbox share.

    Data in a read buffer is valid only until the next read. Each task waits until a killed process
    has ended.
    """

    __slots__ = ("busy_wait", "endings", "last_used", "num_expected", "shared_buffers", "stream")

    def __init__(self) -> None:
        self.busy_wait = AdaptiveBusyWait()
        self.endings: set[asyncio.Task[None]] = set()
        self.last_used: SocketStream | None = None
        """The connection that was used last, for reading or writing."""
        self.num_expected = 0
        """Number of connections that wait for an answer."""
        # Not a bytearray, whose pages would all be in memory before any is used.
        self.stream = mmap.mmap(-1, SCRATCH_BYTES, access=mmap.ACCESS_COPY)
        self.shared_buffers = ReusableBuffer()


class MessageFrameAssembler:
    """An assembler that turns bytes from a guest into complete frames.

    Each frame is a view that is valid until the next ``feed``. If the caller stops iterating early,
    the remaining data is kept.
    """

    __slots__ = ("_held", "_max_bytes", "_need")

    def __init__(self, max_bytes: int = MAX_FRAME) -> None:
        """Create an assembler that accepts frames of up to ``max_bytes`` bytes."""
        self._max_bytes = max_bytes
        self._held: bytearray | None = None
        self._need = 0

    def is_single_frame(self, data: memoryview) -> bool:
        """Return True if ``data`` is exactly one complete frame and no earlier bytes are
        waiting."""
        # The length takes 4 bytes, the version 1, and the length of the header 4.
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

    def hold_until_feed(self, data: memoryview) -> None:
        """Keep received bytes without processing them until the next call of ``feed``."""
        if self._held is None:
            self._held, self._need = bytearray(), 0
        self._held += data

    def held_bytes(self) -> int:
        """Return how many of the received bytes belong to incomplete frames."""
        return len(self._held) if self._held is not None else 0


_MOST_AT_ONCE = 16
"""Maximum number of consecutive answers that are read outside the event loop, so that other streams
wait for at most 1 ms."""


class SocketStream:
    """A byte stream over a socket on the event loop.

    It bypasses asyncio's transports, which saves two callbacks per round trip. A quick answer is
    read at once, without returning to the event loop.
    """

    __slots__ = (
        "_backlog",
        "_in_a_row",
        "_is_expected",
        "_is_paused",
        "_is_quick",
        "_loop",
        "_lost",
        "_received",
        "_scratch",
        "_shared",
        "_sock",
        "_unsent",
        "_view",
    )

    def __init__(self, sock: socket.socket, shared: SandboxConnectionState) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._shared = shared
        self._scratch = shared.stream
        """Read buffer shared by all streams of an event loop, since ``received`` does not keep its
        data."""
        self._view = memoryview(self._scratch)
        self._is_expected = False
        """True from a ``write`` until data arrives."""
        self._is_quick = False
        """True if the answer to the last ``write`` may be read at once, without returning to the
        event loop."""
        self._in_a_row = 0
        self._backlog: deque[memoryview] | None = None
        self._unsent = 0
        """Number of bytes that wait to be sent."""
        self._is_paused = False

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        self._received = received
        self._lost = lost
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        self._in_a_row = 0
        self._read()

    def is_only_active(self) -> bool:
        """Return True if this was the last connection in use and no other one awaits an answer."""
        # Of many sessions in turn, one may be asked when all others have answered: it is not alone.
        shared = self._shared
        return shared.last_used is self and shared.num_expected == self._is_expected

    def busy_wait_for_answer(self) -> None:
        """Wait very briefly for the session's answer, and read it if it arrives.

        This waits for about the time of one iteration of the event loop, without returning to it.
        Do nothing if other streams are in use, because the loop then serves all of them sooner.
        """
        if not self._is_quick or not self._is_expected or self._is_paused:
            return
        if self._backlog is None and self._in_a_row < _MOST_AT_ONCE:
            self._in_a_row += 1
            self._shared.busy_wait.until(self._read)

    def _read(self) -> bool:
        """Read the bytes that have arrived from the sandboxed session, without blocking.

        Returns False if there is none.
        """
        try:
            count = self._sock.recv_into(self._scratch)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0
        self._shared.last_used = self
        if self._is_expected:
            self._is_expected = False
            self._shared.num_expected -= 1
        if count:
            self._received(self._view[:count])
        else:
            self.pause()
            self._lost()
        return True

    def pause(self) -> None:
        self._is_paused = True
        self._update_reading()

    def resume(self) -> None:
        self._is_paused = False
        self._update_reading()

    def _update_reading(self) -> None:
        """Pause or resume reading from a session, depending on whether it reads what it was sent.

        A guest that sends requests without reading the answers must not fill the host's memory.
        """
        fd = self._sock.fileno()
        if fd < 0:
            return
        if self._is_paused or self._unsent > MAX_UNSENT_BYTES:
            self._loop.remove_reader(fd)
        else:
            self._loop.add_reader(fd, self._on_readable)

    def read_available(self) -> None:
        """Read the bytes that have already arrived on the socket, without waiting for more."""
        with contextlib.suppress(OSError):
            for _ in range(_MOST_READS):
                count = self._sock.recv_into(self._scratch)
                if not count:
                    break
                self._received(self._view[:count])

    def move_to_socket(self, sock: socket.socket) -> SocketStream:
        """Close this stream, and return a stream over ``sock`` that calls the same callbacks."""
        self.close()
        stream = SocketStream(sock, self._shared)
        stream.start_reading(self._received, self._lost)
        return stream

    def report_loss(self) -> None:
        """Report that the connection to the other end has been lost."""
        self._lost()

    def send_with_descriptors(self, data: list[Any], fds: Sequence[int]) -> None:
        """Send buffers together with file descriptors in a single message.

        Raises SandboxError if the socket does not accept all bytes at once.
        """
        count = -1
        if self._backlog is None:
            with contextlib.suppress(OSError):
                count = self._sock.sendmsg(
                    data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                )
        if count != sum(map(len, data)):
            raise SandboxError("the session has stopped reading its input")

    def write(self, data: list[Any]) -> None:
        """Send several buffers over the socket without blocking.

        What the socket does not accept at once is sent later. If the connection is lost, nothing is
        sent, and reading reports the loss.
        """
        # Before the next line, after which this connection always is the one used last.
        self._is_quick = self.is_only_active()
        self._shared.last_used = self
        if not self._is_expected:
            self._is_expected = True
            self._shared.num_expected += 1
        if self._backlog is not None:
            self._queue(self._backlog, [memoryview(part) for part in data])
            return
        try:
            # The system limits the number of buffers. Further ones are queued like an unsent rest.
            count = self._sock.send(data[0]) if len(data) == 1 else self._sock.sendmsg(data[:64])
        except (BlockingIOError, InterruptedError):
            count = 0
        except OSError:
            return  # the reader will see the end of the stream
        if count < sum(map(len, data)):
            remaining = self._drop_sent_bytes(deque(memoryview(part) for part in data), count)
            self._backlog = deque()
            self._queue(self._backlog, remaining)
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _queue(self, backlog: deque[memoryview], parts: Iterable[memoryview]) -> None:
        unsent_before = self._unsent
        for part in parts:
            backlog.append(part)
            self._unsent += len(part)
        if unsent_before <= MAX_UNSENT_BYTES < self._unsent:
            self._update_reading()

    @staticmethod
    def _drop_sent_bytes(parts: deque[memoryview], count: int) -> deque[memoryview]:
        while parts and count >= len(parts[0]):
            count -= len(parts.popleft())
        if count:
            parts[0] = parts[0][count:]
        return parts

    def _on_writable(self) -> None:
        backlog = self._backlog
        assert backlog is not None
        unsent_before = self._unsent
        try:
            count = self._sock.send(backlog[0])
            self._drop_sent_bytes(backlog, count)
            self._unsent -= count
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            backlog.clear()
            self._unsent = 0
        if self._unsent <= MAX_UNSENT_BYTES < unsent_before:
            self._update_reading()
        if not backlog:
            self._backlog = None
            self._loop.remove_writer(self._sock.fileno())

    def close_without_callback(self) -> None:
        """Close the stream for good, without calling ``lost`` to report the end of the connection.

        Data still in transit is ignored.
        """
        self.close()
        self._received = self._lost = do_nothing

    def close(self) -> None:
        self._shared.num_expected -= self._is_expected
        self._is_expected = False
        if self._shared.last_used is self:
            self._shared.last_used = None
        fd = self._sock.fileno()
        if fd >= 0:
            # By number: asyncio describes a socket that it does not find, with four system calls.
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            with contextlib.suppress(OSError):
                self._sock.close()
