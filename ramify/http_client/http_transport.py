"""An HTTP/1.1 client for requests to model servers, over plain connections, TLS and proxies.

    async with pool.send(model, route, body) as response:      LiveHttpExchange
        await response.read()                                  the whole response, or
        while data := await response.receive(): …              its body as it arrives

    send ── idle or new connection ── head and body ── head of the response ── its body ── keep it
                    └─ TCP ── CONNECT, through a proxy ── TLS

Every part of Ramify that is an HTTP client uses this module: the clients of model APIs, those of
inference engines, and that of a container engine behind a Unix socket, which turns a connection
into a plain stream. The ``httptools`` package checks the syntax of responses. This module decides
how bodies are delimited, which sizes are limited, and when a connection may be reused: only after a
complete response, and only if no unsolicited bytes have arrived on it. A request that is cancelled
or fails closes its connection, so that a late response can never answer another request. Redirects
are not followed. A body is decompressed if a gateway compressed it without being asked. Any other
deviation is an error.

Certificate authorities are handled in ``tls.py``, and proxies in ``urls_and_proxies.py``. What
requests and replies contain, time-outs of replies, and retries are up to the clients.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

import httptools
import msgspec

from ramify.errors import ConfigError, MalformedResponse, ModelError, ReplyLostError, Unreachable
from ramify.http_client.decompression import HttpBodyDecompressor, body_too_long_error
from ramify.http_client.tls import tls_context, tls_failure
from ramify.http_client.urls_and_proxies import proxy_for, proxy_variable_name

_MOST_HEAD_BYTES = 1 << 16
"""Maximum bytes of a response's head, including any interim responses before it."""
_MOST_HEADERS = 256
_MOST_INTERIM = 16
_MOST_CHUNK_OVERHEAD_BYTES = 1 << 13
"""Maximum bytes of all chunk extensions, superfluous zeros and trailers in a body."""
_CHUNK_FRAME_BYTES = 24
"""Bytes of the longest chunk frame without extensions: 16 digits and three line ends."""
_UNREAD_BYTES = 1 << 20
"""Maximum unread bytes of a streamed body. Beyond them, receiving pauses."""
_PIECE_BYTES = 1 << 18
"""Size in bytes of the pieces in which a body is sent. Small pieces keep encryption from blocking
the event loop."""
_PACKED_PIECE_BYTES = 1 << 14
"""Bytes of a compressed, streamed body that are decompressed at once. They can expand to 16 MB."""
_JSON = "application/json"
_HEADERS = {"User-Agent": "ramify", "Accept": _JSON}
_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [\t\x20-\x7e\x80-\xff]*")
# Checked here, because the parser also takes HTTP/2.0, RTSP, ICE and blank lines before the head.
_STARTS = b"HTTP/1."
_TLS_ALERT = b"\x15\x03"


Method = Literal["GET", "POST", "DELETE"]


class HttpResponse(msgspec.Struct, frozen=True):
    """A complete HTTP response: status, headers and body."""

    status: int
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: bytes


class HttpRequestTarget(msgspec.Struct, frozen=True):
    """The target of an HTTP client's requests: the server's URL, the method and the headers.

    It is computed once per client to keep single requests cheap.
    """

    url: str
    method: Method
    origin: tuple[str, str, int, str]
    """(scheme, host, port, proxy) of the server, or ("unix", socket path, 0, ""). Requests with the
    same origin share connections."""
    head: bytes
    """Request line and headers, without Content-Length. They contain the API key, so this is never
    printed."""
    connect: bytes = b""
    """CONNECT request to the proxy, if one is needed. It may contain the proxy's password."""

    def __repr__(self) -> str:
        return f"HttpRequestTarget({self.url!r})"


