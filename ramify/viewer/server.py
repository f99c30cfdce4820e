"""The viewer's server: a page, its data as JSON, and what changes as server-sent events.

    GET /                        the page; /static/… its modules and styles
    GET /api/runs                every run, and what could not be read
    GET /api/run?key=            one run's picture;  /api/call  one call of it;  /api/tokens  one turn's ids;  /api/search
    GET /api/events?key=         what changes in it, from the version that the page has
    GET /api/journal?key=        the file, to be kept
    GET /api/training?key=       curves;  /api/training/events  as they grow;  /api/samples  a step's rollouts

Everything is read; nothing can be changed from here. It listens on loopback, and answers only those who call it by a name
of this machine, so that a page from elsewhere cannot read a journal by renaming itself; on another address it wants a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from ramify.errors import ConfigError, StoreError
from ramify.viewer.feed import Feed, Feeds
from ramify.viewer.library import Library
from ramify.viewer.picture import picture
from ramify.viewer.training import kept, samples
from ramify.viewer.transcript import MAX_TEXT, search, tokenizer_of, tokens, transcript
from ramify.viewer.watch import Watched

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline; and no string becomes HTML or code, whoever wrote it."""
_HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
_KEEP_ALIVE_S = 15.0
"""Between signs of life on a stream that has no news."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """The server; ``async with`` starts and stops it."""

    def __init__(
        self, library: Library, *, host: str = "127.0.0.1", port: int = 8765, token: str | None = None, first: str = ""
    ) -> None:
        """``port`` 0 takes a free one; ``first`` is the run that will be looked at first, read at once.

        Raises ConfigError for an address beyond loopback without a token."""
        if not token and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: give a token (--token), or stay on 127.0.0.1"
            )
        self.host, self.port = host, port
        self._library, self._token, self._first = library, token, first
        self._reading: asyncio.Task[Any] | None = None
        self._feeds = Feeds()
        self._listing = threading.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The page's address, the token included, so that it can be opened as it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={quote(self._token)}" if self._token else "")

    async def __aenter__(self) -> ViewServer:
        app = web.Application(middlewares=[self._guarded])
        app.on_response_prepare.append(_add_headers)
        for path, handler in {
            "/": self._page, "/api/runs": self._runs, "/api/run": self._run, "/api/call": self._call,
            "/api/tokens": self._tokens, "/api/search": self._search, "/api/events": self._events,
            "/api/journal": self._journal, "/api/training": self._training, "/api/training/events": self._training_events,
            "/api/samples": self._samples,
        }.items():  # fmt: skip
            app.router.add_get(path, handler)
        app.router.add_static("/static", STATIC)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror}): choose another --port"
            ) from None
        self.port = self._runner.addresses[0][1]
        if self._first:
            self._reading = asyncio.create_task(self._feeds.run(self._library.find(self._first)).fresh())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await self._feeds.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- who may look --------------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The caller's name for us, the token, and every error as JSON."""
        if self._token:
            given = request.query.get("token")
            if given is not None and request.path == "/" and _same(given, self._token):
                return self._let_in()
            if not _same(self._shown(request), self._token):
                return _failed(401, "this page wants its token: open the address that ramify view printed")
        elif not is_loopback(_host_of(request)):
            return _failed(403, f"{request.host} is not a name of this machine: open {self.url}")
        try:
            return await handler(request)
        except StoreError as error:
            return _failed(404, str(error))
        except _BadRequest as error:
            return _failed(400, str(error))
        except web.HTTPException as error:
            return _failed(error.status, f"{request.method} {request.path}: {error.reason}")

    def _shown(self, request: web.Request) -> str:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return bearer or request.cookies.get(self._cookie, "")

    @property
    def _cookie(self) -> str:
        return f"ramify-view-{self.port}"  # cookies know no ports, and two viewers may run on one machine

    def _let_in(self) -> web.Response:
        """The token moves from the address, which is seen and kept, to a cookie."""
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, self._token or "", httponly=True, samesite="Strict")
        return response

    # --- the pages' data -----------------------------------------------------------------------------------------

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _runs(self, _: web.Request) -> web.Response:
        return _data(await asyncio.to_thread(self._listed))

    def _listed(self) -> dict[str, Any]:
        with self._listing:
            runs, problems = self._library.runs()
            trainings = self._library.trainings()
        return {"runs": runs, "problems": problems, "trainings": trainings, "places": self._library.places}

    def _feed(self, request: web.Request) -> Feed[Watched]:
        return self._feeds.run(self._library.find(_word(request, "key")))

    async def _run(self, request: web.Request) -> web.Response:
        feed = self._feed(request)
        await feed.fresh()
        return _data(await feed.inspect(picture))

    async def _call(self, request: web.Request) -> web.Response:
        id, first = _word(request, "id"), _number(request, "from")
        length = None if "full" in request.query else MAX_TEXT
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return _data(await feed.inspect(lambda run: transcript(run, id, first, length)))

    async def _tokens(self, request: web.Request) -> web.Response:
        id, turn = _word(request, "id"), _number(request, "turn")
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return _data(await feed.inspect(lambda run: tokens(run, id, turn, tokenizer_of(run, [run.call(id)[0].model]))))

    async def _search(self, request: web.Request) -> web.Response:
        wanted = request.query.get("q", "")
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return _data(await feed.inspect(lambda run: search(run, wanted)))

    async def _journal(self, request: web.Request) -> web.StreamResponse:
        found = self._library.find(_word(request, "key"))
        name = quote(found.path.name if found.line is None else f"{found.path.stem}-{found.line}.jsonl")
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "Content-Type": "application/x-ndjson",
        }
        if found.line is None:
            return web.FileResponse(found.path, headers=headers)
        line = found.path.read_bytes().splitlines()[found.line - 1 : found.line]
        return web.Response(body=b"".join(line) + b"\n", headers=headers)

    async def _training(self, request: web.Request) -> web.Response:
        feed = self._feeds.training(self._library.training(_word(request, "key")))
        return _data((await feed.fresh()).data() | {"version": feed.watched.version})

    async def _samples(self, request: web.Request) -> web.Response:
        folder = self._library.training(_word(request, "key"))
        step = _number(request, "step")
        path = kept(folder).get(step)
        return _data(samples(folder, step, (self._library.key_of(path) or "") if path else ""))

    # --- what changes --------------------------------------------------------------------------------------------

    async def _events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feed(request)
        await feed.fresh()
        return await _stream(request, feed.follow(_number(request, "version")))

    async def _training_events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feeds.training(self._library.training(_word(request, "key")))
        await feed.fresh()
        return await _stream(request, feed.follow(_number(request, "version")))


