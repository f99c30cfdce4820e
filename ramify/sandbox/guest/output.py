"""The output of cells, on its way to the host.

Decides when output is sent, and how much. Up to its limit the host gets everything; beyond the
limit it gets only the newest part, at most every 50 ms and at the cell's end. Not here: how prints
get here (see ``streams.py``) and how they are stored until then (see ``spools.py``).
"""

from __future__ import annotations

import codecs
import time

from .channel import GuestChannel
from .interrupts import GuestInterrupts
from .spools import FileOutputSpool, MemoryOutputSpool
from .streams import Stream
from .tails import HeadTailBuffer, TailBuffer
from .values import Buffer

FLUSH_BYTES = 1 << 16
FLUSH_S = 0.05
MAX_FRAME_BYTES = 1 << 20
"""Maximum output in one frame."""
_Utf8 = codecs.getincrementaldecoder("utf-8")
_clock = time.monotonic
"""Saved before any cell has run."""


class CellOutput:
    """The output of the running cell, and of the last cell that ended."""

    __slots__ = (
        "_channel",
        "_count",
        "_ended",
        "_flushed",
        "_full_output",
        "_held",
        "_interrupts",
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
        spool: FileOutputSpool | MemoryOutputSpool,
        channel: GuestChannel,
        interrupts: GuestInterrupts,
        max_bytes: int,
    ) -> None:
        self.spool = spool
        self.stdout = Stream("<stdout>", self.put, 1)
        self.stderr = Stream("<stderr>", self.put, 2)
        self._channel = channel
        self._interrupts = interrupts
        self._max_bytes = max_bytes
        self._ended: tuple[HeadTailBuffer, int] = (HeadTailBuffer(2), 0)
        self.begin()

    def begin(self) -> None:
        """Start a cell."""
        self.chars = 0
        """Number of characters that the cell printed and that were taken."""
        self._pending = 0
        self._sent = 0
        self._count = _Utf8("replace").decode
        self._full_output = HeadTailBuffer(16 * self._max_bytes)
        self._held = TailBuffer(max(self._max_bytes // 2, 1))
        self._flushed = _clock()

    def end(self) -> None:
        """Keep the output of the cell, which has ended and was taken."""
        self._ended = (self._full_output, self.chars)

    def last_output(self) -> str:
        """Return the output of the last cell that ended, up to 16 times what the host keeps. In
        ``after_cell``: of this cell."""
        buffer, chars = self._ended
        return buffer.text(chars)

    def put(self, data: bytes) -> None:
        """Print ``data``."""
        try:
            self.spool.write(data)
        except OSError:  # other processes have filled the file
            self.flush()
            self.spool.write(data)
        self._pending += len(data)
        if self._pending >= FLUSH_BYTES or _clock() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send the output so far, if a cell runs and no other thread is sending."""
        channel = self._channel
        if not channel.is_open or not channel.is_ours():
            return
        before = self._interrupts.enter()
        try:
            if channel.sending.acquire(blocking=False):
                try:
                    if channel.is_open:
                        channel.write(self.take(final=False))
                finally:
                    channel.sending.release()
        finally:
            self._interrupts.leave(before)

    def take(self, final: bool) -> list[Buffer]:
        """Take the output so far and return the frames to send to the host now. The caller holds
        ``GuestChannel.sending``."""
        self._pending = 0
        parts: list[Buffer] = []
        for data in self.spool.take():
            self.chars += len(self._count(data))
            self._full_output.add(data)
            room = max(self._max_bytes - self._sent, 0)
            if room:
                parts += self._out(data[:room], 0, self.spool.at - len(data[room:]))
            if room < len(data):
                self._held.add(data[room:])
        now = _clock()
        if len(self._held) and (final or now - self._flushed > FLUSH_S):
            parts += self._out(*self._held.take(), self.spool.at)
        self._flushed = now
        return parts

    def _out(self, data: bytes, skip: int, upto: int) -> list[Buffer]:
        self._sent += len(data)
        parts: list[Buffer] = []
        for at in range(0, len(data), MAX_FRAME_BYTES):
            piece = data[at : at + MAX_FRAME_BYTES]
            header = {
                "op": "out",
                "skip": 0 if at else skip,
                "chars": self.chars,
                "upto": upto,
                "blobs": [len(piece)],
            }
            parts += self._channel.frame(header, None, [piece])
        return parts