def route_to(
    url: str,
    headers: Mapping[str, str],
    method: Method = "POST",
    *,
    through_proxy: bool = True,
) -> HttpRequestTarget:
    """Return the destination for requests to ``url``.

    They go through the proxy that the environment sets. With ``through_proxy=False`` any proxy is
    ignored. Raises ConfigError for a header that cannot be sent.
    """
    parts = urlsplit(url)
    host = _ascii_host(parts.hostname or "")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    proxy = (proxy_for(url) if through_proxy else None) or ""
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    target += f"?{quote(parts.query, safe='/?%:@!$&()*+,;=~')}" if parts.query else ""
    bracketed = f"[{host}]" if ":" in host else host
    shown = f"{bracketed}:{parts.port}" if parts.port else bracketed
    kind = {"Content-Type": _JSON} if method == "POST" else {}
    fields = {"Host": shown, **_HEADERS, **kind, **headers}
    connect, for_proxy = b"", _proxy_headers(proxy) if proxy else {}
    if proxy and parts.scheme == "https":
        place = f"{bracketed}:{port}"
        connect = _head(f"CONNECT {place} HTTP/1.1", {"Host": place, **for_proxy}) + b"\r\n"
    elif proxy:
        target, fields = f"http://{shown}{target}", fields | for_proxy
    head = _head(f"{method} {target} HTTP/1.1", fields)
    return HttpRequestTarget(url, method, (parts.scheme, host, port, proxy), head, connect)


def route_to_socket(
    path: str, target: str, headers: Mapping[str, str], method: Method
) -> HttpRequestTarget:
    """Return the destination for requests to a server behind a Unix socket.

    ``path`` is the path of the socket. ``target`` is the request's path and query, already quoted.
    """
    head = _head(f"{method} {target} HTTP/1.1", {"Host": "localhost", **_HEADERS, **headers})
    return HttpRequestTarget(f"unix:{path}", method, ("unix", path, 0, ""), head)


def _ascii_host(host: str) -> str:
    try:
        return host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        raise ConfigError(f"'{host}' is not a host name") from None


def _head(line: str, fields: Mapping[str, str]) -> bytes:
    lines = {"": line}
    for name, value in fields.items():
        # The error does not show the value, because it may be a key.
        if not _HEADER.fullmatch(text := f"{name}: {value}"):
            raise ConfigError(
                f"the header {name!r:.60} contains characters that cannot be sent; copy it again"
            )
        lines[name.lower()] = text  # the caller's headers are last, so they replace ours
    return "".join(f"{each}\r\n" for each in lines.values()).encode("latin-1")


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _shown_proxy(proxy: str) -> str:
    """Return a proxy's URL without its credentials, for use in messages."""
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


ChooseAddresses = Callable[[str, Sequence[str]], Sequence[str]]
"""Function that takes a host name and its IP addresses, and returns the addresses to which
connections are allowed, at least one. Any exception that it raises ends the request. Names are
resolved only once, so no other address can be used."""


