"""The guest's end of the connection: sends complete frames to the host from any thread, and reads
the host's frames.

Decides which part of a frame goes into the shared memory buffers, that frames are never
interleaved, which of the waiting threads reads (one reads for all, and passes the role on when it
has its own frame), and when KeyboardInterrupt may be raised (only while a cell runs, and never with
half a frame sent). Only the session's process may use the channel, not a process that it forked; a
cell may use it only while it runs. Not here: what frames mean, except for a fork request. The
thread that reads it executes it at once, whatever other frames are awaited.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .frames import (
    PREFIX,
    VERSION,
    FrameReader,
    check_blobs,
    check_size,
    frame,
    json_bytes,
    open_frame,
    slice_blobs,
    write_all,
)
from .values import Buffer, ValueDecoder, ValueEncoder, ValueLimitError, encoded

_get_ident = threading.get_ident
_read, _write = os.read, os.write
_raw_decode = json.JSONDecoder().raw_decode
"""Saved before any cell has run."""
_CHUNK = 1 << 16
_PREFIX_BYTES = PREFIX.size


class GuestInterrupts:
    """Interrupts of the thread that created this object. They are delayed between ``enter`` and
    ``leave``."""

    __slots__ = ("_depth", "_main", "_pending", "is_live")

    def __init__(self) -> None:
        self._main = _get_ident()
        self.is_live = False
        """True while a cell runs."""
        self._depth = 0
        self._pending = False

    def may_raise(self) -> bool:
        """Return True if KeyboardInterrupt may be raised now; if it must wait, it is raised
        later."""
        if self.is_live and self._depth:
            self._pending = True
            return False
        return self.is_live

    def enter(self) -> int:
        """Begin a section without interrupts. Returns the depth before it, for ``leave``. Depths
        are set, not counted, so that no interrupt can unbalance them."""
        if _get_ident() != self._main:
            return -1
        before = self._depth
        self._depth = before + 1
        return before

    def leave(self, before: int) -> None:
        if before < 0:
            return
        self._depth = before
        if self._pending and not before:
            self._pending = False
            raise KeyboardInterrupt

    def wait(self, blocking: Callable[[], object]) -> None:
        """Call a function that may block and holds no resources: an interrupt may be raised
        there."""
        if _get_ident() != self._main:
            blocking()
            return
        previous_depth = self._depth
        try:
            self.leave(0)
            blocking()
        finally:
            self._depth = previous_depth

    def reset(self) -> None:
        """Forget the state of a section that was interrupted."""
        self._depth = 0
        self._pending = False


_getpid = os.getpid
"""Saved before any cell has run."""


class GuestChannel:
    """Two descriptors, and the shared memory buffers if host and guest share them."""

    __slots__ = ("_poll", "_reader", "is_open", "pid", "sending", "shared_buffers", "write_fd")

    def __init__(
        self, read_fd: int, write_fd: int, *, takes_fds: bool, shared_buffers: Any
    ) -> None:
        """With ``takes_fds``, the connection is a socket over which the host may send descriptors.
        ``shared_buffers`` is a ``HostGuestSharedMemory`` or None."""
        self._reader = FrameReader(read_fd, _receiver(read_fd) if takes_fds else None)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)
        self.write_fd = write_fd
        self.shared_buffers = shared_buffers
        self.sending = threading.Lock()
        """Held while writing, and while a caller must know what has been written."""
        self.pid = _getpid()
        """The session's process id."""
        self.is_open = False
        """True while a cell runs: its prints and calls go to the host."""

    def is_session_process(self) -> bool:
        """Return True if this process is the session, and not one that a cell has forked."""
        return _getpid() == self.pid

    def descriptors(self) -> set[int]:
        own = {self._reader.fd, self.write_fd}
        return own if self.shared_buffers is None else {*own, self.shared_buffers.fd}

    def renew(self) -> None:
        """Start to read again from the same descriptor numbers, which now lead to a new
        connection."""
        if self.shared_buffers is not None:
            self.shared_buffers = type(self.shared_buffers)(self.shared_buffers.fd, is_host=False)
        self._reader = FrameReader(self._reader.fd, self._reader.receive)

    # -- to the host

    def frame(
        self, header: dict[str, Any], encoder: ValueEncoder | None, blobs: Sequence[Buffer] = ()
    ) -> list[Buffer]:
        """Build the buffers of a frame; long blobs may already be in the shared memory buffers.
        Raises ValueLimitError."""
        if encoder is not None:
            blobs = encoder.blobs
            if encoder.tags:
                header["tags"] = True
            check_blobs(len(blobs))
            if blobs:
                header["blobs"] = [len(blob) for blob in blobs]
        shared_buffers = self.shared_buffers
        if shared_buffers is not None:
            if encoder is not None and blobs and shared_buffers.put(blobs, header["id"]):
                header["shelved"], blobs = True, ()
            elif encoder is not None and encoder.defers:
                blobs = encoded(blobs)
            if shared_buffers.reported != shared_buffers.got:
                header["got"] = shared_buffers.reported = shared_buffers.got
        text = json_bytes(header)
        try:
            check_size(text, blobs)
        except ValueLimitError:
            if shared_buffers is not None:
                shared_buffers.reported = -1  # this frame is not sent: report ``got`` again
            raise
        return frame(text, blobs)

    def frame_of(self, text: bytes) -> list[Buffer]:
        """Build a frame from a header that is already encoded. The header must be within the
        limits."""
        shared_buffers = self.shared_buffers
        if shared_buffers is not None and shared_buffers.reported != shared_buffers.got:
            shared_buffers.reported = shared_buffers.got
            text = b'%b,"got":%d}' % (text[:-1], shared_buffers.got)
        return frame(text)

    def send(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> None:
        parts = self.frame(header, encoder)
        with self.sending:
            write_all(self.write_fd, parts)

    def write(self, parts: list[Buffer]) -> None:
        """Send frames; the caller holds ``sending``."""
        if len(parts) == 1:
            count = _write(self.write_fd, parts[0])
            if count == len(parts[0]):
                return
            parts = [memoryview(parts[0])[count:]]
        write_all(self.write_fd, parts)

    # -- from the host

    def lone(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """Wait for a frame, and return its header and blobs if it is short, contains no blobs and
        is all there is to read. Otherwise return None; ``next`` then continues with what was
        read."""
        reader = self._reader
        if reader.have or reader.receive is not None:
            return None
        self._poll.poll()
        chunk = _read(reader.fd, _CHUNK)
        end = len(chunk)
        if end < _PREFIX_BYTES or PREFIX.unpack_from(chunk) != (end - 4, VERSION, end - 9):
            reader.data += chunk
            reader.have = end
            return None
        return self._opened(chunk[_PREFIX_BYTES:].decode(), memoryview(chunk)[4:], end - 4)

    def next(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """Return the next header and its blobs, or None if more must be read first."""
        view = self._reader.next()
        if view is None:
            return None
        text, end = open_frame(view)
        return self._opened(str(text, "utf-8"), view, end)

    def _opened(
        self, text: str, view: memoryview, end: int
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Decode a frame's header and find its blobs. They are in the shared memory buffers, or in
        the frame itself from offset ``end``."""
        header: dict[str, Any] = _raw_decode(text)[0]
        blobs: list[memoryview] = []
        if "blobs" in header:
            blobs = (
                self.shared_buffers.take(header["blobs"])
                if "shelved" in header
                else slice_blobs(view, end, header["blobs"])
            )
        if self.shared_buffers is not None:
            self._note_read(header["op"], header["id"])
        return header, blobs

    def _note_read(self, op: str, id: int) -> None:
        """Mark the shared buffers as free once the host has read them: when it answers the call, or
        sends its next request. A fork can be requested at any time, so it says nothing."""
        if op != "fork" and (op not in ("ret", "err") or id == self.shared_buffers.key):
            self.shared_buffers.is_free = True

    def value_of(self, header: dict[str, Any], blobs: list[memoryview]) -> Any:
        return (
            ValueDecoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        )

    def take_fds(self) -> list[int]:
        """Return the descriptors that were received; the caller owns them."""
        fds, self._reader.fds = self._reader.fds, []
        return fds

    def has_part(self) -> bool:
        """Return True if the beginning of a frame was read."""
        return self._reader.have > 0

    def poll(self) -> None:
        """Wait until there is something to read."""
        self._poll.poll()

    def fill(self) -> None:
        """Read more data from the stream, with one system call. Raises EOFError at the end of the
        stream."""
        self._reader.fill()


def _receiver(fd: int) -> Any:
    """Return ``recvmsg`` of the socket ``fd``, which stays open as long as the process."""
    import socket

    end = socket.socket(fileno=fd)
    return end.recvmsg


DROPPED: Any = object()
"""Marks a ticket whose frame will never arrive."""


class FrameWaiter:
    """A thread that waits for a frame. ``wake`` is released when the frame has arrived, or when it
    is this thread's turn to read."""

    __slots__ = ("frame", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.frame: Any = None
        """Header and blobs."""

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            self.wake.release()


class FrameDispatcher:
    """All threads that wait for a frame: callers of the host, each for its answer, and the thread
    that handles the host's requests."""

    __slots__ = (
        "_calls",
        "_channel",
        "_command",
        "_ends_process",
        "_fork",
        "_interrupts",
        "_leading",
    )

    def __init__(
        self,
        channel: GuestChannel,
        interrupts: GuestInterrupts,
        fork: Callable[[int], None],
        *,
        ends_process: bool,
    ) -> None:
        """``fork`` is called with the id of a fork request. With ``ends_process``, the process ends
        when the stream ends."""
        self._channel = channel
        self._interrupts = interrupts
        self._fork = fork
        self._ends_process = ends_process
        self._leading = threading.Lock()
        self._command = FrameWaiter()
        self._calls: dict[int, FrameWaiter] = {}

    def next_command(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the host's next request. Raises EOFError or OSError at the end of the stream."""
        if not self._calls and self._leading.acquire(blocking=False):
            try:
                message = self._channel.lone()
            finally:
                self._leading.release()
            if message is not None:
                if message[0]["op"] not in ("fork", "ret", "err"):
                    return message
                self._dispatch(*message, self._command)
        self.wait(self._command)
        command: tuple[dict[str, Any], list[memoryview]] = self._command.frame
        self._command.frame = None
        return command

    def expect(self, id: int, ticket: FrameWaiter) -> None:
        """Register ``ticket`` for the answer to call ``id``, which is about to be sent."""
        self._calls[id] = ticket

    def forget(self, ticket: FrameWaiter) -> None:
        """Unregister a thread that has stopped waiting for a frame. If it was interrupted before
        its frame arrived, another waiting thread takes over reading."""
        if ticket.frame is None:  # interrupted
            for id, other in list(self._calls.items()):
                if other is ticket:
                    self._calls.pop(id, None)
            self._pass_on()

    def drop_calls(self) -> None:
        """Release all waiting callers: they will get no answer."""
        for ticket in list(self._calls.values()):
            ticket.frame = DROPPED
            ticket.rouse()
        self._calls.clear()

    def wait(self, ticket: FrameWaiter) -> None:
        """Wait until ``ticket`` has its frame."""
        while ticket.frame is None:
            if not self._leading.acquire(blocking=False):
                self._interrupts.wait(ticket.wake.acquire)
                continue
            try:
                while ticket.frame is None:
                    self._read_step(ticket)
            finally:
                self._leading.release()
                self._pass_on()

    def _read_step(self, own_ticket: FrameWaiter) -> None:
        message = self._channel.next()
        if message is not None:
            self._dispatch(*message, own_ticket)
            return
        # A blocked ``read`` would also wake up whenever the host reads what was sent.
        if not self._channel.has_part():
            self._interrupts.wait(self._channel.poll)
        try:
            self._channel.fill()
        except (EOFError, OSError):
            if self._ends_process:
                os._exit(0)  # the host is gone
            raise

    def _dispatch(
        self, header: dict[str, Any], blobs: list[memoryview], own_ticket: FrameWaiter
    ) -> None:
        if header["op"] == "fork":
            self._fork(header["id"])
            return
        ticket: FrameWaiter | None = self._command
        if header["op"] in ("ret", "err"):
            ticket = self._calls.pop(header["id"], None)  # None: its caller was interrupted
        if ticket is not None:
            ticket.frame = (header, blobs)
            if ticket is not own_ticket:
                ticket.rouse()

    def _pass_on(self) -> None:
        """Let another waiting thread read the stream."""
        for ticket in [*self._calls.values(), self._command]:
            if ticket.frame is None:
                ticket.rouse()
                return
