"""Long strings between host and session: by a file of memory that both hold, instead of through
their socket.

A socket takes a megabyte in pieces of 200 kB, with a switch between the two processes for each; a
file of memory takes it in one. The file has a fixed size and two halves, one to write to for each
end:

    [0, HALF)         written by the guest     the host has read it when it answers the call, or asks for the next thing
    [HALF, 2 HALF)    written by the host      the guest says in ``got`` how many it has read

Decides when a half may be written again: once what lay there was read; until then, and for less
than ``MIN_BYTES`` or more than a half, blobs stay in their frame. Neither end maps the file:
reading copies, so that what was checked cannot change afterwards. Standard library only; used by
both ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

MIN_BYTES = 1 << 16
HALF_BYTES = 8 << 20
_F_ADD_SEALS, _SEALS = 1033, 0x2 | 0x4
"""Neither shrink nor grow, for good. The jail adds that nobody writes, once the file is of no more
use."""
_PUNCH, _KEEP_SIZE = 2, 1
_MAX_PARTS = 64
_PIECE = 1 << 18
"""Text is encoded in pieces of this length: memory for all of it would be new each time, and cost
more than its copy."""


class ScratchBuffer:
    """A buffer that grows as needed, used again and again: fresh memory costs more than what is
    copied into it."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def of(self, size: int) -> memoryview:
        if len(self._data) < size:
            self._data = bytearray(size)
        return memoryview(self._data)[:size]


class SharedMemoryBuffers:
    """One end's view of the file."""

    __slots__ = (
        "_at",
        "_from",
        "_is_used",
        "_scratch",
        "fd",
        "got",
        "is_free",
        "key",
        "owed",
        "put_count",
        "told",
    )

    def __init__(self, fd: int, *, is_host: bool, scratch: ScratchBuffer | None = None) -> None:
        """``scratch``: what ``take`` reads into, so that its blobs are valid until the next one of
        any shelf."""
        self.fd = fd
        self._scratch = scratch
        self._at, self._from = (HALF_BYTES, 0) if is_host else (0, HALF_BYTES)
        self._is_used = False
        self.is_free = True
        """Whether the other end has read what we put."""
        self.owed: int | None = None
        """Of the host: the number of the frame whose blobs it took and has not answered. A guest
        puts nothing before that; one that says so would have the host hold a half's worth for every
        few bytes on the wire."""
        self.key = -1
        """What ``put`` was given with it."""
        self.put_count = self.got = self.told = 0
        """Times that we put, that we took, and the last of the latter that the other end knows
        of."""

    def put(self, blobs: Sequence[Any], key: int) -> bool:
        """Leave ``blobs`` (bytes, or ASCII text) for the other end, if they belong here and there
        is room."""
        if not self.is_free or not MIN_BYTES <= sum(map(len, blobs)) <= HALF_BYTES:
            return False
        at = self._at
        for part in _pieces(blobs):
            view = memoryview(part)
            while view:
                count = os.pwrite(self.fd, view, at)
                view, at = view[count:], at + count
        self.is_free, self._is_used, self.key = False, True, key
        self.put_count += 1
        return True

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """The blobs that the other end left. Raises ValueError where it left less than it says."""
        size = sum(lengths)
        if not 0 <= size <= HALF_BYTES:
            raise ValueError(f"{size:,} bytes on a shelf for {HALF_BYTES:,}")
        if self._scratch is None:
            data = memoryview(os.pread(self.fd, size, self._from))
        else:
            data = self._scratch.of(size)
            data = data[: os.preadv(self.fd, [data], self._from)]
        if len(data) < size:
            raise ValueError(f"{len(data):,} bytes on a shelf, where {size:,} were announced")
        self.got += 1
        self._is_used = True
        blobs, at = [], 0
        for length in lengths:
            blobs.append(data[at : at + length])
            at += length
        return blobs

    def empty(self) -> None:
        """Give the memory back, if there was any use of it."""
        if self._is_used and self.is_free:
            self._is_used = False
            _libc.fallocate(
                self.fd, _PUNCH | _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(2 * HALF_BYTES)
            )

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pieces(blobs: Sequence[Any]) -> Iterator[Any]:
    if len(blobs) > _MAX_PARTS:
        yield b"".join(blob.encode() if isinstance(blob, str) else blob for blob in blobs)
        return
    for blob in blobs:
        if isinstance(blob, str):
            yield from (blob[at : at + _PIECE].encode() for at in range(0, len(blob), _PIECE))
        else:
            yield blob


def make_file() -> int:
    """A descriptor of the file, or -1 where the platform has no files of memory."""
    if sys.platform != "linux":
        return -1
    fd = os.memfd_create("ramify-shelf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * HALF_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


_libc: Any = None
with contextlib.suppress(OSError, TypeError):
    _libc = ctypes.CDLL(None)
