"""A small HTTP/1.1 server for scripted models in tests.

It reads complete requests, and can send broken responses on purpose.

It keeps connections alive, accepts bodies with a ``Content-Length``, and can break the protocol on
purpose: close a connection before or in the middle of a response. A response can be sent piece by
piece. There are no chunked requests and no tasks. A request costs some tens of microseconds, so a
benchmark measures its client rather than this server. Use it on loopback only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus

from ramify.errors import ConfigError

_MOST_HEAD_BYTES = 1 << 16
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class PendingMockRequest:
    """A request to the mock server that is waiting for its response.

    The handler must respond exactly once, now or later.
    """

    __slots__ = ("_connection", "body", "headers", "method", "path")

    def __init__(
        self, connection: _Connection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        self._connection = connection
        self.method = method
        self.path = path
        """Path of the request, including the query string."""
        self.headers = headers
        """Headers of the request, by lower-case name."""
        self.body = body

    def send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        """Send the complete response to this request.

        Does nothing if the client has disconnected.
        """
        further = (
            "".join(f"{name}: {value}\r\n" for name, value in headers.items()) if headers else ""
        )
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n{further}\r\n"
        )
        self._connection.answer(head.encode("latin-1") + body)

    @property
    def is_open(self) -> bool:
        """False once the client has disconnected."""
        return self._connection.is_open

    def begin_streamed_response(self, content_type: str) -> None:
        """Begin a response with status 200 whose body is sent in pieces.

        Call ``end`` after the last piece.
        """
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._connection.write(head.encode("latin-1"))

    def send_piece(self, data: bytes) -> None:
        """Send the next piece of the body of a response.

        Does nothing if the client has disconnected.
        """
        self._connection.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self._connection.answer(b"0\r\n\r\n")

    def drop(self, beginning: bytes = b"") -> None:
        """Close the connection without a complete response.

        If ``beginning`` is given, it is sent first, as the start of a longer body.
        """
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        self._connection.close(head + beginning if beginning else b"")


class MockHttpServer:
    """A small HTTP server for tests that passes each request to the function ``handle``."""

    def __init__(
        self,
        handle: Callable[[PendingMockRequest], None],
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.host = host
        self.port = port
        """Port of the server. If it was given as 0, meaning any free port, it stays 0 until the
        server listens."""
        self._handle = handle
        self._tls = tls
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self._handle, self._connections),
                self.host,
                self.port,
                backlog=1024,
                ssl=self._tls,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror}): choose another port"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def num_open_connections(self) -> int:
        """The number of connections that are currently open."""
        return len(self._connections)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            await self._server.wait_closed()
            await asyncio.sleep(0)  # lets the connections notice that they are closed


class _Connection(asyncio.Protocol):
    def __init__(self, handle: Callable[[PendingMockRequest], None], all: set[_Connection]) -> None:
        self._handle = handle
        self._all = all
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._ends = 0
        """Index in the received bytes at which the current request's body ends. It is set once the
        header has been read."""
        self._starts = 0
        self._busy = False
        self._is_reading = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._all.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._read()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answer(self, data: bytes) -> None:
        self._busy = False
        if self._transport is not None:
            self._transport.write(data)
            if not self._is_reading:
                self._read()

    def close(self, last: bytes = b"") -> None:
        if self._transport is not None:
            if last:
                self._transport.write(last)
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _read(self) -> None:
        """Read the received requests one by one, stopping after one that is still unanswered."""
        self._is_reading = True
        while self._received and not self._busy and self._read_request():
            pass
        self._is_reading = False

    def _read_request(self) -> bool:
        """Read one complete request from the received bytes, and pass it to the handler.

        Returns False if no complete request has arrived yet.
        """
        if self._head is None and not self._read_head():
            return False
        if len(self._received) < self._ends:
            return False
        assert self._head is not None
        body = bytes(self._received[self._starts : self._ends])
        del self._received[: self._ends]
        exchange = PendingMockRequest(self, *self._head, body)
        self._head, self._busy = None, True
        self._handle(exchange)
        return True

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n", 0, _MOST_HEAD_BYTES)
        if end < 0:
            if len(self._received) > _MOST_HEAD_BYTES:
                self._refuse(431)
            return False
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip(" \t")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        parts = first.split(" ")
        length = headers.get("content-length", "0")
        if len(parts) != 3 or not (length.isascii() and length.isdigit() and len(length) < 20):
            return self._refuse(400)
        if "transfer-encoding" in headers:
            return self._refuse(411)
        if "expect" in headers and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._head = (parts[0], parts[1], headers)
        self._starts, self._ends = end + 4, end + 4 + int(length)
        return True

    def _refuse(self, status: int) -> bool:
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
            "Content-Length: 0\r\nConnection: close\r\n\r\n"
        )
        self.close(head.encode())
        return False
