"""Frames: the layout of a header and its blobs on a stream of bytes.

Decides the layout, the maximum size of a frame, and how much is read or written at once. Not here:
the content of headers (see the package) and the encoding of values (see ``values.py``).

    frame = u32 length of the rest | u8 version | u32 header length | header (JSON) | blobs
            (all little endian)
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .bounds import MAX_NESTING, LimitError, check_blobs, check_header
from .values import Buffer, ProtocolError

VERSION = 1
PREFIX = struct.Struct("<IBI")
MAX_HEADER = 16 << 20
"""Maximum size of a frame's JSON in bytes. Long text is not part of it, so this is millions of
small values."""
MAX_FRAME = 256 << 20
"""Maximum size of a frame from a guest in bytes. Frames to a guest are limited by its memory and by
the length prefix."""
_CHUNK = 1 << 16
U32 = struct.Struct("<I")
_read, _write = os.read, os.write
_readv: Any = getattr(os, "readv", None)
_writev: Any = getattr(os, "writev", None)
"""Saved before any cell has run. The latter two do not exist on Windows, where no guest runs but
the host needs the rest of this module."""

to_json: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False
).encode
from_json = json.JSONDecoder().decode


def json_bytes(header: Any) -> bytes:
    """Encode ``header`` as JSON. A lone surrogate, which an error's text may contain, becomes its
    escape sequence as text."""
    text = to_json(header)
    try:
        return text.encode()
    except UnicodeEncodeError:
        escaped = (
            f"\\\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char for char in text
        )
        return "".join(escaped).encode()


def check_size(header: bytes, blobs: Sequence[Any]) -> None:
    """Raise LimitError for a header and blobs that a host would refuse."""
    size = len(header) + sum(map(len, blobs))
    if len(header) > MAX_HEADER or size > MAX_FRAME:
        raise LimitError(
            f"a value of {size:,} bytes: at most {MAX_FRAME:,} at once, {MAX_HEADER:,} of them "
            "outside long strings"
        )
    check_blobs(len(blobs))
    if len(header) > MAX_NESTING:
        check_header(header)


def frame(header: bytes, blobs: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the buffers of one frame."""
    length = 5 + len(header) + sum(map(len, blobs))
    return [PREFIX.pack(length, VERSION, len(header)) + header, *blobs]


def open_frame(view: memoryview) -> tuple[memoryview, int]:
    """Return the header bytes of a frame (given without its length prefix), and the offset of its
    blobs."""
    version, size = view[0], U32.unpack_from(view, 1)[0]
    if version != VERSION:
        raise ProtocolError(f"a frame of version {version}, where {VERSION} is spoken")
    if size > len(view) - 5:
        raise ProtocolError(f"a header of {size} bytes in a frame of {len(view)}")
    return view[5 : 5 + size], 5 + size


def split_blobs(view: memoryview, start: int, lengths: Sequence[int]) -> list[memoryview]:
    """Return the blobs of ``view`` from ``start`` to its end."""
    blobs = []
    for length in lengths:
        if type(length) is not int or length < 0:
            raise ProtocolError(f"a blob of length {str(length)[:40]}")
        blobs.append(view[start : start + length])
        start += length
    if start != len(view):
        raise ProtocolError(f"blobs that end at byte {start} of {len(view)}")
    return blobs


class FrameReader:
    """Reads frames from a descriptor. A long frame gets its own buffer and is read straight into
    it."""

    __slots__ = ("data", "fd", "fds", "have", "receive")

    def __init__(self, fd: int, receive: Any = None) -> None:
        """``receive``: ``recvmsg`` of a socket over which descriptors may be received."""
        self.fd = fd
        self.receive = receive
        self.fds: list[int] = []
        """Descriptors that were received and not yet taken."""
        self.data = bytearray()
        self.have = 0

    def next(self) -> memoryview | None:
        """Return a complete frame without its length prefix, or None if more must be read first."""
        if self.have < 4:
            return None
        end = 4 + U32.unpack_from(self.data)[0]
        if end < 9:
            raise ProtocolError(f"a frame of {end - 4} bytes")
        if self.have < end:
            if end > _CHUNK and len(self.data) < end:
                buffer = bytearray(end)
                buffer[: self.have] = memoryview(self.data)[: self.have]
                self.data = buffer
            return None
        view = memoryview(self.data)[4:end]
        if len(self.data) == end:
            self.data = bytearray()
        else:
            self.data = self.data[end : self.have]
        self.have = len(self.data)
        return view

    def fill(self) -> None:
        """Read once. Raises EOFError at the end of the stream."""
        if len(self.data) > self.have:
            count = _readv(self.fd, [memoryview(self.data)[self.have :]])
        else:
            chunk = _read(self.fd, _CHUNK) if self.receive is None else self._receive()
            count = len(chunk)
            self.data += chunk
        if not count:
            raise EOFError
        self.have += count

    def _receive(self) -> bytes:
        data, ancillary, _, _ = self.receive(_CHUNK, 32)
        for _, _, packed in ancillary:
            self.fds += struct.unpack(f"{len(packed) // 4}i", packed[: len(packed) // 4 * 4])
        chunk: bytes = data
        return chunk


def write_all(fd: int, parts: list[Buffer]) -> None:
    """Write all of ``parts``, in as few system calls as possible."""
    if len(parts) > 1 and (len(parts) > 256 or sum(map(len, parts)) < _CHUNK):
        parts = [b"".join(parts)]
    while parts:
        count = _writev(fd, parts) if len(parts) > 1 else _write(fd, parts[0])
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = memoryview(parts[0])[count:]
