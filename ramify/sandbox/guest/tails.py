"""Buffers for a stream that is too long to keep: its tail, or its head and tail.

Decides which bytes are kept, and that no character is cut in half. Not here: the streams. Sessions
keep the output of their cells, and hosts keep what sessions send them of it.
"""

from __future__ import annotations

import collections

from .values import Buffer


class TailBuffer:
    """The last ``limit`` bytes of a stream, or slightly more."""

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
        """Return the tail, and how many bytes before it were lost since the last ``take``. The
        buffer is empty afterwards."""
        joined = b"".join(self._parts)
        tail = joined[-self._limit :]
        lost = self.lost + len(joined) - len(tail)
        self._parts.clear()
        self._size = self.lost = 0
        return tail, lost

    def drop(self) -> None:
        """Discard everything."""
        self.lost += self._size
        self._parts.clear()
        self._size = 0

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def __len__(self) -> int:
        return self._size


class HeadTailBuffer:
    """At most ``limit`` bytes of a stream: half from its beginning and half from its end."""

    __slots__ = ("_half", "_head", "_tail")

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = TailBuffer(self._half)

    def add(self, data: Buffer, skipped: int = 0) -> None:
        """Add more of the stream; ``skipped`` bytes just before it are already lost."""
        if skipped:
            self._tail.drop()
            self._tail.lost += skipped
        elif not len(self._tail) and not self._tail.lost:
            room = self._half - len(self._head)
            self._head += data[:room]
            data = data[room:]
        if len(data):
            self._tail.add(data)

    def text(self, chars: int) -> str:
        """Return the kept part as text; a line between head and tail says how many of ``chars``
        characters are missing."""
        tail = bytes(self._tail)
        if not self._tail.lost and len(tail) <= self._half:
            return (self._head + tail).decode("utf-8", "replace")
        head = _without_partial_end(bytes(self._head)).decode("utf-8", "replace")
        end = tail[-self._half :].lstrip(_CONTINUATION).decode("utf-8", "replace")
        return f"{head}\n[… {max(chars - len(head) - len(end), 0):,} characters left out …]\n{end}"


_CONTINUATION = bytes(range(0x80, 0xC0))


def _without_partial_end(data: bytes) -> bytes:
    """Return ``data`` without a character that was cut off at its end."""
    body = data.rstrip(_CONTINUATION)
    if (
        body
        and body[-1] >= 0xC0
        and len(data) - len(body) < (1 if body[-1] < 0xE0 else 2 if body[-1] < 0xF0 else 3)
    ):
        return body[:-1]
    return data
