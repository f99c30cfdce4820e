"""The viewer's server: a page, its data as JSON, and what changes as server-sent events.

    GET /                        the page; /static/… its modules and styles
    GET /api/runs                every run, evaluation and training, and what could not be read
    GET /api/run?key=            one run's picture (&texts= of so many calls);  /api/texts  the texts of the rest (&from=)
    GET /api/call?key=           one call of it;  /api/tokens  one turn's ids;  /api/search
    GET /api/events?key=         what changes in it, from the version that the page has
    GET /api/journal?key=        the file, to be kept; of runs and records alone
    GET /api/training?key=       curves;  /api/training/events  as they grow;  /api/samples  a step's rollouts
    GET /api/evaluation?key=     figures, attempts, and the difference to another (&other=)

Everything is read; nothing can be changed from here. Who may ask is decided in ``guard.py``.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, get_args
from urllib.parse import quote

from aiohttp import web

from ramify.errors import StoreError, cannot_listen
from ramify.viewer.answers import StaticAssets, data, stream
from ramify.viewer.evaluation import EvaluationLibrary
from ramify.viewer.feed import FileFeed, FileFeeds
from ramify.viewer.guard import BadRequest, RequestGuard, add_headers
from ramify.viewer.picture import picture, texts
from ramify.viewer.run_kinds import Kind, LocatedRun, kind_of
from ramify.viewer.run_library import RunLibrary
from ramify.viewer.search import search
from ramify.viewer.token_view import tokenizer_of, tokens
from ramify.viewer.training import kept, samples
from ramify.viewer.transcript import MAX_TEXT, transcript
from ramify.viewer.watched_run import WatchedRun, nth_line


class ViewServer:
    """The server; ``async with`` starts and stops it."""

    def __init__(
        self,
        library: RunLibrary,
        *,
        host: str = "127.0.0.1",
        port: int = 8765,
        token: str | None = None,
        first: str = "",
    ) -> None:
        """``port`` 0 takes a free one; ``first`` is the run that will be looked at first, read at
        once.

        Raises ConfigError for an address beyond loopback without a token."""
        self._guard = RequestGuard(host, token, lambda: (self.url, self.port))
        self.host, self.port = host, port
        self._library, self._token, self._first = library, token, first
        self._reading: asyncio.Task[Any] | None = None
        self._feeds, self._evaluations, self._assets = (
            FileFeeds(),
            EvaluationLibrary(library),
            StaticAssets(),
        )
        self._listing = threading.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The page's address, the token included, so that it can be opened as it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (
            f"?token={quote(self._token)}" if self._token else ""
        )

    async def __aenter__(self) -> ViewServer:
        app = web.Application(middlewares=[self._guard.admit])
        app.on_response_prepare.append(add_headers)
        for path, handler in {
            "/": self._page,
            "/static/{name:.+}": self._asset,
            "/api/runs": self._runs,
            "/api/run": self._run,
            "/api/texts": self._texts,
            "/api/call": self._call,
            "/api/tokens": self._tokens,
            "/api/search": self._search,
            "/api/events": self._events,
            "/api/journal": self._journal,
            "/api/training": self._training,
            "/api/training/events": self._training_events,
            "/api/samples": self._samples,
            "/api/evaluation": self._evaluation,
        }.items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise cannot_listen(self.host, self.port, error) from None
        self.port = self._runner.addresses[0][1]
        if self._first:
            self._reading = asyncio.create_task(
                self._feeds.run(self._library.find(self._first)).fresh()
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await self._feeds.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- the pages' data
    # -----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        return self._assets.answer(request, "index.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return self._assets.answer(request, request.match_info["name"])

    async def _runs(self, _: web.Request) -> web.Response:
        return data(await asyncio.to_thread(self._listed))

    def _listed(self) -> dict[str, Any]:
        with self._listing:
            runs, evaluations, problems = self._library.look()
            trainings = self._library.trainings()
        return {
            "runs": runs,
            "evaluations": evaluations,
            "problems": problems,
            "trainings": trainings,
            "places": self._library.places,
        }

    def _feed(self, request: web.Request) -> FileFeed[WatchedRun]:
        return self._feeds.run(self._library.find(_word(request, "key")))

    async def _run(self, request: web.Request) -> web.Response:
        feed = self._feed(request)
        num_texts = _number(request, "texts") if "texts" in request.query else None
        await feed.fresh()
        return data(await feed.inspect(lambda run: picture(run, num_texts)))

    async def _texts(self, request: web.Request) -> web.Response:
        first = _number(request, "from")
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return data(await feed.inspect(lambda run: texts(run, first)))

    async def _call(self, request: web.Request) -> web.Response:
        id, first = _word(request, "id"), _number(request, "from")
        length = None if "full" in request.query else MAX_TEXT
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return data(await feed.inspect(lambda run: transcript(run, id, first, length)))

    async def _tokens(self, request: web.Request) -> web.Response:
        id, turn = _word(request, "id"), _number(request, "turn")
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return data(
            await feed.inspect(
                lambda run: tokens(run, id, turn, tokenizer_of(run, [run.whole(id).call.model]))
            )
        )

    async def _search(self, request: web.Request) -> web.Response:
        wanted = request.query.get("q", "")
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.fresh()
        return data(await feed.inspect(lambda run: search(run, wanted)))

    async def _journal(self, request: web.Request) -> web.StreamResponse:
        found = self._library.find(_word(request, "key"))
        await asyncio.to_thread(_check_shown, found)
        name = quote(
            found.path.name if found.line is None else f"{found.path.stem}-{found.line}.jsonl"
        )
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "Content-Type": "application/x-ndjson",
        }
        if found.line is None:
            return web.FileResponse(found.path, headers=headers)
        return web.Response(
            body=await asyncio.to_thread(nth_line, found.path, found.line), headers=headers
        )

    async def _training(self, request: web.Request) -> web.Response:
        feed = self._feeds.training(self._library.training(_word(request, "key")))
        return data((await feed.fresh()).data() | {"version": feed.watched.version})

    async def _samples(self, request: web.Request) -> web.Response:
        folder = self._library.training(_word(request, "key"))
        step = _number(request, "step")
        path = kept(folder).get(step)
        return data(samples(folder, step, (self._library.key_of(path) or "") if path else ""))

    async def _evaluation(self, request: web.Request) -> web.Response:
        key, other = _word(request, "key"), request.query.get("other", "")
        return data(await asyncio.to_thread(self._evaluations.shown, key, other))

    # --- what changes
    # --------------------------------------------------------------------------------------------

    async def _events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feed(request)
        await feed.fresh()
        return await stream(request, feed.follow(_number(request, "version")))

    async def _training_events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feeds.training(self._library.training(_word(request, "key")))
        await feed.fresh()
        return await stream(request, feed.follow(_number(request, "version")))


def _check_shown(found: LocatedRun) -> None:
    """A folder that is looked at may hold more than runs. Raises StoreError for a file that has
    none."""
    try:
        kind = kind_of(found.path)
    except OSError as error:
        raise StoreError(f"cannot read {found.path}: {error.strerror}") from None
    if kind not in get_args(Kind):
        raise StoreError(kind)


def _word(request: web.Request, name: str) -> str:
    word = request.query.get(name)
    if not word:
        raise BadRequest(f"{request.path} needs ?{name}=")
    return word


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not text.isdecimal():
        raise BadRequest(f"{request.path}: {name}={text!r} is not a number")
    return int(text)