class HttpConnectionPool:
    """A pool of open connections to any number of servers.

    Later requests reuse idle connections. The pool belongs to the event loop of its first request.
    """

    def __init__(
        self,
        keepalive_s: float = 4.0,
        connect_s: float = 30.0,
        max_body_bytes: int = 64 << 20,
        choose_addresses: ChooseAddresses | None = None,
    ) -> None:
        """Create a pool that has no open connections yet.

        ``connect_s`` limits the seconds to connect, including proxy and TLS. Connections idle for
        ``keepalive_s`` seconds are not reused, because common servers close them after five
        seconds. ``choose_addresses`` selects which addresses of a server may be used, except for
        requests through a proxy.
        """
        self._keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._choose_addresses = choose_addresses
        self._idle: dict[tuple[str, str, int, str], deque[_Connection]] = {}
        self._open: set[_Connection] = set()

    def prepare_exchange(
        self,
        where: str,
        route: HttpRequestTarget,
        body: bytes = b"",
        max_body_bytes: int | None = None,
        *,
        upgrades: bool = False,
    ) -> LiveHttpExchange:
        """Prepare an HTTP exchange, which sends its request on entry to its ``async with`` block.

        ``where`` names the server in errors. ``max_body_bytes`` lowers the pool's limit for this
        response. ``upgrades`` allows status 101, after which the caller takes over the connection.
        """
        most = min(self._max_body_bytes, max_body_bytes or self._max_body_bytes)
        return LiveHttpExchange(self, where, route, body, most, upgrades)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        for _ in range(5):  # transports close in the loop's next iterations; TLS needs several
            await asyncio.sleep(0)

    async def acquire(self, where: str, route: HttpRequestTarget) -> _Connection:
        """Take the most recently used idle connection to a server, or open a new one."""
        idle = self._idle.get(route.origin)
        too_old = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if connection.idle_since > too_old and connection.is_quiet():
                return connection
            connection.abort()
        return await self._connect(where, route)

    def put_back(self, route: HttpRequestTarget, connection: _Connection) -> None:
        """Return a connection to the pool for another request, once its response is complete."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(route.origin, deque()).append(connection)

    async def _connect(self, where: str, route: HttpRequestTarget) -> _Connection:
        scheme, host, _, proxy = route.origin
        through = f" through the proxy {_shown_proxy(proxy)}" if proxy else ""
        hint = (
            f"; set {proxy_variable_name(route.url)}, or name {host} in NO_PROXY" if proxy else ""
        )
        text = f"{where}: cannot reach {route.url}{through}"
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._open_connection(route)
        except TimeoutError:
            if scheme == "https" and not proxy:
                hint = "; if the server does not speak TLS at this port, write http://"
            reason = f"no answer in {self._connect_s:g} s"
            raise _unreachable_error(f"{text} ({reason}){hint}", reason) from None
        except _ProxyRefused as error:
            failure = _unreachable_error(f"{text} ({error}){hint}", str(error))
            failure.transient = error.transient
            raise failure from None
        except ssl.SSLError as error:
            reason, what_to_do = tls_failure(error)
            failure = _unreachable_error(
                f"{where}: no trusted connection to {route.url}{through} ({reason}); {what_to_do}",
                f"no trusted connection: {reason}",
            )
            failure.transient = isinstance(error, ssl.SSLEOFError)
            raise failure from error
        except OSError as error:
            broke = scheme == "https" and isinstance(error, ConnectionError) and not error.errno
            reason = "the connection closed while TLS was set up" if broke else _reason(error)
            raise _unreachable_error(f"{text} ({reason}){hint}", reason) from error

    async def _open_connection(self, route: HttpRequestTarget) -> _Connection:
        """Open a connection to the server, through a proxy and with TLS if necessary."""
        loop = asyncio.get_running_loop()
        scheme, host, port, proxy = route.origin
        if scheme == "unix":
            return (await loop.create_unix_connection(lambda: _Connection(self._open), host))[1]
        near, near_host, near_port = scheme, host, port
        if proxy:
            parts = urlsplit(proxy)
            near, near_host = parts.scheme, _ascii_host(parts.hostname or "")
            near_port = parts.port or (443 if near == "https" else 80)
        failure: OSError = ConnectionRefusedError()
        tls = await asyncio.to_thread(tls_context) if "https" in (scheme, near) else None
        is_chosen = self._choose_addresses is not None and not proxy
        addresses = await self._addresses(host, port) if is_chosen else [near_host]
        for address in addresses:
            try:
                async with asyncio.timeout(self._connect_s / len(addresses)):
                    transport, connection = await loop.create_connection(
                        lambda: _Connection(self._open),
                        address,
                        near_port,
                        ssl=tls if near == "https" else None,
                        server_hostname=near_host if near == "https" else None,
                        ssl_handshake_timeout=self._connect_s if near == "https" else None,
                        happy_eyeballs_delay=0.25,
                    )
                break
            except OSError as error:  # also of the time-out
                failure = error
        else:
            raise failure
        if not route.connect:
            return connection
        try:
            await connection.tunnel(route.connect)
            secured = _Connection(self._open)
            connection.replaced()
            assert tls is not None
            upgraded = await loop.start_tls(
                transport,
                secured,
                tls,
                server_hostname=host,
                ssl_handshake_timeout=self._connect_s,
            )
            # start_tls returns None if the connection was lost right after the handshake.
            if upgraded is None:
                raise ConnectionResetError
            # start_tls does not call this, as the connection is not new to asyncio.
            secured.connection_made(upgraded)
            return secured
        except BaseException:
            transport.abort()
            raise

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        """Look up a host name, and return the IP addresses to which connections are allowed."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        assert self._choose_addresses is not None
        return self._choose_addresses(host, list(dict.fromkeys(str(each[4][0]) for each in found)))


def _unreachable_error(message: str, reason: str) -> Unreachable:
    failure = Unreachable(message)
    failure.reason = reason
    return failure


