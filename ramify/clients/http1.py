"""Plain HTTP/1.1 to servers on one's own machines: the short way for thousands of small calls.

    post ── an idle connection, or a new one ── write the request ── wait for the whole answer ── keep the connection

Measured against the general library that serves everything else (``https.py``): half the processor time per call, and a
tenth of a second less to import, which is felt where a local model answers in milliseconds. So it does only what that
needs: no TLS, no proxies, no redirects, no compression, answers whole. It reads lengths, chunks and answers that end with
the connection; anything else is an error, never a guess.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

import msgspec

from ramify.errors import BadReply, ModelError, ReplyLost, Unreachable

_MOST_HEAD_BYTES = 1 << 16


class Answer(msgspec.Struct, frozen=True):
    """What a server sent back."""

    status: int
    headers: Mapping[str, str]
    """To be asked for in lower case."""
    body: bytes


class Origin(msgspec.Struct, frozen=True):
    """Where requests go and what they begin with."""

    host: str
    port: int
    url: str
    """For errors."""
    head: bytes
    """Request line and headers, up to and with the name of ``Content-Length``. Holds the key: never printed."""

    def __repr__(self) -> str:
        return f"Origin({self.url!r})"


class Http1:
    """Connections kept open to any number of origins. Belongs to one event loop."""

    def __init__(self, keepalive_s: float, connect_s: float, max_body_bytes: int) -> None:
        self._keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def post(self, where: str, origin: Origin, body: bytes) -> Answer:
        """The answer whatever its status; ``where`` names the model in errors."""
        connection = self._take(origin) or await self._connect(where, origin)
        try:
            answer = await connection.ask(b"%s: %d\r\n\r\n" % (origin.head, len(body)), body)
        except ModelError as error:
            raise type(error)(f"{where}: {error} ({origin.url})") from None
        finally:
            self._put(origin, connection)
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise BadReply(f"{where}: the reply is compressed, though that was not asked for ({origin.url})")
        return answer

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports notice

    def _take(self, origin: Origin) -> _Connection | None:
        """The idle connection that was used last; those that waited too long are closed."""
        idle = self._idle.get((origin.host, origin.port))
        too_old = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > too_old:
                return connection
            connection.abort()
        return None

    def _put(self, origin: Origin, connection: _Connection) -> None:
        if not connection.usable:
            return connection.abort()
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault((origin.host, origin.port), deque()).append(connection)
        return None

    async def _connect(self, where: str, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._max_body_bytes, self._open), origin.host, origin.port,
                    happy_eyeballs_delay=0.25,
                )  # fmt: skip
        except TimeoutError:
            raise Unreachable(f"{where}: cannot reach {origin.url} (no answer in {self._connect_s:g} s)") from None
        except OSError as error:
            raise Unreachable(f"{where}: cannot reach {origin.url} ({error.strerror or error})") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, max_body_bytes: int, all: set[_Connection]) -> None:
        self.idle_since = 0.0
        self._max_body_bytes = max_body_bytes
        self._all = all
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._keep = True
        self._reset()

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._keep and self._waiting is None and self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes) -> Answer:
        assert self._transport is not None
        self._reset()
        self._waiting = asyncio.get_running_loop().create_future()
        if len(body) < 65536:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        try:
            return await self._waiting
        finally:
            if not self._waiting.done() or self._waiting.cancelled():
                self._keep = False
            self._waiting = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._keep = None, False
        self._all.discard(self)
        if self._waiting is None or self._waiting.done():
            return
        if self._status and self._ends < 0 and not self._chunked and exc is None:
            self._finish(bytes(self._received[self._at :]))
        else:
            reason = f": {exc}" if exc else ""
            self._fail(ReplyLost(f"the connection broke before the reply was whole{reason}"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self._keep = False  # nothing was asked: whatever this is, it is no answer
            return
        self._received += data
        try:
            self._read()
        except ValueError as error:
            self._fail(BadReply(f"the reply is not HTTP: {error}"))

    def _reset(self) -> None:
        self._received = bytearray()
        self._at = 0
        """How far what was received has been read."""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._ends = -1
        """Where the body ends; -1 where its length is not known before."""
        self._chunked = False
        self._chunks: list[bytes] = []
        self._size = 0

    def _read(self) -> None:
        while not self._status:
            if not self._read_head():
                return
        if self._chunked:
            self._read_chunks()
        elif self._ends >= 0 and len(self._received) >= self._ends:
            self._keep = self._keep and len(self._received) == self._ends
            self._finish(bytes(self._received[self._at : self._ends]))
        else:
            self._bound(len(self._received) - self._at)

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self._received) - self._at > _MOST_HEAD_BYTES:
                raise ValueError(f"headers of more than {_MOST_HEAD_BYTES} bytes")
            return False
        first, *lines = self._received[self._at : end].decode("latin-1").split("\r\n")
        self._at = end + 4
        version, _, rest = first.partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not status.isdigit():
            raise ValueError(f"it begins with {first[:40]!r}")
        if status[0] == "1":
            return True  # an interim answer; the real one follows
        headers = self._headers
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._status = int(status)
        self._frame(version)
        return True

    def _frame(self, version: str) -> None:
        """How the body is delimited, and whether the connection may be used again."""
        headers = self._headers
        connection = headers.get("connection", "").lower()
        self._keep = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
        length = headers.get("content-length")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunked = True
        elif self._status in (204, 304):
            self._ends = self._at
        elif length is not None:
            if not length.isdigit():
                raise ValueError(f"its Content-Length is {length[:40]!r}")
            self._bound(int(length))
            self._ends = self._at + int(length)
        else:
            self._keep = False

    def _read_chunks(self) -> None:
        while not self._waiting_is_over():
            end = self._received.find(b"\r\n", self._at)
            if end < 0:
                return
            size = int(self._received[self._at : end].split(b";")[0], 16)
            if size == 0:
                self._read_trailers(end)
                return
            start, stop = end + 2, end + 2 + size
            self._bound(self._size + size)
            if len(self._received) < stop + 2:
                return
            self._chunks.append(bytes(self._received[start:stop]))
            self._size += size
            del self._received[: stop + 2]
            self._at = 0

    def _read_trailers(self, end: int) -> None:
        """After the last chunk come header lines that nobody needs, and an empty one."""
        closing = end if self._received[end : end + 4] == b"\r\n\r\n" else self._received.find(b"\r\n\r\n", end)
        if closing >= 0:
            self._keep = self._keep and len(self._received) == closing + 4
            self._finish(b"".join(self._chunks))

    def _bound(self, size: int) -> None:
        if size > self._max_body_bytes:
            self._fail(BadReply(f"the reply is longer than {self._max_body_bytes} bytes; lower max_tokens"))

    def _waiting_is_over(self) -> bool:
        return self._waiting is None or self._waiting.done()

    def _finish(self, body: bytes) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(Answer(self._status, self._headers, body))

    def _fail(self, error: ModelError) -> None:
        self._keep = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.abort()
