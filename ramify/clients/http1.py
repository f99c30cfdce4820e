"""HTTP requests to models: their routes, the connections, and our own HTTP/1.1 client.

    http://, no proxy   ── Http1Client  servers on the user's own machines
    everything else     ── https.py     aiohttp: TLS, proxies, compression

    post ── idle or new connection ── send the request ── read the whole response ── keep it open

Compared with the general client (``https.py``), ours takes half the CPU time per call and a tenth
of a second less to import, which matters if a local model answers within milliseconds. It supports
only what that needs: no TLS, proxies or redirects, and only complete responses. It reads bodies
delimited by length, by chunks or by the end of the connection, and unpacks gzip and deflate, which
some gateways send unasked. Anything else is an error, never a guess. Not here: proxies
(see ``addresses.py``), what a request and a reply contain (see ``chat_json.py``), and retries (see
``pool.py``).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from ramify.clients.addresses import proxy_for
from ramify.clients.compression import too_long, unpack
from ramify.errors import BadReply, ModelError, ReplyLost, Unreachable

if TYPE_CHECKING:
    from ramify.clients.https import HttpsClient

_MOST_HEAD_BYTES = 1 << 16
"""Limit for the head with the interim replies before it, and for all chunk extensions and
trailers."""
_MOST_HEADERS = 256
_MOST_INTERIM = 16
_MOST_LINE_BYTES = 1 << 13
"""Limit for the first line of a chunk, and for a trailer."""
_MOST_DIGITS = 18
_ENDLESS = 10**_MOST_DIGITS
"""Stands for every length with more digits; larger than any limit."""
_KEEPALIVE_S = 4.0
"""Common servers close idle connections after five seconds; no request may be sent then."""
_CONNECT_S = 30.0
_MAX_BODY_BYTES = 64 << 20
_JSON = "application/json"
_HEADERS = {"User-Agent": "ramify", "Content-Type": _JSON, "Accept": _JSON}
_NAME = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT = r"[^\r\n\0]*"
_STATUS = re.compile(rf"HTTP/1\.[0-9] [1-9][0-9]{{2}}(?: {_TEXT})?")
_HEADER = re.compile(f"{_NAME}:{_TEXT}")
_HEAD = re.compile(rf"{_STATUS.pattern}(?:\r\n{_HEADER.pattern})*")
_FOLD = re.compile(r"\r\n[ \t]+")
"""A header that continues on the next line: obsolete, and read as a space (RFC 9112, 5.2)."""
_ALONE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")
_CHUNK = re.compile(rf"([0-9A-Fa-f]{{1,16}})(?:[ \t]*;{_TEXT})?\r\n".encode())
_TRAILER = re.compile(rf"({_HEADER.pattern}|)\r\n".encode())
_DIGITS = re.compile("[0-9]+")


class HttpResponse(msgspec.Struct, frozen=True):
    """Response of a server."""

    status: int
    headers: Mapping[str, str]
    """Headers; look them up by lower-case name."""
    body: bytes


class RequestRoute(msgspec.Struct, frozen=True):
    """Destination of one client's requests, computed once so that a request needs no lookup."""

    url: str
    headers: dict[str, str]
    """Includes the key, so it is never printed."""
    proxy: str | None
    host: str = ""
    port: int = 80
    head: bytes = b""
    """Request line and headers, up to and including the name ``Content-Length``, if
    ``Http1Client`` can send the requests; otherwise ``https.py`` does. Never printed."""

    def __repr__(self) -> str:
        return f"Route({self.url!r})"


def route_to(url: str, headers: dict[str, str]) -> RequestRoute:
    """Return the route to ``url`` under the current environment."""
    proxy, headers = proxy_for(url), {**_HEADERS, **headers}
    parts = urlsplit(url)
    if parts.scheme != "http" or proxy or parts.username is not None or not url.isascii():
        return RequestRoute(url, headers, proxy)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {"Host": parts.netloc, **headers}
    lines = [f"{name}: {value}" for name, value in fields.items()]
    head = "\r\n".join([f"POST {target} HTTP/1.1", *lines, "Content-Length"]).encode("latin-1")
    return RequestRoute(url, headers, None, parts.hostname or "", parts.port or 80, head)


class HttpConnectionPool:
    """HTTP connection pool. Bound to the event loop of its first request."""

    def __init__(self) -> None:
        self._http = Http1Client(_KEEPALIVE_S, _CONNECT_S, _MAX_BODY_BYTES)
        self._https: HttpsClient | None = None

    def sender(self, route: RequestRoute) -> Http1Client | HttpsClient:
        """Return the client whose ``post`` sends requests along ``route``."""
        if route.head:
            return self._http
        if self._https is None:
            from ramify.clients.https import HttpsClient

            self._https = HttpsClient(_KEEPALIVE_S, _CONNECT_S, _MAX_BODY_BYTES)
        return self._https

    async def close(self) -> None:
        await self._http.close()
        if self._https is not None:
            https, self._https = self._https, None
            await https.close()


