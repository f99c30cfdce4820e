"""A byte stream made of files, for cloud services that offer no two-way stream.

The service must be able to read and write files. The host polls for output: at once after it has
sent something, and then less and less often. The program at the other end is
``stream_over_files_remote.py``, and the service is defined in ``prime.py``. Compared with a real
stream, this costs one more request in each direction, and only text can be sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from ramify.extras.sandboxes import cloud_sandbox_sdk

_SHORTEST_S, _LONGEST_S = 0.02, 0.5
_MAX_FAILURES = 40
"""Maximum number of consecutive failed reads of the output file, which may not exist yet at
first."""
_READ_BYTES = 1 << 20


class PrimeSandboxFiles:
    """Reads and writes files in a container of the Prime service.

    ``close`` deletes the container.
    """

    def __init__(self, client: Any, id: str) -> None:
        self._client = client
        self._id = id

    async def put(self, path: str, data: bytes) -> None:
        """Write a file in the Prime container, creating its folder if needed."""
        await self._client.upload_bytes(self._id, path, data, path.rpartition("/")[2])

    async def get(self, path: str, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes of an ASCII file in the container, starting at ``offset``.

        Raises the SDK's error if the file does not exist.
        """
        reply = await self._client.read_file(self._id, path, offset=offset, length=length)
        return str(reply.content).encode()

    async def close(self) -> None:
        await cloud_sandbox_sdk.delete_with_retries(lambda: self._client.delete(self._id))


def relay_program_source() -> bytes:
    """Return the source code of the program that relays a command's input and output through files.

    The service runs it as ``python3 stream_over_files_remote.py FOLDER COMMAND…``.
    """
    return (Path(__file__).parent / "stream_over_files_remote.py").read_bytes()


class ByteStreamOverFiles:
    """A two-way byte stream that is relayed through files in a container.

    Implements ``remote.CommandByteStream``.
    """

    def __init__(self, files: PrimeSandboxFiles, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._num_sent = 0
        self._number = 0
        self._offset = 0
        self._failures = 0
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
        """Return the output that the command has written since the last call.

        If there is none, wait briefly and return empty bytes.
        """
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
        """Return the complete lines of the command's new output, and keep an unfinished line for
        later.

        Control lines switch to the next file or end the output.
        """
        *lines, self._line = (self._line + data).split(b"\n")
        output = []
        for line in lines:
            if line == b"-":
                self._number, self._offset, self._line = self._number + 1, 0, b""
                break
            if line == b".":
                self._is_over = True
                break
            output.append(line + b"\n")
        return b"".join(output)

    async def close(self) -> None:
        await self._files.close()
