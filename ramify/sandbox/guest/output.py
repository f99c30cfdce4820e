"""Collect what cells print and send it to the host.

Prints arrive through ``SessionStdStream`` and are stored in a spool until the host has them.
``HeadTailBuffer`` decides which bytes of an overlong stream are kept. Up to a limit, the host gets
everything; beyond it, only the newest part, at most every 50 ms and at the end of the cell. If the
spool is a file, the output of Python code, C code and other processes is in its true order.
"""

from __future__ import annotations

import codecs
import collections
import io
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from .channel import DeferrableInterrupts, GuestChannel
from .message_frames import MAX_FRAME_OUTPUT
from .value_encoding import Buffer


class TailBuffer:
    """A buffer that keeps the last bytes of an output stream and counts those it discards.

    At least the last ``limit`` bytes are kept.
    """

    __slots__ = ("_limit", "_parts", "_size", "lost")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: collections.deque[Buffer] = collections.deque()
        self._size = 0
        self.lost = 0
        """Number of bytes before the tail that were discarded."""

    def add(self, data: Buffer) -> None:
        self._parts.append(data)
        self._size += len(data)
        while self._size - len(self._parts[0]) >= self._limit:
            gone = len(self._parts.popleft())
            self._size -= gone
            self.lost += gone

    def take(self) -> tuple[bytes, int]:
        """Return the last bytes of the stream that the buffer holds, and empty the buffer.

        Returns its content, and how many bytes were discarded before it since the last call.
        """
        joined = b"".join(self._parts)
        tail = joined[-self._limit :]
        lost = self.lost + len(joined) - len(tail)
        self._parts.clear()
        self._size = self.lost = 0
        return tail, lost

    def discard_all(self) -> None:
        """Discard the buffered bytes, and count them as lost output."""
        self.lost += self._size
        self._parts.clear()
        self._size = 0

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def __len__(self) -> int:
        return self._size


class HeadTailBuffer:
    """A buffer that keeps the beginning and the end of an output stream.

    Each of the two holds at most half of the ``limit`` bytes.
    """

    __slots__ = ("_half", "_head", "_tail")

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = TailBuffer(self._half)

    def add(self, data: Buffer, skipped: int = 0) -> None:
        """Add the next bytes of the stream.

        ``skipped`` is the number of bytes just before them that were already lost.
        """
        if skipped:
            self._tail.discard_all()
            self._tail.lost += skipped
        elif not len(self._tail) and not self._tail.lost:
            room = self._half - len(self._head)
            self._head += data[:room]
            data = data[room:]
        if len(data):
            self._tail.add(data)

    def text(self, chars: int) -> str:
        """Return the buffered beginning and end of the stream as text.

        If the middle was left out, a line there says how many characters are missing. ``chars`` is
        the number of characters in the whole stream.
        """
        if not (self._head or self._tail.lost or len(self._tail)):
            return ""
        tail = bytes(self._tail)
        if not self._tail.lost and len(tail) <= self._half:
            return (self._head + tail).decode("utf-8", "replace")
        head = _without_partial_end(bytes(self._head)).decode("utf-8", "replace")
        end = tail[-self._half :].lstrip(_CONTINUATION).decode("utf-8", "replace")
        return f"{head}\n[… {max(chars - len(head) - len(end), 0):,} characters left out …]\n{end}"


_CONTINUATION = bytes(range(0x80, 0xC0))


def _without_partial_end(data: bytes) -> bytes:
    """Remove an incomplete UTF-8 character from the end of a byte string."""
    body = data.rstrip(_CONTINUATION)
    if (
        body
        and body[-1] >= 0xC0
        and len(data) - len(body) < (1 if body[-1] < 0xE0 else 2 if body[-1] < 0xF0 else 3)
    ):
        return body[:-1]
    return data


_CHUNK = 1 << 16
_write = os.write
"""``os.write``, saved before any cell runs so that a cell cannot replace it."""


