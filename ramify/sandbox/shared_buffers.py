"""Shared memory buffers: long strings between host and session, without going through their socket.

A socket passes a megabyte in pieces of 200 kB, with a context switch for each piece; a memory file
that both processes hold passes it at once. The file has a fixed size and two halves, one for each
writer:

    [0, HALF)         written by the guest     read by the host once it answers the call or
                                               sends the next request
    [HALF, 2 HALF)    written by the host      read by the guest as often as it reports in ``got``

Decides when a half may be written again: after its content was read. Until then, and if the blobs
are smaller than ``MIN_BYTES`` or larger than a half, they are sent in their frame. Neither end maps
the file: reading copies, so data cannot change after it was checked. Both ends use this file;
standard library only.
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
"""The file can never shrink or grow. The jail also seals it against writing, once the file is no
longer in use."""
_PUNCH, _KEEP_SIZE = 2, 1
_MAX_PARTS = 64
_PIECE = 1 << 18
"""Text is encoded in pieces of this length: a buffer for all of it would be allocated each time,
which costs more than the copy."""


class ScratchBuffer:
    """Reusable buffer that grows as needed: allocating memory costs more than copying the data."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def of(self, size: int) -> memoryview:
        if len(self._data) < size:
            self._data = bytearray(size)
        return memoryview(self._data)[:size]


class SharedMemoryBuffers:
    """One end's view of the shared file."""

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
        "reported",
    )

    def __init__(self, fd: int, *, is_host: bool, scratch: ScratchBuffer | None = None) -> None:
        """``scratch``: buffer into which ``take`` reads. The blobs are then valid until the next
        ``take`` that uses the same buffer."""
        self.fd = fd
        self._scratch = scratch
        self._at = HALF_BYTES if is_host else 0
        self._from = 0 if is_host else HALF_BYTES
        self._is_used = False
        self.is_free = True
        """True if the other end has read what this end wrote."""
        self.owed: int | None = None
        """On the host: the id of the frame whose blobs were read and which is not answered yet. The
        guest must not write before the answer; otherwise it could make the host hold half a file of
        data for every few bytes on the socket."""
        self.key = -1
        """The ``key`` of the last ``put``."""
        self.put_count = 0
        """Number of writes by this end."""
        self.got = 0
        """Number of reads by this end."""
        self.reported = 0
        """Last value of ``got`` that was sent to the other end."""

    def put(self, blobs: Sequence[Any], key: int) -> bool:
        """Write ``blobs`` (bytes, or ASCII text) for the other end. Returns False if they are too
        short or too long, or if the last ones were not read yet."""
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
        """Read the blobs that the other end wrote. Raises ValueError if there is less data than
        announced."""
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
        """Release the memory of the file, if it was used."""
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
    """Create the file and return its descriptor, or -1 if the platform has no memory files."""
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
