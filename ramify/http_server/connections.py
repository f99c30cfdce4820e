"""Connection limits of a server: how many connections may be open, and how long each may take to
send a request's head.

    accept ──▶ waiting (no byte, or part of a head) ──▶ request in progress ──▶ waiting …
                  │ too late or too large: closed

When the maximum number of connections is open, the one that has waited longest for a request is
closed to make room. If none has waited long enough, a new connection stays in the kernel's queue,
where it costs no descriptor, until another one ends. So clients that open connections and send
nothing cannot lock others out. Bodies are limited by ``request_body_limiter.py``; keys and routes
are checked by ``base_server.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time

from aiohttp import web

from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.machine_capacity import max_connections
from ramify.http_server.rejections import RequestRejected
from ramify.logging import ComponentLogger

_log = ComponentLogger("serve")
MAX_HEAD_BYTES = 64 << 10
_LINGERING_S = 5.0
"""Number of seconds for which the rest of a rejected body is read, so that the client can still
receive the error response."""
_LINGERING_BYTES = 8 << 20
"""Maximum number of bytes that are read from a rejected body. The connection is then closed,
because reading takes time from other clients."""
_EVICT_S = 1.0
"""Seconds after which a connection that has not sent a first head may be closed in favour of a new
one."""
_EVICT_IDLE_S = 5.0
"""Seconds after which a connection that is idle between requests may be closed in favour of a new
one. This limit is longer, because the next request may follow soon."""
_SWEEP_S = 0.25
_BATCH = 32
"""Maximum number of connections accepted in one iteration of the event loop."""
_HEAD_END = b"\r\n\r\n"


class HttpServerConnections:
    """The open connections of one server.

    It accepts new ones, and closes those that wait too long for a request.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.most = limits.max_connections or max_connections()
        self.all: set[HttpServerConnection] = set()
        self.waiting: dict[HttpServerConnection, None] = {}
        """Connections without a request in progress. Those that have waited longest come first."""

    @property
    def is_crowded(self) -> bool:
        """True if so many connections are open that each should close after its next response."""
        return len(self.all) > self.most * 3 // 4

    async def accept_connections(self, listener: socket.socket, web_server: web.Server) -> None:
        """Accept connections on a listening socket until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while len(self.all) >= self.most:
                if not self._evict():
                    await asyncio.sleep(_SWEEP_S / 10)
            try:
                accepted = [(await loop.sock_accept(listener))[0]]
            except OSError:  # no descriptor is free, or the client has left
                await asyncio.sleep(_SWEEP_S / 10)
                continue
            with contextlib.suppress(OSError):  # no other client waits
                while len(accepted) < min(_BATCH, self.most - len(self.all)):
                    accepted.append(listener.accept()[0])
            await asyncio.gather(*(self._connect(each, web_server) for each in accepted))

    async def _connect(self, accepted: socket.socket, web_server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        if accepted.family == socket.AF_UNIX and not _is_own_user(accepted):
            accepted.close()
            return
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                lambda: HttpServerConnection(self, web_server, loop), accepted
            )

    async def sweep(self) -> None:
        """Close connections whose clients take too long to send a request.

        Runs until cancelled.
        """
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for connection in list(self.waiting):
                if now > connection.deadline:
                    connection.force_close()

    def _evict(self) -> bool:
        """Close the connection that has waited longest for a request, to admit a new one.

        Returns False if none has waited long enough.
        """
        now = time.monotonic()
        for connection in self.waiting:
            patience = _EVICT_IDLE_S if connection.is_idle else _EVICT_S
            if now - connection.waits_since > patience:
                # Now, because connection_lost is called later, and accept would close more of them.
                self.waiting.pop(connection)
                self.all.discard(connection)
                connection.force_close()
                return True
        return False


class HttpServerConnection(web.RequestHandler):
    """An aiohttp connection that limits the size of a request's head and how long it may take to
    arrive."""

    def __init__(
        self,
        table: HttpServerConnections,
        web_server: web.Server,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            web_server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            lingering_time=_LINGERING_S,
            # Otherwise aiohttp would unpack a body as it arrives, before any check of the request.
            auto_decompress=False,
        )
        self._table = table
        self._num_head_bytes = 0
        self._tail = b""
        self._has_asked = False
        self._num_drained: int | None = None
        """Bytes read of a rejected body. None if no body was rejected."""
        self._is_head_read = False
        """True from the end of a request's head until the response is sent."""
        self._start_waiting()

    def _start_waiting(self) -> None:
        self.waits_since = time.monotonic()
        self.deadline = self.waits_since + self._table.limits.idle_s
        """Time at which a waiting connection is closed, in monotonic seconds."""
        self._num_head_bytes, self._tail, self._is_head_read = 0, b"", False

    @property
    def is_idle(self) -> bool:
        """True while the connection is between two requests and no byte of the next has arrived."""
        return self._has_asked and not self._num_head_bytes

    def mark_busy(self) -> None:
        """Mark the connection as busy with a request.

        Called once a request's head has been read.
        """
        self._is_head_read = self._has_asked = True
        self._table.waiting.pop(self, None)

    # --- aiohttp's interface

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._table.all.add(self)
        self._table.waiting[self] = None
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._table.all.discard(self)
        self._table.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._num_drained is not None:
            self._num_drained += len(data)
            if self._num_drained > _LINGERING_BYTES:
                self.force_close()
                return
        elif not self._is_head_read and not self._count_head_bytes(data):
            self._refuse_head()
            return
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._start_waiting()
            self._num_drained = None if request.content.is_eof() else 0
            if self in self._table.all:
                self._table.waiting[self] = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the error response to a request that could not be parsed or answered.

        It uses the usual error format, and nothing is logged for bad requests.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun: it cannot become an error")
        if status >= 500:
            text = f"the response failed: {type(exc).__name__}"
            _log.error("internal_error", text, shown=True, error=exc)
            response = RequestRejected(f"internal error: {type(exc).__name__}", status=status)
        else:
            reason = " ".join((message or "").split())
            response = RequestRejected(f"this is not valid HTTP: {reason:.100}", status=status)
        answer = response.response()
        answer.force_close()
        return answer

    def _count_head_bytes(self, data: bytes) -> bool:
        """Count the received bytes of a request's head, and return True if they are within the
        limit.

        Returns False if the head is too large.
        """
        if not self._num_head_bytes:
            data = data.lstrip(b"\r\n")  # blank lines before a request
            self.deadline = min(self.deadline, time.monotonic() + self._table.limits.head_s)
        end = (self._tail + data).find(_HEAD_END)
        self._is_head_read = end >= 0
        self._num_head_bytes += len(data) if end < 0 else max(0, end - len(self._tail))
        self._tail = data[-3:] if len(data) >= 3 else (self._tail + data)[-3:]
        return self._num_head_bytes <= MAX_HEAD_BYTES

    def _refuse_head(self) -> None:
        if self.transport is not None:
            body = RequestRejected(
                f"the head of the request is larger than {MAX_HEAD_BYTES} bytes: send less",
                status=431,
            ).openai_error_body()
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json"
                b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.force_close()


def _is_own_user(peer: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket belongs to this user or to
    root."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder of the socket is private
    _, user, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user in (0, os.getuid())