class FileOutputSpool:
    """An anonymous file that receives a session's standard output and standard error.

    Both descriptors (1 and 2) write to it, so their order is preserved.

    The file is truncated after a long output was sent. If the host has the file open too, the
    output of a killed session is not lost: the host continues to read from the offset ``at``.
    """

    __slots__ = ("at", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.at = 0
        """File offset from which ``take_frames`` continues."""

    def write(self, data: bytes) -> None:
        while data:
            data = data[_write(self.fd, data) :]

    def take(self) -> Iterator[bytes]:
        """Yield the output that has been written to the file since the last call, piece by
        piece."""
        end = os.lseek(self.fd, 0, os.SEEK_END)
        while self.at < end:
            data = os.pread(self.fd, min(end - self.at, _CHUNK), self.at)
            self.at += len(data)
            yield data
            end = os.lseek(self.fd, 0, os.SEEK_END)
        if self.at >= _CHUNK:
            os.ftruncate(self.fd, 0)
            self.at = 0

    def redirect_output(self) -> None:
        """Redirect standard output and standard error to this file again.

        A cell may have closed or redirected them.
        """
        os.dup2(self.fd, 1)
        os.dup2(self.fd, 2)


class InProcessOutputSpool:
    """An in-memory store for a session's output, for sessions that share one process.

    It receives only what Python code prints, not what C code or child processes write.
    """

    def __init__(self) -> None:
        self._parts: collections.deque[bytes] = collections.deque()
        self.at = 0

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def take(self) -> Iterator[bytes]:
        while self._parts:
            data = self._parts.popleft()
            self.at += len(data)
            yield data

    def redirect_output(self) -> None:
        pass


class SessionStdStream(io.TextIOBase):
    """The replacement for ``sys.stdout`` and ``sys.stderr`` in a session.

    Both write to the same place, so that the order of their output is preserved.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: str, put: Callable[[bytes], None], number: int) -> None:
        self.name = name
        self._put = put
        self._number = number
        self.buffer = _Bytes(put)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._put(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def reconfigure(self, **_: Any) -> None:
        """Accept and ignore all settings, because a session always prints UTF-8.

        Scripts written for a terminal may call this to change the encoding.
        """

    def close(self) -> None:
        """Do nothing, since the streams of a session stay open."""


class _Bytes(io.BufferedIOBase):
    """The binary layer of a session's output stream, as in ``sys.stdout.buffer``."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self._put(chunk)
        return len(chunk)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        pass


FLUSH_BYTES = 1 << 16
FLUSH_S = 0.05
_Utf8 = codecs.getincrementaldecoder("utf-8")
_clock = time.monotonic
"""The clock function, saved before any cell runs so that a cell cannot replace it."""


class CellOutputSender:
    """Sends the output of the running cell to the host.

    It also keeps the output of the last cell that ended.
    """

    __slots__ = (
        "_channel",
        "_count",
        "_ended",
        "_flushed",
        "_full_output",
        "_held",
        "_interrupts",
        "_is_unused",
        "_max_bytes",
        "_pending",
        "_sent",
        "chars",
        "spool",
        "stderr",
        "stdout",
    )

    def __init__(
        self,
        spool: FileOutputSpool | InProcessOutputSpool,
        channel: GuestChannel,
        interrupts: DeferrableInterrupts,
        max_bytes: int,
    ) -> None:
        self.spool = spool
        self.stdout = SessionStdStream("<stdout>", self.put, 1)
        self.stderr = SessionStdStream("<stderr>", self.put, 2)
        self._channel = channel
        self._interrupts = interrupts
        self._max_bytes = max_bytes
        self._ended: tuple[HeadTailBuffer, int] | None = None
        """Output and number of characters of the last finished cell; None if it printed nothing."""
        self._is_unused = False
        """True if the current cell has printed nothing so far."""
        self.begin_cell()

    def begin_cell(self) -> None:
        """Prepare for the output of a new cell."""
        self._pending = 0
        self._flushed = _clock()
        if self._is_unused:
            return
        self._is_unused = True
        self.chars = 0
        """Number of characters that the cell has printed and that were collected."""
        self._sent = 0
        self._count = _Utf8("replace").decode
        self._full_output = HeadTailBuffer(16 * self._max_bytes)
        self._held = TailBuffer(max(self._max_bytes // 2, 1))

    def save_ended_cell_output(self) -> None:
        """Keep the full output of the cell that has just ended, so that ``last_cell_output`` can
        return it."""
        self._ended = None if self._is_unused else (self._full_output, self.chars)

    def last_cell_output(self) -> str:
        """Return the output of the last finished cell, including text that was too long for the
        host.

        At most 16 times the length that the host keeps is returned. A hook that runs after a cell
        gets that cell's output.
        """
        return self._ended[0].text(self._ended[1]) if self._ended else ""

    def put(self, data: bytes) -> None:
        """Store output that the running cell has printed.

        Send the output to the host if enough bytes or enough time have accumulated.
        """
        try:
            self.spool.write(data)
        except OSError:  # other processes have filled the file
            self.flush()
            self.spool.write(data)
        self._pending += len(data)
        if self._pending >= FLUSH_BYTES or _clock() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send the collected output to the host, if a cell is running and no other thread is
        sending."""
        channel = self._channel
        if not channel.is_open or not channel.is_session_process():
            return
        before = self._interrupts.begin_deferring()
        try:
            if channel.sending.acquire(blocking=False):
                try:
                    if channel.is_open:
                        channel.write(self.take_frames(final=False))
                finally:
                    channel.sending.release()
        finally:
            self._interrupts.end_deferring(before)

    def take_frames(self, final: bool) -> list[Buffer]:
        """Take the output printed since the last call, and return the messages that send it to the
        host.

        The caller must hold the lock ``GuestChannel.sending``.
        """
        self._pending = 0
        parts: list[Buffer] = []
        for data in self.spool.take():
            self._is_unused = False
            self.chars += len(self._count(data))
            self._full_output.add(data)
            room = max(self._max_bytes - self._sent, 0)
            if room:
                parts += self._output_frames(data[:room], 0, self.spool.at - len(data[room:]))
            if room < len(data):
                self._held.add(data[room:])
        if self._is_unused:
            return parts
        now = _clock()
        if len(self._held) and (final or now - self._flushed > FLUSH_S):
            parts += self._output_frames(*self._held.take(), self.spool.at)
        self._flushed = now
        return parts

    def _output_frames(self, data: bytes, skip: int, upto: int) -> list[Buffer]:
        self._sent += len(data)
        parts: list[Buffer] = []
        for at in range(0, len(data), MAX_FRAME_OUTPUT):
            piece = data[at : at + MAX_FRAME_OUTPUT]
            header = {
                "op": "out",
                "skip": 0 if at else skip,
                "chars": self.chars,
                "upto": upto,
                "blobs": [len(piece)],
            }
            parts += self._channel.frame(header, None, [piece])
        return parts
