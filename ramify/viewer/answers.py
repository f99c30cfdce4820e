"""Responses of the viewer: data as JSON, changes as server-sent events, static files from memory.

Not here: the routes (see view_server.py) and how scripts are bundled (see page_script.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import mimetypes
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ramify.viewer.page_script import APP, STATIC, app, early, module

_KEEP_ALIVE_S = 15.0
"""Seconds between keep-alive comments on an idle stream."""


class StaticAssets:
    """Cache of the page's scripts and styles, with ETags so that browsers can reuse them."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}

    def answer(self, request: web.Request, name: str) -> web.Response:
        """Response with the file ``name``. Raises HTTPNotFound if the page has no such file."""
        body, kind, tag = self._file(name)
        headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if any(etag.value == tag for etag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, "Content-Type": kind})

    def _file(self, name: str) -> tuple[bytes, str, str]:
        file = self._files.get(name)
        if file is None:
            body = _body(name)
            kind = (
                {".js": "text/javascript"}.get(Path(name).suffix)
                or mimetypes.guess_type(name)[0]
                or "text/plain"
            )
            charset = "; charset=utf-8" if kind.startswith("text/") else ""
            file = self._files[name] = (
                body,
                kind + charset,
                hashlib.sha256(body).hexdigest()[:20],
            )
        return file


def _body(name: str) -> bytes:
    if name == APP:
        return app().encode()
    path = (STATIC / name).resolve()
    if not path.is_relative_to(STATIC) or not path.is_file():
        raise web.HTTPNotFound
    if name == "index.html":
        return (
            path.read_text(encoding="utf-8")
            .replace("<script></script>", f"<script>{early()}</script>")
            .encode()
        )
    return (
        module(name).encode()
        if path.suffix == ".js" and path.parent == STATIC
        else path.read_bytes()
    )


def data(value: Any) -> web.Response:
    return web.Response(body=encoded(value), content_type="application/json")


def encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates in a file from elsewhere
        return json.dumps(msgspec.to_builtins(value)).encode()


async def stream(
    request: web.Request, messages: AsyncGenerator[dict[str, Any], None]
) -> web.StreamResponse:
    """Send ``messages`` as server-sent events.

    The last event is named ``end``; it tells the page not to reconnect.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    )
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):
        async with contextlib.aclosing(_with_keep_alive(messages)) as lines:
            async for line in lines:
                await response.write(line)
        await response.write(b"event: end\ndata: {}\n\n")
    return response


async def _with_keep_alive(
    messages: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[bytes, None]:
    yield b": open\n\n"
    upcoming = asyncio.ensure_future(anext(messages))
    try:
        while True:
            done, _ = await asyncio.wait([upcoming], timeout=_KEEP_ALIVE_S)
            if not done:
                yield b": still here\n\n"
                continue
            try:
                yield b"data: " + encoded(upcoming.result()) + b"\n\n"
            except StopAsyncIteration:
                return
            upcoming = asyncio.ensure_future(anext(messages))
    finally:
        upcoming.cancel()
        await asyncio.wait([upcoming])
        await messages.aclose()