def _reason(error: OSError) -> str:
    """Return why a connection failed. An error about several addresses has no number itself."""
    number = error.errno or next(map(int, re.findall(r"\[Errno (\d+)\]", str(error))), 0)
    return os.strerror(number).lower() if number > 0 else error.strerror or str(error)


class Http1Client:
    """Keeps connections open to any number of origins. Belongs to one event loop."""

    def __init__(self, keepalive_s: float, connect_s: float, max_body_bytes: int) -> None:
        self._keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def post(self, where: str, route: RequestRoute, body: bytes) -> HttpResponse:
        """Send ``body`` and return the response, whatever its status. ``where`` names the model in
        errors."""
        connection = self._take(route) or await self._connect(where, route)
        try:
            answer = await connection.ask(b"%s: %d\r\n\r\n" % (route.head, len(body)), body)
            encoding = answer.headers.get("content-encoding")
            if encoding is None:
                return answer
            unpacked = unpack(answer.body, encoding.lower(), self._max_body_bytes)
            return msgspec.structs.replace(answer, body=unpacked)
        except ModelError as error:
            located = type(error)(f"{where}: {error} ({route.url})")
            located.transient = error.transient
            raise located from None
        finally:
            self._put(route, connection)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports notice

    def _take(self, route: RequestRoute) -> _Connection | None:
        """Return the most recently used idle connection and close those that were idle too long."""
        idle = self._idle.get((route.host, route.port))
        too_old = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > too_old:
                return connection
            connection.abort()
        return None

    def _put(self, route: RequestRoute, connection: _Connection) -> None:
        if connection.usable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.setdefault((route.host, route.port), deque()).append(connection)
        else:
            connection.abort()

    async def _connect(self, where: str, route: RequestRoute) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._max_body_bytes, self._open),
                    route.host,
                    route.port,
                    happy_eyeballs_delay=0.25,
                )
        except TimeoutError:
            raise Unreachable(
                f"{where}: cannot reach {route.url} (no answer in {self._connect_s:g} s)"
            ) from None
        except OSError as error:
            raise Unreachable(f"{where}: cannot reach {route.url} ({_reason(error)})") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection that handles one request at a time."""

    def __init__(self, max_body_bytes: int, all: set[_Connection]) -> None:
        self.idle_since = 0.0
        self._max_body_bytes = max_body_bytes
        self._all = all
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[HttpResponse] | None = None
        self._keep = True
        self._reset()

    @property
    def usable(self) -> bool:
        """True if another request can be sent."""
        return (
            self._keep
            and self._waiting is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    async def ask(self, head: bytes, body: bytes) -> HttpResponse:
        if self._transport is None:
            raise Unreachable("the server closed the connection before the request was sent")
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
            self._keep = False  # no request is pending, so these bytes are not a reply
            self.abort()
            return
        self._received += data
        try:
            self._read()
        except ValueError as error:
            self._fail(BadReply(f"the reply is not HTTP: {error}"))
        except BadReply as error:
            self._fail(error)

    def _reset(self) -> None:
        self._received = bytearray()
        self._at = 0
        """Number of received bytes that have been parsed."""
        self._search_from = 0
        """Index at which to search for the end of the head."""
        self._interim = 0
        """Number of 1xx replies before the final one."""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._ends = -1
        """Index at which the body ends; -1 if its length is not known in advance."""
        self._chunked = False  # further state for chunks is set when they begin

    def _read(self) -> None:
        while not self._status:
            if not self._read_head():
                return
        if self._chunked:
            self._read_chunks()
        elif self._ends >= 0:
            if len(self._received) >= self._ends:
                self._keep = self._keep and len(self._received) == self._ends
                self._finish(bytes(self._received[self._at : self._ends]))
        else:
            self._bound(len(self._received) - self._at)

    # --- the head --------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n", self._search_from)
        if (len(self._received) if end < 0 else end) > _MOST_HEAD_BYTES:
            raise ValueError(f"headers of more than {_MOST_HEAD_BYTES} bytes")
        if end < 0:
            self._check_head_so_far()
            return False
        head = self._received[self._at : end].decode("latin-1")
        self._at = self._search_from = end + 4
        if not _HEAD.fullmatch(head):
            head = _unfolded(head)
        lines, status = head.split("\r\n"), int(head[9:12])
        if status >= 200:
            self._status = status
            self._take_headers(lines)
            self._frame(head[:8])
            return True
        self._interim += 1
        if status == 101:
            raise ValueError("it switches to a protocol that was not asked for (status 101)")
        if self._interim > _MOST_INTERIM:
            raise ValueError(f"more than {_MOST_INTERIM} interim replies")
        return True  # the final reply follows

    def _check_head_so_far(self) -> None:
        """Raise ValueError if the head can no longer become valid, because its end may never
        arrive."""
        begin = bytes(self._received[self._at : self._at + 40])
        if not (begin.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(begin)):
            raise ValueError(f"it begins with {begin!r}")
        if alone := _ALONE.search(self._received, self._search_from):
            raise ValueError(f"its headers have a {alone[0][:1]!r} that is not part of a CR LF")
        self._search_from = max(self._at, len(self._received) - 3)

    def _take_headers(self, lines: list[str]) -> None:
        if len(lines) > _MOST_HEADERS + 1:
            raise ValueError(f"more than {_MOST_HEADERS} headers")
        headers = self._headers
        for line in lines[1:]:
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip(" \t")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value

    def _frame(self, version: str) -> None:
        """Determine how the body is delimited and whether the connection can be reused."""
        headers = self._headers
        connection = _list_items(headers["connection"]) if "connection" in headers else ()
        self._keep = "close" not in connection and (
            version == "HTTP/1.1" or "keep-alive" in connection
        )
        if self._status in (204, 304):
            self._ends = self._at  # never a body, whatever the headers say
        elif "transfer-encoding" in headers:
            if "content-length" in headers:
                raise ValueError("it has both Transfer-Encoding and Content-Length")
            if _list_items(headers["transfer-encoding"]) != ["chunked"]:
                raise ValueError(f"its Transfer-Encoding is {headers['transfer-encoding'][:40]!r}")
            self._keep = self._keep and version != "HTTP/1.0"
            self._begin_chunks()
        elif "content-length" in headers:
            self._ends = self._at + self._length(headers["content-length"])
        else:
            self._keep = False

    def _begin_chunks(self) -> None:
        self._chunked = True
        self._in_trailers = False
        self._overhead = 0
        """Bytes of chunk extensions and trailers. They are ignored, but their total is limited."""
        self._body = bytearray()
        """Chunk data received so far."""
        del self._received[: self._at]
        self._at = 0

    def _length(self, value: str) -> int:
        """Return the number of bytes of the body. The same length given twice is accepted; anything
        else is an error."""
        if len(value) <= _MOST_DIGITS and _DIGITS.fullmatch(value):  # the usual case
            self._bound(int(value))
            return int(value)
        lengths = {length.strip(" \t") for length in value.split(",")}
        length = lengths.pop()
        if lengths or not _DIGITS.fullmatch(length):
            raise ValueError(f"its Content-Length is {value[:40]!r}")
        significant = length.lstrip("0")
        size = int(significant or "0") if len(significant) <= _MOST_DIGITS else _ENDLESS
        self._bound(size)
        return size

    # --- chunks ----------------------------------------------------------------------------------

    def _read_chunks(self) -> None:
        """Move complete chunks from the received bytes to the body, one per iteration."""
        received, at = self._received, 0
        while not self._in_trailers:
            match = _CHUNK.match(received, at)
            if match is None:
                self._check_line(at)
                break
            start, size = match.end(), int(match[1], 16)
            stop = start + size
            if size:
                self._bound(len(self._body) + size)
                end = received[stop : stop + 2]
                if not b"\r\n".startswith(end):
                    raise ValueError(f"a chunk of {size} bytes is followed by {bytes(end)!r}")
                if len(end) < 2:
                    break
                self._body += received[start:stop]
            if start - match.end(1) > 2:
                self._count_overhead(start - match.end(1) - 2)
            self._in_trailers, at = not size, stop + 2 if size else start
        del received[:at]
        if self._in_trailers:
            self._read_trailers()

    def _read_trailers(self) -> None:
        """Skip the trailers after the last chunk, up to the empty line."""
        at = 0
        while trailer := _TRAILER.match(self._received, at):
            at = trailer.end()
            if not trailer[1]:
                self._keep = self._keep and len(self._received) == at
                return self._finish(bytes(self._body))
            self._count_overhead(len(trailer[0]))
        self._check_line(at)
        del self._received[:at]
        return None

    def _check_line(self, at: int) -> None:
        """Raise ValueError if no valid line starts at ``at`` although the line is complete or too
        long."""
        line, newline, _ = bytes(self._received[at : at + _MOST_LINE_BYTES]).partition(b"\n")
        if newline:
            raise ValueError(f"its chunks have the line {(line + newline)[:40]!r}")
        if len(line) == _MOST_LINE_BYTES:
            raise ValueError(f"a line of more than {_MOST_LINE_BYTES} bytes")

    def _count_overhead(self, size: int) -> None:
        self._overhead += size
        if self._overhead > _MOST_HEAD_BYTES:
            raise ValueError(f"chunk extensions and trailers of more than {_MOST_HEAD_BYTES} bytes")

    # --- the end ---------------------------------------------------------------------------------

    def _bound(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise too_long(self._max_body_bytes)

    def _finish(self, body: bytes) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(HttpResponse(self._status, self._headers, body))

    def _fail(self, error: ModelError) -> None:
        self._keep = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.abort()


def _list_items(value: str) -> list[str]:
    """Return the elements of a list-valued header in lower case."""
    return [word for item in value.lower().split(",") if (word := item.strip(" \t"))]


def _unfolded(head: str) -> str:
    """Return ``head`` with each folded header on one line. Raises ValueError if it is malformed."""
    head = _FOLD.sub(" ", head)
    first, *lines = head.split("\r\n")
    if not _STATUS.fullmatch(first):
        raise ValueError(f"it begins with {first[:40]!r}")
    for line in lines:
        if not _HEADER.fullmatch(line):
            raise ValueError(f"a header is {line[:40]!r}")
    return head
