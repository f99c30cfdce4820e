"""The HTTP server behind ``serve``, ``view``, ``serve-policy`` and ``mcp``.

    connection ──▶ head ──▶ Host, Origin ──▶ key or token ──▶ route ──▶ body ──▶ response
    (connections.py)        (access.py)                       (request_body_limiter.py)

All of them have the same protection: limits on connections, heads and bodies, checks of the host
name and the key, and one error format. Rejected requests are not logged one by one, because anyone
could fill a disk that way. Instead they are counted, and the counts are logged when the server
stops.

A web page receives its key as a *token* in its URL, and exchanges the token for a cookie, because
links, live updates and scripts of a page cannot send a bearer key. Routes and their meaning are
defined by each server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from ramify.errors import ConfigError, RamifyError, listen_error
from ramify.http_server.access import (
    AcceptedApiKeys,
    ListenAddress,
    check_host,
    check_origin,
    presented_key,
)
from ramify.http_server.connections import HttpServerConnection, HttpServerConnections
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.rejections import RequestRejected
from ramify.http_server.request_body_limiter import LimitedBodyReader
from ramify.logging import ComponentLogger
from ramify.store.durable_files import make_folder

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GONE = 499
"""Status that is recorded for a request whose client disconnected. It is never sent."""
CALLER = web.RequestKey("caller", str)
"""Name of the caller who sent a request. Empty if the server needs no key."""
_UPLOADS = web.AppKey("uploads", LimitedBodyReader)
_BACKLOG = 1024
_LIMITS = HttpLimits()
_log = ComponentLogger("serve")


@asynccontextmanager
async def receive_body(http: web.Request) -> AsyncIterator[bytes]:
    """Receive a request's body, for use within an ``async with`` block.

    Until the block ends, the body counts against the server's memory limit. Raises RequestRejected
    if it is too large or arrives too slowly.
    """
    async with http.app[_UPLOADS].receive_body(http, http[CALLER]) as body:
        yield body


class AiohttpServer:
    """An HTTP server for one aiohttp application.

    It checks every request before the application sees it.
    """

    def __init__(
        self,
        address: ListenAddress,
        keys: AcceptedApiKeys | None = None,
        *,
        token: str = "",
        public: Collection[str] = (),
        statuses: Mapping[type[RamifyError], int] | None = None,
        limits: HttpLimits = _LIMITS,
        key_help: str = "send the server's key as Authorization: Bearer KEY",
        on_response: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        """Create an HTTP server that does not listen yet.

        ``keys`` are the accepted keys, or None if the address needs none. Web pages can send
        ``token`` instead of a key, in a URL or a cookie. Paths in ``public`` need no key.
        ``statuses`` maps the exceptions that routes raise to HTTP statuses; all other exceptions
        get status 500. ``key_help`` tells a client without a key what to do. ``on_response`` is
        called after each response with the route's path and the status.

        Raises ConfigError for an address that needs a key if there are no ``keys``.
        """
        if keys is None and address.needs_key:
            raise ConfigError(f"a server at {address.host} needs a key")
        self.host = address.host
        self.port = address.port
        self.num_rejected: Counter[str] = Counter()
        """Rejection code (``missing_key``, ``wrong_key``, ``wrong_host``, ``wrong_origin``) ->
        number of rejected requests."""
        self._address = address
        self._keys = keys
        self._token = token
        self._public = frozenset(public)
        self._statuses = dict(statuses or {})
        self.uploads = LimitedBodyReader(limits)
        self._key_help = key_help
        self._on_response = on_response
        self.connections = HttpServerConnections(limits)
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL of the server, such as ``http://127.0.0.1:PORT``, without path or token."""
        if self._address.socket is not None:
            return "http://localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self, app: web.Application) -> None:
        """Start listening, and pass requests to ``app``.

        Raises ConfigError if the address cannot be used.
        """
        self._listeners = _listeners(self._address)
        if self._address.socket is None:
            self.port = self._listeners[0].getsockname()[1]
        app.middlewares.insert(0, self._admit)
        app[_UPLOADS] = self.uploads
        # handler_cancellation cancels the request of a client that disconnects.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None
        self._tasks = [
            asyncio.create_task(self.connections.sweep()),
            *(
                asyncio.create_task(self.connections.accept_connections(each, self._runner.server))
                for each in self._listeners
            ),
        ]

    async def close(self) -> None:
        """Stop listening, and close every connection to the server.

        A second call has no effect.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        listeners, self._listeners, self._tasks = self._listeners, [], []
        for listener in listeners:
            listener.close()
        if listeners and self._address.socket is not None:
            self._address.socket.unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self.num_rejected:
            counts = ", ".join(f"{num} {code}" for code, num in sorted(self.num_rejected.items()))
            _log.info("requests_rejected", f"requests rejected: {counts}", url=self.url)
            self.num_rejected.clear()

    # --- every request

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        http, status = request, GONE
        if isinstance(http.protocol, HttpServerConnection):
            http.protocol.mark_busy()
        try:
            response = await self._answer_request(http, handler)
            status = response.status
        finally:
            resource = http.match_info.route.resource
            self._on_response(resource.canonical if resource else "other", status)
        # A client that was asked to wait does not need its connection in the meantime.
        is_busy = status in (429, 503) or self.connections.is_crowded
        if not response.prepared and (is_busy or not http.content.is_eof()):
            response.force_close()
        return response

    async def _answer_request(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check(http)
            if self._token and http.path == "/" and "token" in http.query:
                return self._set_cookie()
            return await handler(http)
        except RequestRejected as error:
            return error.response(http)
        except web.HTTPException as error:
            why = error.reason
            if error.status == 404 and not self._token and not http.path.startswith("/v1/"):
                why = f"{why}; the base URL is {self.url}/v1"
            where = f"{http.method} {http.path:.200}"
            return RequestRejected(f"{where}: {why}", status=error.status).response(http)
        except RamifyError as error:
            status = next((n for kind, n in self._statuses.items() if isinstance(error, kind)), 500)
            if status >= 500:
                _log.warning("request_failed", f"{http.method} {http.path:.200}: {error}")
            return RequestRejected(str(error), status=status).response(http)
        except ConnectionError:  # the client disconnected in the middle of an event
            return web.Response(status=GONE)
        except Exception as error:  # noqa: BLE001 -- a bug; the operator gets the full traceback
            text = f"{http.method} {http.path:.200} failed: {type(error).__name__}"
            _log.error("internal_error", text, shown=True, error=error)
            bug = RequestRejected(f"internal error: {type(error).__name__}", status=500)
            return bug.response(http)

    def _check(self, http: web.Request) -> None:
        """Check the host, origin, key and content type of an incoming request.

        Raises RequestRejected if one is not acceptable.
        """
        try:
            if self._address.is_local:
                # Against pages whose host name their site points to this machine (DNS rebinding).
                check_host(http, self.url)
            check_origin(http)
            http[CALLER] = self._caller(http)
        except RequestRejected as error:
            self.num_rejected[error.code or ""] += 1
            raise
        # Browsers let a page post other content types to any host without a preflight request.
        if http.method == "POST" and http.content_type != "application/json":
            raise RequestRejected(
                f"the body is {http.content_type:.60}: send it as application/json", status=415
            )

    def _caller(self, http: web.Request) -> str:
        if self._keys is None:
            return ""
        presented = self._presented_key(http)
        caller = self._keys.caller_of_key(presented) if presented else None
        if caller is not None:
            return caller
        if http.path in self._public:
            return ""
        found, code = ("wrong", "wrong_key") if presented else ("no", "missing_key")
        what = "token" if self._token else "API key"
        raise RequestRejected(f"{found} {what}: {self._key_help}", status=401, code=code)

    def _presented_key(self, http: web.Request) -> str:
        if key := presented_key(http):
            return key
        if not self._token:
            return ""
        if http.path == "/" and "token" in http.query:
            return http.query["token"]
        return http.cookies.get(self._cookie, "")

    @property
    def _cookie(self) -> str:
        # Cookies ignore ports, so two servers on the same machine need different cookie names.
        return f"ramify-{self.port}"

    def _set_cookie(self) -> web.Response:
        response = web.Response(status=303, headers={"Location": "/"})
        # Lax lets a link in a notebook or a mail open the page. Requests that change something
        # are protected by the check of their origin.
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="Lax")
        return response


def _listeners(address: ListenAddress) -> list[socket.socket]:
    if address.socket is not None:
        return [_unix_listener(address.socket)]
    listeners: list[socket.socket] = []
    port = address.port
    try:
        found = socket.getaddrinfo(
            address.host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, place in sorted(set(found), key=lambda each: each[0]):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((place[0], port, *place[2:]))
            listener.setblocking(False)
            listener.listen(_BACKLOG)
            # If the port was 0, the first listener picks one, and the others get the same.
            port = listener.getsockname()[1]
    except (OSError, OverflowError) as error:
        for listener in listeners:
            listener.close()
        raise listen_error(address.host, address.port, error) from None
    return listeners


def _unix_listener(path: Path) -> socket.socket:
    """Open a Unix socket that listens at ``path``.

    Raises ConfigError if other users can enter its folder, or another server listens there.
    """
    folder = make_folder(path.parent)
    if folder.stat().st_mode & 0o077:
        raise ConfigError(f"{folder} can be entered by other users: run chmod 700 {folder}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
                if probe.connect_ex(os.fspath(path)) == 0:
                    raise ConfigError(f"another server listens on {path}: stop it first")
            path.unlink()  # left by a server that was killed
        listener.bind(os.fspath(path))
        listener.setblocking(False)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path} ({error.strerror or error})") from None
    except ConfigError:
        listener.close()
        raise
    return listener
