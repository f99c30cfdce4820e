"""The spool: where a session's output is stored until the host has it.

Decides that the output of Python code, C code and other processes is in one true order, if there is
a file for it. Not here: which part is sent to the host, and when (see ``output.py``).
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator

_CHUNK = 1 << 16
_write = os.write
"""Saved before any cell has run."""


class FileOutputSpool:
    """The target of descriptors 1 and 2: an anonymous file with all output in its true order.

    The file is truncated after a long output was sent. If the host holds the file too, the output
    of a killed session is not lost: the host continues to read from ``at``.
    """

    __slots__ = ("at", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.at = 0
        """File offset from which ``take`` continues."""

    def write(self, data: bytes) -> None:
        while data:
            data = data[_write(self.fd, data) :]

    def take(self) -> Iterator[bytes]:
        """Yield the output since the last call, in pieces."""
        end = os.lseek(self.fd, 0, os.SEEK_END)
        while self.at < end:
            data = os.pread(self.fd, min(end - self.at, _CHUNK), self.at)
            self.at += len(data)
            yield data
            end = os.lseek(self.fd, 0, os.SEEK_END)
        if self.at >= _CHUNK:
            os.ftruncate(self.fd, 0)
            self.at = 0

    def attach(self) -> None:
        """Make the file descriptors 1 and 2 again; a cell may have closed or redirected them."""
        os.dup2(self.fd, 1)
        os.dup2(self.fd, 2)


class MemoryOutputSpool:
    """Spool for a guest that shares its process with others: it holds only the prints of Python
    code."""

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

    def attach(self) -> None:
        pass
