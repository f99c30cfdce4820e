"""A container engine's HTTP API over its Unix socket: plain requests, and the attached stream of a
container.

Decides where to look for an engine and how its responses become values or one-line errors. Not
here: the requests (see ``docker.py``). Podman's compatible service works too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from ramify.errors import ConfigError, SandboxError

_FRAME = struct.Struct(">BxxxI")
_STDERR = 2
_MAX_FRAME_BYTES = 64 << 20
_MAX_BODY_BYTES = 64 << 20
_MAX_INTERIM = 16
_BROKEN = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, OSError)
_STATUS = re.compile(r"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: [^\r\n]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n]*)?\r\n")
HOW_TO_GET_ONE = (
    "start Docker or Podman (podman system service), or set DOCKER_HOST=unix:///path/to/its.sock; "
    "to get one, see https://docs.docker.com/engine/install"
)


class DockerEngineError(SandboxError):
    """The engine responded with an error."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"the container engine could not {what}: {message} (status {status})")
        self.status = status


def find_socket() -> str:
    """Return the path of the engine's socket. Raises ConfigError if DOCKER_HOST is not a Unix
    socket, and SandboxError if no engine is found."""
    host = os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith("unix://"):
        raise ConfigError(
            f"DOCKER_HOST is {host!r}, but only unix:// sockets are supported: set it to "
            "unix:///path/to/its.sock"
        )
    paths = [host.removeprefix("unix://")] if host else list(_usual_places())
    for path in paths:
        if os.path.exists(path):
            return path
    raise SandboxError(f"sandbox 'docker': no engine at {' or '.join(paths)}; {HOW_TO_GET_ONE}")


def _usual_places() -> Iterator[str]:
    yield "/var/run/docker.sock"
    yield os.path.expanduser("~/.docker/run/docker.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield os.path.join(runtime, "docker.sock")
        yield os.path.join(runtime, "podman", "podman.sock")


class DockerEngine:
    """Client of one engine; every request uses a new connection."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def ask(self, what: str, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the decoded response. ``what`` names the operation in errors.
        Raises DockerEngineError."""
        reader, writer = await self._send(method, path, body, "Connection: close\r\n")
        try:
            status, headers = await _head(reader)
            data = await _body(reader, status, headers)
        except _BROKEN as error:
            raise SandboxError(
                f"the container engine at {self._path} broke off ({what}): {error}"
            ) from None
        finally:
            await _shut(writer)
        if status >= 400:
            raise DockerEngineError(what, status, _message(data))
        return _decoded(data)

    async def attach(self, container: str) -> ContainerStdio:
        """Return the stream of a container that was created with its standard input open."""
        path = f"/containers/{quote(container)}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        reader, writer = await self._send(
            "POST", path, None, "Upgrade: tcp\r\nConnection: Upgrade\r\n"
        )
        try:
            status, headers = await _head(reader)
            if status not in (101, 200):
                message = _message(await _body(reader, status, headers))
                raise DockerEngineError("attach to a container", status, message)
        except _BROKEN as error:
            await _shut(writer)
            raise SandboxError(
                f"the container engine at {self._path} broke off (attach): {error}"
            ) from None
        except BaseException:
            await _shut(writer)
            raise
        return ContainerStdio(reader, writer)

    async def _send(
        self, method: str, path: str, body: Any, more: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if data else ""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise SandboxError(
                f"sandbox 'docker': no engine answers at {self._path} ({error.strerror or error}); "
                f"{HOW_TO_GET_ONE}"
            ) from None
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: docker\r\n"
            f"{kind}Content-Length: {len(data)}\r\n{more}\r\n"
        )
        writer.write(head.encode() + data)
        return reader, writer


class ContainerStdio:
    """Standard input and output of a container without a terminal. Its output arrives in frames
    that name the stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return output of either stream; b"" at the end."""
        try:
            while True:
                _, size = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if size > _MAX_FRAME_BYTES:
                    raise SandboxError(f"the container engine sent a frame of {size:,} bytes")
                if size:
                    return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def close(self) -> None:
        await _shut(self._writer)


async def _shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of the final response. Raises ValueError if it is not
    HTTP."""
    for _ in range(_MAX_INTERIM):
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        match = _STATUS.fullmatch(first)
        if match is None:
            raise ValueError(f"its answer begins with {first[:40]!r}")
        status = int(match[1])
        if status == 101 or status >= 200:
            return status, _headers(lines)
    raise ValueError(f"more than {_MAX_INTERIM} interim answers")


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if not colon or not name or name != name.strip() or set(line) & set("\r\n\0"):
            raise ValueError(f"a header of its answer is {line[:40]!r}")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


async def _body(reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> bytes:
    """Read the body. Raises ValueError if it is too long or its length headers are invalid."""
    if status in (204, 304):
        return b""
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or length is not None:
            raise ValueError(
                f"its Transfer-Encoding is {coding[:40]!r}, its Content-Length {str(length)[:40]!r}"
            )
        return await _chunks(reader)
    if length is None:
        body = bytearray()
        while data := await reader.read(1 << 16):
            body += data
            _bound(len(body))
        return bytes(body)
    if not (length.isascii() and length.isdigit()):
        raise ValueError(f"its Content-Length is {length[:40]!r}")
    size = int(length) if len(length) < 20 else _MAX_BODY_BYTES + 1
    _bound(size)
    return await reader.readexactly(size)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Read the data of a chunked body. Trailers stay unread, since the connection is not reused."""
    body = bytearray()
    while True:
        line = await reader.readuntil(b"\n")
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise ValueError(f"a chunk of its answer begins with {line[:40]!r}")
        size = int(match[1], 16)
        if not size:
            return bytes(body)
        _bound(len(body) + size)
        data = await reader.readexactly(size + 2)
        if not data.endswith(b"\r\n"):
            raise ValueError(f"a chunk of {size} bytes of its answer is followed by {data[-2:]!r}")
        body += data[:-2]


def _bound(size: int) -> None:
    if size > _MAX_BODY_BYTES:
        raise ValueError(f"its answer is longer than {_MAX_BODY_BYTES:,} bytes")


def _decoded(data: bytes) -> Any:
    """Decode a response: a JSON value, a list for a stream of JSON lines (from a pull), or else
    text."""
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


def _message(data: bytes) -> str:
    response = _decoded(data)
    message = response.get("message", response) if isinstance(response, dict) else response
    return " ".join(str(message).split())[:500]