def _reason(error: OSError) -> str:
    """Describe in words why a connection to a server failed.

    If several addresses were tried, the error number is read from the text, because the error then
    has no ``errno``.
    """
    number = error.errno or next(map(int, re.findall(r"\[Errno (\d+)\]", str(error))), 0)
    return os.strerror(number).lower() if number > 0 else error.strerror or str(error)


class _ProxyRefused(Exception):
    """Raised when a proxy refuses to open a connection to the server."""

    def __init__(self, text: str, *, transient: bool) -> None:
        super().__init__(text)
        self.transient = transient


class LiveHttpExchange:
    """One HTTP request and its response.

    Entering the ``async with`` block sends the request and waits for the response's head. Leaving
    it returns the connection to the pool if the response is complete, and closes the connection
    otherwise.
    """

    status: int
    headers: dict[str, str]
    """Headers by lower-case name."""

    def __init__(
        self,
        pool: HttpConnectionPool,
        where: str,
        route: HttpRequestTarget,
        body: bytes,
        max_body_bytes: int,
        upgrades: bool,
    ) -> None:
        self._pool = pool
        self._where = where
        self._route = route
        self._body = body
        self._max_body_bytes = max_body_bytes
        self._unpacker: HttpBodyDecompressor | None = None
        self._reader = HttpResponseParser(max_body_bytes)
        self._reader.may_upgrade = upgrades
        self._connection: _Connection | None = None

    async def __aenter__(self) -> LiveHttpExchange:
        connection = await self._pool.acquire(self._where, self._route)
        self._connection, reader = connection, self._reader
        try:
            head = self._route.head
            if self._body or self._route.method == "POST":
                head += b"Content-Length: %d\r\n" % len(self._body)
            await connection.ask(head + b"\r\n", self._body, reader)
            while not reader.status:
                await connection.more()
            self.status, self.headers = reader.status, reader.headers
            encoding = reader.headers.get("content-encoding", "").lower()
            if encoding not in ("", "identity"):
                self._unpacker = HttpBodyDecompressor(encoding, self._max_body_bytes)
        except ModelError as error:
            self._end()
            raise self._add_location(error) from None
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._end()

    @property
    def is_complete(self) -> bool:
        """True once the whole response body has arrived."""
        return self._reader.is_complete

    async def read(self) -> HttpResponse:
        """Wait until the whole response body has arrived, and return the complete response."""
        connection, reader = self._connection, self._reader
        assert connection is not None
        try:
            while not reader.is_complete:
                await connection.more()
            body = reader.take()
            if self._unpacker is not None:
                # Unpacking may take long, and zlib releases the interpreter's lock.
                body = await asyncio.to_thread(self._unpacker.feed, body)
                self._unpacker.check_complete()
        except ModelError as error:
            raise self._add_location(error) from None
        return HttpResponse(self.status, self.headers, body)

    async def receive(self) -> bytes:
        """Return the next part of the response body as soon as it arrives, or b"" at its end.

        The length of the whole body is unlimited, but the server is throttled while much of it is
        unread.
        """
        connection, reader = self._connection, self._reader
        assert connection is not None
        connection.streams()
        try:
            while True:
                while not (reader.unread or reader.is_complete):
                    await connection.more()
                data = reader.take(_PACKED_PIECE_BYTES if self._unpacker is not None else None)
                is_last = reader.is_complete and not reader.unread
                if self._unpacker is not None and data:
                    data = self._unpacker.feed(data)
                    is_last = False  # its end is checked by the next call
                elif self._unpacker is not None:
                    self._unpacker.check_complete()
                if data or is_last:
                    return data
        except ModelError as error:
            raise self._add_location(error) from None

    def take_over(self) -> tuple[asyncio.Transport, bytes]:
        """Detach the connection from this exchange, for use as a plain byte stream.

        Returns the transport and the bytes that have already arrived. The caller sets the
        transport's protocol and closes it.

        Raises MalformedResponse unless the response has status 101 or a body that ends only when
        the connection closes.
        """
        connection, reader = self._connection, self._reader
        assert connection is not None
        if not (reader.is_upgraded or reader.ends_with_connection):
            raise self._add_location(
                _malformed_response("the connection does not become a plain stream")
            )
        transport = connection.transport
        if transport is None:
            raise self._add_location(
                ReplyLostError("the connection broke before the reply was whole")
            )
        self._connection = None
        connection.replaced()
        return transport, reader.take()

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.finish():
            self._pool.put_back(self._route, connection)
        else:
            connection.abort()

    def _add_location(self, error: ModelError) -> ModelError:
        located = type(error)(f"{self._where}: {error} ({self._route.url})")
        located.transient = error.transient
        return located


