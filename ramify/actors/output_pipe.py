"""Read the output of a running process asynchronously, keeping only its last bytes.

    pipe = OutputPipe(max_bytes)
    ChildProcess(command, files=(None, pipe.writing, None))
    pipe.begin(loop)      once the process has the writing end
    pipe.end(loop)        once the process has ended: the last bytes as text

A process may write without end: memory is bounded, and the process never waits for a reader. The
caller decides when to end a process that writes too much.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_BLOCK = 1 << 16
_PIPE_BYTES = 1 << 20
"""Maximum size in bytes of a pipe that an ordinary user may create."""


class OutputPipe:
    """A pipe that collects the output of a process, and keeps only its last bytes."""

    def __init__(self, max_bytes: int, on_read: Callable[[], object] | None = None) -> None:
        """Create a pipe that keeps the last ``max_bytes`` bytes.

        ``on_read`` is called in the event loop after each block of output.
        """
        self.num_bytes = 0
        """Number of bytes read so far."""
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._max_bytes = max_bytes
        self._on_read = on_read
        self._kept = bytearray()

    def start_reading(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to read the process's output in the event loop ``loop``.

        Call this after the process has received the write end of the pipe, because the copy in this
        process is closed here.
        """
        os.close(self.writing)
        self.writing = -1
        loop.add_reader(self._reading, self._read, loop)

    def finish_reading(self, loop: asyncio.AbstractEventLoop) -> str:
        """Read the rest of the process's output, and return its last bytes as text."""
        loop.remove_reader(self._reading)
        # No more than a pipe holds: a process that escaped may still write.
        for _ in range(_PIPE_BYTES // _BLOCK):
            if not self._read_block():
                break
        self.close()
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        for descriptor in (self._reading, self.writing):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self.writing = -1

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._read_block():
            loop.remove_reader(self._reading)
        elif self._on_read is not None:
            self._on_read()

    def _read_block(self) -> bool:
        """Read one block of the process's output into the buffer of last bytes.

        Returns False at the end of the output, or if nothing has arrived.
        """
        try:
            block = os.read(self._reading, _BLOCK)
        except BlockingIOError:
            return False
        self.num_bytes += len(block)
        self._kept += block
        del self._kept[: -self._max_bytes]
        return bool(block)
