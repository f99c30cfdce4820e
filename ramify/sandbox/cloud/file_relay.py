"""A stream made of files, for any service that can write and read them but has no two-way stream.

Decides how often the host looks for news: at once after it has sent something, then ever more
rarely. Leaves out the other end (``file_relay_remote.py``) and the service (``RemoteFiles``).
Slower than a stream by a request each way; for text only.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Protocol

_SHORTEST_S, _LONGEST_S = 0.02, 0.5
_MAX_FAILURES = 40
"""Reads that fail one after the other; the first ones may, until the file is there."""
_READ_BYTES = 1 << 20


class RemoteFiles(Protocol):
    """The files of one box, and the box itself."""

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, its folder included."""
        ...

    async def get(self, path: str, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes (ASCII) of a file from ``offset``; raises anything where there is
        none."""
        ...

    async def close(self) -> None: ...


def relay_program() -> bytes:
    """The program that the service runs in front of the command: ``python3 file_relay_remote.py
    FOLDER COMMAND…``."""
    return (Path(__file__).parent / "file_relay_remote.py").read_bytes()


class FileRelay:
    """Implements ``remote.Stream``."""

    def __init__(self, files: RemoteFiles, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._num_sent = 0
        self._number = self._offset = self._failures = 0
        self._line = b""
        self._is_over = False
        self._wait_s = _SHORTEST_S
        self._sent = asyncio.Event()

    async def send(self, data: bytes) -> None:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        await self._files.put(
            f"{self._folder}/in.{number}", b"%d %d\n" % (len(data), self._number) + data
        )
        self._wait_s = _SHORTEST_S
        self._sent.set()

    async def receive(self) -> bytes:
        while not self._is_over:
            lines = self._lines(await self._read())
            if lines:
                self._wait_s = _SHORTEST_S
                return lines
        return b""

    async def _read(self) -> bytes:
        """What is new, after a wait if nothing is."""
        path = f"{self._folder}/out.{self._number}"
        try:
            data = await self._files.get(path, self._offset, _READ_BYTES)
            self._failures = 0
        except Exception:
            self._failures += 1
            if self._failures > _MAX_FAILURES:
                raise
            data = b""
        self._offset += len(data)
        if not data:
            await self._pause()
        return data

    async def _pause(self) -> None:
        self._sent.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await self._sent.wait()
        self._wait_s = min(self._wait_s * 1.5, _LONGEST_S)

    def _lines(self, data: bytes) -> bytes:
        """The whole lines of output in ``data`` and what was held before it."""
        *lines, self._line = (self._line + data).split(b"\n")
        kept = []
        for line in lines:
            if line == b"-":
                self._number, self._offset, self._line = self._number + 1, 0, b""
                break
            if line == b".":
                self._is_over = True
                break
            kept.append(line + b"\n")
        return b"".join(kept)

    async def close(self) -> None:
        await self._files.close()