class _Connection(asyncio.Protocol):
    """A network connection of the HTTP client to a server.

    It handles one request at a time.
    """

    def __init__(self, all: set[_Connection]) -> None:
        self.idle_since = 0.0
        self._all = all
        self._transport: asyncio.Transport | None = None
        self._reader: HttpResponseParser | None = None
        """Reader of the pending response, or None."""
        self._error: ModelError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._is_sending_paused = False
        self._is_sent = True
        """False until the whole request has been written."""
        self._is_streamed = False
        self._is_reading_paused = False
        self._poll: select.poll | None = None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The asyncio transport of the connection.

        None after it is closed.
        """
        return self._transport

    # --- one request --------------------------------------------------------------------------

    async def ask(self, head: bytes, body: bytes, reader: HttpResponseParser) -> None:
        """Send an HTTP request, and pass the response to ``reader`` as it arrives.

        If the response comes early, the rest of the request is not sent.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Unreachable("the server closed the connection before the request was sent")
        self._reader, self._is_streamed = reader, False
        if len(body) <= _PIECE_BYTES:
            transport.write(head + body)
            return
        self._is_sent = False
        transport.write(head)
        view = memoryview(body)
        for at in range(0, len(body), _PIECE_BYTES):
            while self._is_sending_paused and not reader.status:
                await self.more()
            if reader.status or self._error is not None:
                return  # the server has already answered; an unsent rest closes the connection
            transport.write(view[at : at + _PIECE_BYTES])
            await asyncio.sleep(0)
        self._is_sent = True

    async def more(self) -> None:
        """Wait for the next part of the response, or until more of the request can be sent.

        Raises the error that ended the exchange, if any.
        """
        self._raise_if_failed()
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def streams(self) -> None:
        """Switch from reading the response body as a whole to reading it as a stream.

        Before, the body is read as a whole. From now on, the number of unread bytes is limited
        instead of the size of the whole body.
        """
        self._is_streamed = True
        if self._reader is not None:
            self._reader.is_streamed = True

    def finish(self) -> bool:
        """End the HTTP exchange on this connection.

        Returns True if the connection can be reused for another request.
        """
        reader, self._reader = self._reader, None
        is_whole = reader is not None and reader.is_complete and reader.keeps
        if reader is not None:
            reader.release_parser()
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_whole and is_open and self._is_sent and self._error is None

    def is_quiet(self) -> bool:
        """Return True if an idle connection is still open and the server has sent nothing on it."""
        if self._transport is None or self._transport.is_closing():
            return False
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        # The kernel knows what has arrived, or that the server closed, before the event loop does.
        return not self._poll.poll(0)

    async def tunnel(self, connect: bytes) -> None:
        """Ask the proxy to open a connection to the server, with a CONNECT request.

        Raises _ProxyRefused if it does not.
        """
        reader = HttpResponseParser(_MOST_HEAD_BYTES)
        try:
            await self.ask(connect, b"", reader)
            while not reader.status:
                await self.more()
        except ModelError as error:
            raise _ProxyRefused(f"the proxy: {error}", transient=True) from None
        status, is_early = reader.status, bool(reader.unread)
        self._reader = None
        reader.release_parser()
        if status == 407:
            text = "the proxy answered 407: it wants a user and password in its URL"
            raise _ProxyRefused(text, transient=False)
        # In TLS the client speaks first, so early bytes cannot be those of the server.
        if status != 200 or is_early:
            raise _ProxyRefused(f"the proxy answered {status}", transient=status >= 500)

    def replaced(self) -> None:
        """Give up the connection's transport, because another protocol now uses it."""
        self._all.discard(self)
        self._transport = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by the transport --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._all.discard(self)
        reader = self._reader
        if reader is not None and not reader.is_complete and self._error is None:
            if exc is None and reader.ends_with_connection:
                reader.is_complete = True
            else:
                reason = f": {exc}" if exc and str(exc) else ""
                self._error = ReplyLostError(
                    f"the connection broke before the reply was whole{reason}"
                )
        self._wake_up()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None or self._error is not None:
            self.abort()  # no request is pending, so these bytes cannot be a response
            return
        try:
            reader.feed(data)
        except ModelError as error:
            self._error = error
            self.abort()
        if self._is_streamed and len(reader.unread) > _UNREAD_BYTES and not self._is_reading_paused:
            assert self._transport is not None
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake_up()

    def pause_writing(self) -> None:
        self._is_sending_paused = True

    def resume_writing(self) -> None:
        self._is_sending_paused = False
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class HttpResponseParser:
    """An incremental parser for a single HTTP response.

    It is fed with bytes as they arrive.
    """

    __slots__ = (
        "_begin",
        "_has_head",
        "_is_chunked",
        "_left",
        "_max_body_bytes",
        "_num_body_bytes",
        "_num_head_bytes",
        "_num_headers",
        "_num_interim",
        "_overhead",
        "_parser",
        "_tail",
        "ends_with_connection",
        "headers",
        "is_complete",
        "is_streamed",
        "is_upgraded",
        "keeps",
        "may_upgrade",
        "status",
        "unread",
    )

    def __init__(self, max_body_bytes: int) -> None:
        self.status = 0
        """HTTP status, or 0 until the head has arrived."""
        self.headers: dict[str, str] = {}
        self.unread = bytearray()
        """Part of the body that has arrived but has not been taken yet. One buffer is used instead
        of a list, because chunks may be as small as one byte."""
        self.is_complete = False
        self.keeps = False
        """True if the connection can be reused after this response."""
        self.ends_with_connection = False
        """True if only the end of the connection marks the end of the body."""
        self.is_streamed = False
        """True if the body is taken as it arrives. Its total length is then unlimited."""
        self.may_upgrade = False
        """True if the request allows status 101 (switching protocols)."""
        self.is_upgraded = False
        """True after status 101. Everything after the head is then no longer HTTP."""
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        self._left = -1
        """Bytes of the body that have not arrived yet. -1 if the length is not known in advance."""
        self._is_chunked = False
        self._overhead = 0
        """Bytes of chunked encoding beyond the data and minimal frames."""
        self._num_head_bytes = 0
        self._num_interim = 0
        self._num_headers = 0
        self._has_head = False
        self._begin = b""
        """First bytes of the head, which must match ``_STARTS``."""
        self._tail = b""
        """Last bytes of the incomplete head, at most three, to find its end across pieces."""
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def take(self, most: int | None = None) -> bytes:
        """Remove and return the response bytes that have arrived so far, at most ``most`` of them.

        If ``most`` is None, all of them are returned.
        """
        if most is None:
            taken, self.unread = bytes(self.unread), bytearray()
        else:
            taken = bytes(self.unread[:most])
            del self.unread[:most]
        return taken

    def release_parser(self) -> None:
        """Drop the parser to break a reference cycle, so that memory is freed promptly."""
        self._parser = None

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the response from the server.

        Raises MalformedResponse if they are not valid HTTP or exceed a limit.
        """
        if self.is_complete:
            self.keeps = False  # unsolicited bytes
            return
        rest = data if self.status else self._read_head(data)
        if self.status:
            self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        if self.is_complete:
            self.keeps = self.keeps and not data
        elif self._is_chunked:
            self._read_chunks(data)
        elif self._left >= 0:
            self._read_counted(data)
        else:
            self._add_body_data(data)

    def _read_head(self, data: bytes) -> bytes:
        """Parse the next bytes of the response's head (status line and headers).

        Returns the bytes after the head.
        """
        while data and not self.status:
            if len(self._begin) < len(_STARTS):
                self._begin = (self._begin + data)[: len(_STARTS)]
                if not _STARTS.startswith(self._begin):
                    is_tls = (self._begin + data)[:2] == _TLS_ALERT
                    hint = "; it speaks TLS at this port: write https://" if is_tls else ""
                    raise _malformed_response(f"it begins with {data[:40]!r}{hint}")
            seen = self._tail + data
            end = seen.find(b"\r\n\r\n")
            size = len(data) if end < 0 else end + 4 - len(self._tail)
            self._num_head_bytes += size
            if self._num_head_bytes > _MOST_HEAD_BYTES:
                raise _malformed_response(f"headers of more than {_MOST_HEAD_BYTES} bytes")
            self._parse(data[:size])
            self._tail = seen[-3:] if end < 0 else b""
            data = data[size:]
            if end >= 0:
                self._end_head()
        return data

    def _end_head(self) -> None:
        if not self._has_head or self._parser is None:
            raise _malformed_response("its head has an empty line")
        status = self._parser.get_status_code()
        if status < 100:
            raise _malformed_response(f"its status is {status}")
        if status >= 200:
            self.status = status
            self._begin_body()
            return
        if status == 101 and self.may_upgrade:
            self.status, self.is_upgraded, self.keeps = status, True, False
            return
        self._num_interim += 1
        if self._num_interim > _MOST_INTERIM:
            raise _malformed_response(f"more than {_MOST_INTERIM} interim replies")
        self._has_head, self._begin = False, b""
        self.headers.clear()

    def _begin_body(self) -> None:
        """Determine from the response's headers how its body ends."""
        headers = self.headers
        if self.status in (204, 304):
            self.is_complete = True  # such a response has no body, whatever its headers say
        elif "transfer-encoding" in headers:
            codings = [
                item.strip(" \t") for item in headers["transfer-encoding"].lower().split(",")
            ]
            if [coding for coding in codings if coding] != ["chunked"]:
                raise _malformed_response(
                    f"its Transfer-Encoding is {headers['transfer-encoding'][:40]!r}"
                )
            self._is_chunked = True
        elif "content-length" in headers:
            # The parser has refused anything but digits, and a header that is given twice.
            self._left = int(headers["content-length"])
            self._check_body_size(self._left)
            self.is_complete = not self._left
        else:
            self.ends_with_connection, self.keeps = True, False

    def _read_counted(self, data: bytes) -> None:
        if len(data) > self._left:
            self.keeps = False
            data = data[: self._left]
        self._left -= len(data)
        self.is_complete = not self._left
        self._add_body_data(data)

    def _read_chunks(self, data: bytes) -> None:
        self._overhead += len(data)
        try:
            self._parse(data)
        except MalformedResponse:
            if not self.is_complete:
                raise
            self.keeps = False  # no request was sent that the extra bytes could answer
        if self._overhead > _MOST_CHUNK_OVERHEAD_BYTES:
            raise _malformed_response(
                f"chunk extensions and trailers of more than {_MOST_CHUNK_OVERHEAD_BYTES} bytes"
            )

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self.may_upgrade:
                return
            raise _malformed_response("it switches to a protocol that was not asked for") from None
        except httptools.HttpParserError as error:
            # Raised by a method below, which the parser calls: it wraps every exception in its own.
            if isinstance(error.__context__, ModelError):
                raise error.__context__ from None
            text = str(error)  # one of llhttp's own sentences
            raise _malformed_response(f"{text[:1].lower()}{text[1:]}") from None

    def _add_body_data(self, data: bytes) -> None:
        if data:
            self._num_body_bytes += len(data)
            self._check_body_size(self._num_body_bytes)
            self.unread += data

    def _check_body_size(self, size: int) -> None:
        if size > self._max_body_bytes and not self.is_streamed:
            raise body_too_long_error(self._max_body_bytes)

    # --- called by the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:
            return  # a trailer
        self._num_headers += 1
        if self._num_headers > _MOST_HEADERS:
            raise _malformed_response(f"more than {_MOST_HEADERS} headers")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")
        headers = self.headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if not self._has_head:
            self._has_head = True
            self.keeps = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self._overhead -= _CHUNK_FRAME_BYTES

    def on_body(self, data: bytes) -> None:
        if self._is_chunked:
            self._overhead -= len(data)
            if not self.is_complete:  # otherwise, it is the body of an unsolicited response
                self._add_body_data(data)

    def on_message_complete(self) -> None:
        if self._is_chunked:
            self.is_complete = True


def _malformed_response(what: str) -> MalformedResponse:
    return MalformedResponse(f"the reply is not HTTP: {what}")
