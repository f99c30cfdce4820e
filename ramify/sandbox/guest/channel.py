"""The guest's end of the connection to the host.

It sends complete messages ("frames") from any thread of the session, and reads the frames that the
host sends.

The module sends long data through shared memory, and never interleaves two frames. One of the
waiting threads reads for all of them, and passes this role on when it has its own frame.
KeyboardInterrupt is raised only while a cell runs, and never with half a frame sent. Only the
session's process may use the channel, not a process that it forked; a cell may use it only while it
runs. What a frame means is decided elsewhere, except for a request to fork: the thread that reads
it executes it at once, whatever other frames are awaited.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .busy_wait import AdaptiveBusyWait
from .message_frames import (
    PREFIX,
    VERSION,
    MessageFrameReader,
    check_blob_count,
    check_size,
    frame,
    json_bytes,
    slice_blobs,
    split_frame,
    write_all,
)
from .value_encoding import Buffer, ValueDecoder, ValueEncoder, ValueLimitError, encode_text_blobs

_get_ident = threading.get_ident
_read, _write = os.read, os.write
_raw_decode = json.JSONDecoder().raw_decode
"""The JSON parsing function, saved before any cell runs so that a cell cannot replace it."""
_CHUNK = 1 << 16
_PREFIX_BYTES = PREFIX.size


class DeferrableInterrupts:
    """A handler of interrupts (SIGINT) that can defer them until it is safe to raise them.

    An interrupt that arrives between ``begin_deferring`` and ``end_deferring`` is raised only at
    ``end_deferring``. The handler belongs to the thread that created it.
    """

    __slots__ = ("_depth", "_main", "_pending", "is_live")

    def __init__(self) -> None:
        self._main = _get_ident()
        self.is_live = False
        """True while a cell runs."""
        self._depth = 0
        self._pending = False

    def may_raise(self) -> bool:
        """Return True if KeyboardInterrupt may be raised now.

        If not, and a cell is running, remember the interrupt so that it is raised later.
        """
        if self.is_live and self._depth:
            self._pending = True
            return False
        return self.is_live

    def begin_deferring(self) -> int:
        """Start to defer interrupts, and return the nesting depth from before this call.

        Pass that depth to ``end_deferring``. Restoring a depth, instead of counting down, keeps the
        sections balanced even if an interrupt cuts one short.
        """
        if _get_ident() != self._main:
            return -1
        before = self._depth
        self._depth = before + 1
        return before

    def end_deferring(self, before: int) -> None:
        if before < 0:
            return
        self._depth = before
        if self._pending and not before:
            self._pending = False
            raise KeyboardInterrupt

    def call_interruptibly(self, blocking: Callable[[], object]) -> None:
        """Call a function that may block for a long time, and let an interrupt end it.

        The function must not hold any resources, since the interrupt would leak them.
        """
        if _get_ident() != self._main:
            blocking()
            return
        previous_depth = self._depth
        try:
            self.end_deferring(0)
            blocking()
        finally:
            self._depth = previous_depth

    def reset(self) -> None:
        """Reset the handler's nesting depth, and discard a deferred interrupt.

        Call this after an interrupt has cut a section short.
        """
        self._depth = 0
        self._pending = False


_getpid = os.getpid
"""``os.getpid``, saved before any cell runs so that a cell cannot replace it."""


class GuestChannel:
    """The connection of a sandboxed session to the host.

    It has a descriptor for reading, one for writing, and the shared memory buffers if host and
    guest have them.
    """

    __slots__ = (
        "_busy_wait",
        "_has_data",
        "_is_soon",
        "_poll",
        "_reader",
        "is_open",
        "pid",
        "sending",
        "shared_buffers",
        "write_fd",
    )

    def __init__(
        self, read_fd: int, write_fd: int, *, takes_fds: bool, shared_buffers: Any
    ) -> None:
        """Create a channel to the host over two open file descriptors.

        ``takes_fds``: the connection is a socket over which the host may also send descriptors.
        ``shared_buffers``: a ``HostGuestSharedMemory``, or None.
        """
        self._reader = MessageFrameReader(read_fd, _receiver(read_fd) if takes_fds else None)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)
        self._has_data = functools.partial(self._poll.poll, 0)
        self._busy_wait = AdaptiveBusyWait()
        self._is_soon = False
        """True if the host announced that its next frame may follow at once, so that busy-waiting
        for it is worthwhile."""
        self.write_fd = write_fd
        self.shared_buffers = shared_buffers
        self.sending = threading.Lock()
        """Lock that is held while frames are written. It is also held while state is read or
        changed that must match the frames written so far."""
        self.pid = _getpid()
        """The session's process id."""
        self.is_open = False
        """True while a cell runs, so that its output and its calls are sent to the host."""

    def is_session_process(self) -> bool:
        """Return True in the session's main process, and False in a child process that a cell
        forked."""
        return _getpid() == self.pid

    def descriptors(self) -> set[int]:
        own = {self._reader.fd, self.write_fd}
        return own if self.shared_buffers is None else {*own, self.shared_buffers.fd}

    def restart_reading(self) -> None:
        """Discard the buffered input of the old connection, and start reading from the new one.

        Call this after the descriptors were redirected to a new connection under the same numbers.
        """
        if self.shared_buffers is not None:
            self.shared_buffers = type(self.shared_buffers)(self.shared_buffers.fd, is_host=False)
        self._reader = MessageFrameReader(self._reader.fd, self._reader.receive)

    # -- to the host

    def frame(
        self, header: dict[str, Any], encoder: ValueEncoder | None, blobs: Sequence[Buffer] = ()
    ) -> list[Buffer]:
        """Build the frame of a message, and return it as a list of buffers to write.

        Long data may be placed in the shared memory buffers instead. Raises ValueLimitError if the
        frame exceeds a limit.
        """
        if encoder is not None:
            blobs = encoder.blobs
            if encoder.tags:
                header["tags"] = True
            check_blob_count(len(blobs))
            if blobs:
                header["blobs"] = [len(blob) for blob in blobs]
        shared_buffers = self.shared_buffers
        if shared_buffers is not None:
            if encoder is not None and blobs and shared_buffers.try_put(blobs, header["id"]):
                header["shelved"], blobs = True, ()
            elif encoder is not None and encoder.defers:
                blobs = encode_text_blobs(blobs)
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

    def frame_from_encoded_header(self, text: bytes) -> list[Buffer]:
        """Build a frame from a header that the caller has already encoded as JSON.

        The header must be known to be within the size limits.
        """
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
        """Send frames to the host.

        The caller must hold the lock ``sending``.
        """
        if len(parts) == 1:
            count = _write(self.write_fd, parts[0])
            if count == len(parts[0]):
                return
            parts = [memoryview(parts[0])[count:]]
        write_all(self.write_fd, parts)

    # -- from the host

    def read_lone_frame(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """Wait for data from the host, and return a frame if exactly one short frame has arrived.

        The result is the frame's header and its binary parts. "Alone" means short, complete and
        without further data: the fast path. Otherwise return None, so that ``next_buffered_frame``
        handles the data.
        """
        reader = self._reader
        # Descriptors arrive only with ``recvmsg``, which the reader calls.
        if reader.have or reader.receive is not None:
            return None
        self.wait_readable()
        chunk = _read(reader.fd, _CHUNK)
        end = len(chunk)
        if end < _PREFIX_BYTES or PREFIX.unpack_from(chunk) != (end - 4, VERSION, end - 9):
            reader.data += chunk
            reader.have = end
            return None
        return self._decode_frame(chunk[_PREFIX_BYTES:].decode(), memoryview(chunk)[4:], end - 4)

    def next_buffered_frame(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """Return the header and the binary parts of the next frame that has already been read.

        Returns None if more data must be read first.
        """
        view = self._reader.next()
        if view is None:
            return None
        text, end = split_frame(view)
        return self._decode_frame(str(text, "utf-8"), view, end)

    def _decode_frame(
        self, text: str, view: memoryview, end: int
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Decode the header of a frame and find the frame's binary parts.

        They are either in the shared memory buffers or in the frame itself, from offset ``end`` on.
        """
        header: dict[str, Any] = _raw_decode(text)[0]
        self._is_soon = "soon" in header
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
        """Mark the shared buffers as free if the host's message shows that it has read their
        contents.

        That is the case when the host answers the call or sends its next request. A fork request
        does not count, because it can arrive at any time.
        """
        if op != "fork" and (op not in ("ret", "err") or id == self.shared_buffers.key):
            self.shared_buffers.is_free = True

    def decode_value(self, header: dict[str, Any], blobs: list[memoryview]) -> Any:
        return (
            ValueDecoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        )

    def take_fds(self) -> list[int]:
        """Return the file descriptors that the host has sent since the last call.

        The caller owns them afterwards.
        """
        fds, self._reader.fds = self._reader.fds, []
        return fds

    def has_partial_frame(self) -> bool:
        """Return True if part of a frame has arrived from the host, but not yet all of it."""
        return self._reader.have > 0

    def wait_readable(self) -> None:
        """Wait until there is data to read."""
        if not (self._is_soon and self._busy_wait.until(self._has_data)):
            self._poll.poll()

    def fill(self) -> None:
        """Read more data from the host with one system call.

        Raises EOFError at the end of the stream.
        """
        self._reader.fill()


def _receiver(fd: int) -> Any:
    """Return a ``recvmsg`` method that receives data and file descriptors from the host.

    The object is never closed, so the descriptor stays open as long as the process lives.
    """
    import socket

    end = socket.socket(fileno=fd)
    return end.recvmsg


DROPPED: Any = object()
"""Placeholder that a waiting thread receives in place of a frame that will never arrive."""


class HostMessageWaiter:
    """A thread of the session that waits for the host to send it a message frame.

    Its lock ``wake`` is released when the frame has arrived, or when this thread must take over
    reading from the host.
    """

    __slots__ = ("frame", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.frame: Any = None
        """Header and binary parts, once they have arrived."""

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            self.wake.release()


class MessageFrameDispatcher:
    """Hands each frame from the host to the thread that is waiting for it.

    Answers go to the threads that called the host, and requests go to the thread that handles
    requests.
    """

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
        interrupts: DeferrableInterrupts,
        fork: Callable[[int], None],
        *,
        ends_process: bool,
    ) -> None:
        """Create a dispatcher for the frames of a channel.

        ``fork`` is called with the id of each request to fork. If ``ends_process`` is true, the
        process ends when the host closes the stream.
        """
        self._channel = channel
        self._interrupts = interrupts
        self._fork = fork
        self._ends_process = ends_process
        self._leading = threading.Lock()
        self._command = HostMessageWaiter()
        self._calls: dict[int, HostMessageWaiter] = {}

    def next_command(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Wait for the host's next request and return it.

        Raises EOFError or OSError at the end of the stream.
        """
        if not self._calls and self._leading.acquire(blocking=False):
            try:
                message = self._channel.read_lone_frame()
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

    def register_waiter(self, id: int, ticket: HostMessageWaiter) -> None:
        """Register the thread that will wait for the host's answer to a call.

        Do this before the call is sent.
        """
        self._calls[id] = ticket

    def unregister_waiter(self, ticket: HostMessageWaiter) -> None:
        """Unregister a thread that has stopped waiting for a frame from the host.

        If its frame has not arrived, the thread was interrupted, so another waiting thread takes
        over reading.
        """
        if ticket.frame is None:  # interrupted
            for id, other in list(self._calls.items()):
                if other is ticket:
                    self._calls.pop(id, None)
            self._pass_on()

    def drop_calls(self) -> None:
        """Wake all threads that still wait for answers from the host, because their cell has ended.

        They get no answer.
        """
        for ticket in list(self._calls.values()):
            ticket.frame = DROPPED
            ticket.rouse()
        self._calls.clear()

    def wait(self, ticket: HostMessageWaiter) -> None:
        """Wait until the host has sent the frame for this thread.

        If no other thread is reading from the host, this thread reads on behalf of all of them.
        """
        while ticket.frame is None:
            if not self._leading.acquire(blocking=False):
                self._interrupts.call_interruptibly(ticket.wake.acquire)
                continue
            try:
                while ticket.frame is None:
                    self._read_step(ticket)
            finally:
                self._leading.release()
                self._pass_on()

    def _read_step(self, own_ticket: HostMessageWaiter) -> None:
        message = self._channel.next_buffered_frame()
        if message is not None:
            self._dispatch(*message, own_ticket)
            return
        # A blocked ``read`` would also wake up whenever the host reads what was sent.
        if not self._channel.has_partial_frame():
            self._interrupts.call_interruptibly(self._channel.wait_readable)
        try:
            self._channel.fill()
        except (EOFError, OSError):
            if self._ends_process:
                os._exit(0)  # the host is gone
            raise

    def _dispatch(
        self, header: dict[str, Any], blobs: list[memoryview], own_ticket: HostMessageWaiter
    ) -> None:
        if header["op"] == "fork":
            self._fork(header["id"])
            return
        ticket: HostMessageWaiter | None = self._command
        if header["op"] in ("ret", "err"):
            ticket = self._calls.pop(header["id"], None)  # None: its caller was interrupted
        if ticket is not None:
            ticket.frame = (header, blobs)
            if ticket is not own_ticket:
                ticket.rouse()

    def _pass_on(self) -> None:
        """Wake another waiting thread to take over reading frames from the host."""
        for ticket in [*self._calls.values(), self._command]:
            if ticket.frame is None:
                ticket.rouse()
                return
