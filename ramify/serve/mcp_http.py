"""The MCP server over HTTP (``ramify mcp --http``).

It has the same protection as the other HTTP servers of this package.

    POST, GET, DELETE /mcp    MCP's streamable HTTP transport

    aiohttp request ──▶ shell: key, Host, Origin, body ──▶ ASGI ──▶ the application of the MCP SDK

The MCP SDK's application handles the protocol. The surrounding server
(``http_server/base_server.py``) authenticates clients and checks the host name. So the SDK's own
check of host names, which supports only ports, is disabled. The tool itself is defined in
``mcp_server.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from mcp.server.transport_security import TransportSecuritySettings

from ramify.engine.rlm import RLM
from ramify.http_server.access import AcceptedApiKeys, ListenAddress, new_key
from ramify.http_server.base_server import AiohttpServer, receive_body
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.machine_capacity import max_runs
from ramify.http_server.rejections import RequestRejected
from ramify.serve.mcp_server import server

PATH = "/mcp"
_MAX_BODY_BYTES = 4 << 20


class McpHttpServer:
    """An MCP server that listens on a network address.

    ``async with`` starts and stops it.
    """

    def __init__(
        self,
        rlm: RLM,
        roots: Sequence[str],
        *,
        address: ListenAddress | None = None,
        key: str | None = None,
    ) -> None:
        """Create a server whose tool ``ask`` may read files below the folders ``roots``.

        Raises ConfigError if one of them does not exist. ``key`` is the bearer key that clients
        must send; by default a new one is generated if the address needs a key.
        """
        self.address = address = address or ListenAddress()
        self.key = key or (new_key() if address.needs_key else "")
        """The key that clients must send; empty if the address needs none."""
        self._rlm = rlm
        self._app = server(rlm, roots).streamable_http_app(
            streamable_http_path=PATH,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        self._num_in_progress = 0
        self._max_in_progress = max_runs()
        self._opened = AsyncExitStack()
        self._http = AiohttpServer(
            address,
            AcceptedApiKeys.from_key(self.key) if self.key else None,
            limits=HttpLimits(max_body_bytes=_MAX_BODY_BYTES),
        )

    @property
    def url(self) -> str:
        """The URL for clients, such as ``http://127.0.0.1:PORT/mcp``."""
        return f"{self._http.url}{PATH}"

    async def __aenter__(self) -> McpHttpServer:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._rlm)
            await self._rlm.prepare()
            await opening.enter_async_context(self._app.router.lifespan_context(self._app))
            app = web.Application()
            app.router.add_route("*", PATH, self._answer)
            await self._http.start(app)
            opening.push_async_callback(self._http.close)
            self._opened = opening.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._opened.aclose()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        async with receive_body(http) as body:
            pass
        if http.method == "POST" and self._num_in_progress >= self._max_in_progress:
            raise RequestRejected(
                f"{self._num_in_progress} requests are in progress: try again later",
                status=429,
                retry_after_s=1,
            )
        self._num_in_progress += http.method == "POST"
        try:
            return await self._forward_request(http, body)
        finally:
            self._num_in_progress -= http.method == "POST"

    async def _forward_request(self, http: web.Request, body: bytes) -> web.StreamResponse:
        """Forward an HTTP request to the MCP SDK's application, and return its response."""
        response = web.StreamResponse()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not parts:  # a client that leaves cancels this handler
                await asyncio.get_running_loop().create_future()
            return parts.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.set_status(message["status"])
                for name, value in message.get("headers", ()):
                    response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
                await response.prepare(http)
            elif message.get("body"):
                await response.write(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": http.method,
            "scheme": "http",
            "path": http.path,
            "raw_path": http.raw_path.partition("?")[0].encode(),
            "query_string": http.query_string.encode(),
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in http.raw_headers],
            "client": None,
            "server": None,
        }
        await self._app(scope, receive, send)
        await response.write_eof()
        return response
