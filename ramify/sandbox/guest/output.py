"""What cells print, on its way to the host.

Decides when it goes out, and how much: up to its limit the host gets everything; then the newest,
at most every 50 ms and at the cell's end. Leaves out how prints come here (``streams.py``) and
where they lie until then (``spools.py``).
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
_Utf8 = codecs.getincrementaldecoder("utf-8")
_clock = time.monotonic
"""As it was when no cell had run yet."""


class CellOutput:
    """The output of the cell that runs, and of the last one that ended."""

    __slots__ = (
        "_count",
        "_ended",
        "_flushed",
        "_held",
        "_interrupts",
        "_kept",
        "_line",
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
        line: GuestChannel,
        interrupts: GuestInterrupts,
        max_bytes: int,
    ) -> None:
        self.spool = spool
        self.stdout = Stream("<stdout>", self.put, 1)
        self.stderr = Stream("<stderr>", self.put, 2)
        self._line = line
        self._interrupts = interrupts
        self._max_bytes = max_bytes
        self._ended: tuple[HeadTailBuffer, int] = (HeadTailBuffer(2), 0)
        self.begin()

    def begin(self) -> None:
        """A cell begins."""
        self.chars = 0
        """Characters that it printed and that were taken."""
        self._pending = 0
        self._sent = 0
        self._count = _Utf8("replace").decode
        self._kept = HeadTailBuffer(16 * self._max_bytes)
        self._held = TailBuffer(max(self._max_bytes // 2, 1))
        self._flushed = _clock()

    def end(self) -> None:
        """It has ended, and was taken."""
        self._ended = (self._kept, self.chars)

    def last_output(self) -> str:
        """What the last cell that ended had printed, up to 16 times what the host keeps. In
        ``after_cell``: this cell."""
        kept, chars = self._ended
        return kept.text(chars)

    def put(self, data: bytes) -> None:
        """Print."""
        try:
            self.spool.write(data)
        except OSError:  # the file is full of what other processes wrote
            self.flush()
            self.spool.write(data)
        self._pending += len(data)
        if self._pending >= FLUSH_BYTES or _clock() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what was printed so far, if a cell runs and nobody else is sending."""
        line = self._line
        if not line.is_open or not line.is_ours():
            return
        before = self._interrupts.enter()
        try:
            if line.sending.acquire(blocking=False):
                try:
                    if line.is_open:
                        line.write(self.take(final=False))
                finally:
                    line.sending.release()
        finally:
            self._interrupts.leave(before)

    def take(self, final: bool) -> list[Buffer]:
        """Take what was printed; the frames that the host gets of it now. ``GuestChannel.sending``
        is held."""
        self._pending = 0
        parts: list[Buffer] = []
        for data in self.spool.take():
            self.chars += len(self._count(data))
            self._kept.add(data)
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
        header = {
            "op": "out",
            "skip": skip,
            "chars": self.chars,
            "upto": upto,
            "blobs": [len(data)],
        }
        return self._line.frame(header, None, [data])
