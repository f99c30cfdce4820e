"""Where what a session prints lies until the host has it.

Decides that prints of Python, of C code and of other processes are in one true order where there is
a file for them. Leaves out what goes to the host, and when (``output.py``).
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator

_CHUNK = 1 << 16
_write = os.write
"""As it was when no cell had run yet."""


class FileOutputSpool:
    """Where descriptors 1 and 2 lead: a file without a name, in which all that is printed stands in
    its true order.

    What went to the host is cut off once it is long. Where the host holds the file too, nothing
    that a killed session had printed is lost: it reads on from ``at``."""

    __slots__ = ("at", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.at = 0
        """Where in the file ``take`` goes on."""

    def write(self, data: bytes) -> None:
        while data:
            data = data[_write(self.fd, data) :]

    def take(self) -> Iterator[bytes]:
        """What was printed since the last time, in pieces."""
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
        """Make it descriptors 1 and 2, which a cell may have closed or sent elsewhere."""
        os.dup2(self.fd, 1)
        os.dup2(self.fd, 2)


class MemoryOutputSpool:
    """For a guest that shares its process with others: what Python code prints, and no more."""

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