class _BadRequest(Exception):
    """An address without something that it needs."""


def _word(request: web.Request, name: str) -> str:
    word = request.query.get(name)
    if not word:
        raise _BadRequest(f"{request.path} needs ?{name}=")
    return word


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not text.isdecimal():
        raise _BadRequest(f"{request.path}: {name}={text!r} is not a number")
    return int(text)


async def _stream(request: web.Request, messages: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
    """``messages`` as server-sent events, then one named ``end``, after which a page need not come back."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):
        async with contextlib.aclosing(_with_signs_of_life(messages)) as lines:
            async for line in lines:
                await response.write(line)
        await response.write(b"event: end\ndata: {}\n\n")
    return response


async def _with_signs_of_life(messages: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    yield b": open\n\n"
    coming = asyncio.ensure_future(anext(messages))
    try:
        while True:
            done, _ = await asyncio.wait([coming], timeout=_KEEP_ALIVE_S)
            if not done:
                yield b": still here\n\n"
                continue
            try:
                yield b"data: " + _encoded(coming.result()) + b"\n\n"
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(messages))
    finally:
        coming.cancel()
        await asyncio.wait([coming])
        await messages.aclose()


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-cache")


def _data(value: Any) -> web.Response:
    return web.Response(body=_encoded(value), content_type="application/json")


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, as a file that is not ours may hold
        return json.dumps(msgspec.to_builtins(value)).encode()


def _failed(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": text}), content_type="application/json")


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _host_of(request: web.Request) -> str:
    """``[::1]:8765`` -> ``::1``"""
    host = request.host
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
