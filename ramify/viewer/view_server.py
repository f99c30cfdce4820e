"""The HTTP server of the viewer.

It sends the page, its data as JSON, and changes as server-sent events.

    GET /                        the page; /static/… has its scripts and styles
    GET /api/runs                all runs, evaluations and training folders, and unreadable files
    GET /api/runs/changes        the same as columns; only what changed since version &since=
    GET /api/run?key=            overview of a run, with the texts of &texts= calls
    GET /api/texts?key=          texts of the other calls, from index &from=
    GET /api/call?key=           one call of a run
    GET /api/compare?key=&key=   the calls of several runs, matched by question
    GET /api/provenance?key=     where the values of a call (&id=) came from
    GET /api/siblings?key=       the code of a call (&id=) beside that of a typical sibling
    GET /api/request?key=        the exact request of one turn (&id=&turn=)
    GET /api/tokens?key=         tokens of one turn
    GET /api/picture?key=        a picture (&digest=) that a call (&id=) has shown to a model
    GET /api/sources?key=        what was read as the context, and what was left out and why
    GET /api/source?key=         lines of one text of the context (&name=) around &line=
    GET /api/search?key=         full-text search in a run
    GET /api/events?key=         changes of a run since the page's version, and arriving replies
    GET /api/journal?key=        download of the file of a run or an evaluation
    GET /api/export?key=         download of a run's page as one file that works offline
    GET /api/training?key=       training curves, or only what changed since the page's &version=;
                                 /api/training/events sends further changes
    GET /api/samples?key=        saved rollouts of a step; /api/item?key=&item= has those of an item
                                 over the steps
    GET /api/evaluation?key=     scores, attempts, and the difference from another (&other=)
    GET /api/matrix?key=         the figures of a matrix of evaluations; /api/matrix/file?key= is a
                                 download of its page as one file that works offline
    GET /api/maps                all maps; /api/map?key= has the rows of one
    GET /api/alive               a sign of life
    GET /api/again?key=          the parts of a turn (&id=&turn=) to edit, and what that may cost
    POST /api/again/cost         the cost of an edit, or why it is refused
    POST /api/again              start a new run from a turn; returns its address
    GET /api/agreements          how often two people say the same about the same runs
    POST /api/review             save labels, a note and corrected scores of a run
    POST /api/verdict            save what a person says about the answers of some runs

Only POST /api/again, /api/review and /api/verdict change anything. They are refused if every
process of this machine may send requests (see run_again.py and store/reviews.py). While a page
follows a run in progress, a file beside its journal asks the run for arriving replies (see
store/live_replies.py). Static files are served from memory. ramify/http_server/ controls access,
and script_bundle.py bundles scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import getpass
import hashlib
import json
import mimetypes
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import quote

import msgspec
from aiohttp import web

from ramify.errors import RamifyError, StoreError
from ramify.http_server.access import AcceptedApiKeys, ListenAddress, new_key
from ramify.http_server.base_server import AiohttpServer, receive_body
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.rejections import RequestRejected
from ramify.store.reviews import UNSCORED, HumanRunReview, Verdict, inter_rater_agreements
from ramify.viewer.eval_matrix_page import matrix_page_data, stored_matrix_page
from ramify.viewer.file_change_feed import FileChangeFeed, FileChangeFeeds
from ramify.viewer.page_headers import add_headers
from ramify.viewer.provenance import provenance
from ramify.viewer.run_again import Rebuild, RerunFromTurnRequest, RerunStarter
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.run_comparison import MAX_RUNS, match_calls, overview_and_calls
from ramify.viewer.run_list_updates import VersionedRunList
from ramify.viewer.run_lookup import Kind, LocatedRun, detect_file_kind
from ramify.viewer.run_overview import question_and_answer_columns, run_overview, struct_fields
from ramify.viewer.run_text_search import search
from ramify.viewer.script_bundle import (
    APP,
    STATIC,
    app_script,
    early_script,
    module_source,
    offline_run_page,
)
from ramify.viewer.shown_pictures import picture_bytes
from ramify.viewer.shown_sources import source_excerpt, sources
from ramify.viewer.sibling_code import compare_sibling_code
from ramify.viewer.training_and_evaluation_pages import (
    EvaluationReportCache,
    rollout_files,
    rollouts_of_item,
    saved_rollouts,
)
from ramify.viewer.transcript import (
    MAX_TEXT,
    call_transcript,
    exact_request,
    find_tokenizer_file,
    tokens,
)
from ramify.viewer.watched_run import WatchedRun, nth_line


class ViewServer:
    """The HTTP server of the viewer.

    Use it with ``async with``, which starts and stops it.
    """

    def __init__(
        self,
        library: RunCatalog,
        *,
        address: ListenAddress | None = None,
        token: str | None = None,
        first: str = "",
        rebuild: Rebuild | None = None,
    ) -> None:
        """Create a server that shows the runs in the catalog ``library``.

        A browser must present ``token``; by default, a token is created if the ``address`` needs
        one. ``first`` is the run that a browser will open first, so the server begins to read it
        when it starts. ``rebuild`` creates the RLM of a stored run, so that the run can be repeated
        from its page.
        """
        self.address = address = address or ListenAddress()
        self.token = token or (new_key() if address.needs_key else "")
        """Access token of the page. Empty if the address needs none."""
        self._http = AiohttpServer(
            address,
            AcceptedApiKeys.from_key(self.token) if self.token else None,
            token=self.token,
            statuses={StoreError: 404, RamifyError: 400},
            limits=HttpLimits(max_body_bytes=MAX_BODY),
            key_help="open the address that ramify view printed",
        )
        self._library = library
        self._first = first
        self._reading: asyncio.Task[Any] | None = None
        self._feeds = FileChangeFeeds()
        self._evaluations = EvaluationReportCache(library)
        self._assets = StaticAssets()
        self._again = RerunStarter(rebuild) if rebuild is not None else None
        self._listing = VersionedRunList(library)
        self._person = getpass.getuser()

    @property
    def url(self) -> str:
        """URL of the page, including the token, so that a browser can open it directly."""
        return f"{self._http.url}/" + (f"?token={quote(self.token)}" if self.token else "")

    @property
    def port(self) -> int:
        """TCP port that the server listens on.

        It is known once the server listens.
        """
        return self._http.port

    async def __aenter__(self) -> ViewServer:
        app = web.Application()
        app.on_response_prepare.append(add_headers)
        for path, handler in {
            "/": self._page,
            "/static/{name:.+}": self._asset,
            "/api/runs": self._runs,
            "/api/runs/changes": self._runs_changes,
            "/api/run": self._run,
            "/api/texts": self._texts,
            "/api/call": self._call,
            "/api/compare": self._compare,
            "/api/provenance": self._provenance,
            "/api/siblings": self._siblings,
            "/api/request": self._request,
            "/api/tokens": self._tokens,
            "/api/picture": self._picture,
            "/api/sources": self._sources,
            "/api/source": self._source,
            "/api/search": self._search,
            "/api/events": self._events,
            "/api/journal": self._journal,
            "/api/export": self._export,
            "/api/training": self._training,
            "/api/item": self._item,
            "/api/training/events": self._training_events,
            "/api/samples": self._samples,
            "/api/evaluation": self._evaluation,
            "/api/matrix": self._matrix,
            "/api/matrix/file": self._matrix_file,
            "/api/maps": self._maps,
            "/api/map": self._map,
            "/api/agreements": self._agreements,
            "/api/alive": self._alive,
            "/api/again": self._again_place,
        }.items():
            app.router.add_get(path, handler)
        app.router.add_post("/api/again/cost", self._again_cost)
        app.router.add_post("/api/again", self._again_start)
        app.router.add_post("/api/review", self._write_review)
        app.router.add_post("/api/verdict", self._write_verdicts)
        await self._http.start(app)
        if self._first:
            self._reading = asyncio.create_task(
                self._feeds.feed_for_run(self._library.find(self._first)).refresh_watched()
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])
        if self._again is not None:
            await self._again.close()
        await self._feeds.close()
        await self._http.close()

    # --- data of the pages

    async def _page(self, request: web.Request) -> web.Response:
        return self._assets.file_response(request, "index.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return self._assets.file_response(request, request.match_info["name"])

    async def _alive(self, _: web.Request) -> web.Response:
        return json_response({})

    async def _runs(self, _: web.Request) -> web.Response:
        return compressed_response(await asyncio.to_thread(self._listing.full_listing))

    async def _runs_changes(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "")
        return compressed_response(await asyncio.to_thread(self._listing.changes, since))

    def _feed(self, request: web.Request) -> FileChangeFeed[WatchedRun]:
        return self._feeds.feed_for_run(self._library.find(_required_parameter(request, "key")))

    async def _run(self, request: web.Request) -> web.Response:
        feed = self._feed(request)
        num_texts = _number_parameter(request, "texts") if "texts" in request.query else None
        await feed.refresh_watched()
        return json_response(await feed.call_locked(lambda run: run_overview(run, num_texts)))

    async def _texts(self, request: web.Request) -> web.Response:
        first = _number_parameter(request, "from")
        return await self._inspect_run(request, lambda run: question_and_answer_columns(run, first))

    async def _call(self, request: web.Request) -> web.Response:
        id, first = _required_parameter(request, "id"), _number_parameter(request, "from")
        length = None if "full" in request.query else MAX_TEXT
        return await self._inspect_run(request, lambda run: call_transcript(run, id, first, length))

    async def _compare(self, request: web.Request) -> web.Response:
        keys = request.query.getall("key", [])
        if not 2 <= len(keys) <= MAX_RUNS:
            raise RequestRejected(
                f"{request.path} compares 2 to {MAX_RUNS} runs, but got {len(keys)}"
            )
        runs = []
        for key in keys:
            feed = self._feeds.feed_for_run(self._library.find(key))
            await feed.refresh_watched()
            runs.append(await feed.call_locked(overview_and_calls))
        rows = await asyncio.to_thread(match_calls, [calls for _, calls in runs])
        return compressed_response({"heads": [head for head, _ in runs], "rows": rows})

    async def _provenance(self, request: web.Request) -> web.Response:
        id = _required_parameter(request, "id")
        return await self._inspect_run(request, lambda run: provenance(run, id))

    async def _siblings(self, request: web.Request) -> web.Response:
        id = _required_parameter(request, "id")
        return await self._inspect_run(request, lambda run: compare_sibling_code(run, id))

    async def _request(self, request: web.Request) -> web.Response:
        id, turn = _required_parameter(request, "id"), _number_parameter(request, "turn")
        return await self._inspect_run(request, lambda run: exact_request(run, id, turn))

    async def _tokens(self, request: web.Request) -> web.Response:
        id, turn = _required_parameter(request, "id"), _number_parameter(request, "turn")
        return await self._inspect_run(
            request,
            lambda run: tokens(
                run, id, turn, find_tokenizer_file(run, [run.call_detail(id).call.model])
            ),
        )

    async def _picture(self, request: web.Request) -> web.Response:
        id, digest = _required_parameter(request, "id"), _required_parameter(request, "digest")
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.refresh_watched()
        body, kind = await feed.call_locked(lambda run: picture_bytes(run, id, digest))
        headers = {"Content-Type": kind, "Cache-Control": "private, max-age=31536000, immutable"}
        return web.Response(body=body, headers=headers)

    async def _sources(self, request: web.Request) -> web.Response:
        return await self._inspect_run(request, sources)

    async def _source(self, request: web.Request) -> web.Response:
        name, line = _required_parameter(request, "name"), _number_parameter(request, "line")
        return await self._inspect_run(request, lambda run: source_excerpt(run, name, line))

    async def _search(self, request: web.Request) -> web.Response:
        query = request.query.get("q", "")
        return await self._inspect_run(request, lambda run: search(run, query))

    async def _inspect_run(
        self, request: web.Request, look: Callable[[WatchedRun], dict[str, Any]]
    ) -> web.Response:
        feed = self._feed(request)
        if not feed.watched.version:
            await feed.refresh_watched()
        return json_response(await feed.call_locked(look))

    async def _journal(self, request: web.Request) -> web.StreamResponse:
        located = self._library.find(_required_parameter(request, "key"))
        await asyncio.to_thread(_check_shown, located)
        number = "" if located.line is None else f"-{located.line}"
        headers = _download_headers(f"{located.run.id}{number}.jsonl", "application/x-ndjson")
        path = located.run.path
        if path is None:
            body = await asyncio.to_thread(lambda: b"".join(located.run.line_blocks()))
            return web.Response(body=body, headers=headers)
        if located.line is None:
            return web.FileResponse(path, headers=headers)
        return web.Response(
            body=await asyncio.to_thread(nth_line, path, located.line), headers=headers
        )

    async def _export(self, request: web.Request) -> web.Response:
        located = self._library.find(_required_parameter(request, "key"))
        await asyncio.to_thread(_check_shown, located)
        return web.Response(
            body=await asyncio.to_thread(offline_run_page, located),
            headers=_download_headers(f"{located.run.id}.html", "text/html; charset=utf-8"),
        )

    async def _training(self, request: web.Request) -> web.Response:
        feed = self._feeds.training_feed(
            self._library.find_training_folder(_required_parameter(request, "key"))
        )
        curves = await feed.refresh_watched()
        if "version" not in request.query:
            return json_response(curves.data())
        version = _number_parameter(request, "version")
        if version == curves.version:
            return json_response({"version": version})
        return json_response(curves.changes(version))

    async def _samples(self, request: web.Request) -> web.Response:
        folder = self._library.find_training_folder(_required_parameter(request, "key"))
        step = _number_parameter(request, "step")
        path = rollout_files(folder).get(step)
        return json_response(
            saved_rollouts(folder, step, (self._library.key_of_path(path) or "") if path else "")
        )

    async def _item(self, request: web.Request) -> web.Response:
        folder = self._library.find_training_folder(_required_parameter(request, "key"))
        item, key_of = _required_parameter(request, "item"), self._library.key_of_path
        return json_response(await asyncio.to_thread(rollouts_of_item, folder, item, key_of))

    async def _evaluation(self, request: web.Request) -> web.Response:
        key, other = _required_parameter(request, "key"), request.query.get("other", "")
        return json_response(await asyncio.to_thread(self._evaluations.page_data, key, other))

    async def _matrix(self, request: web.Request) -> web.Response:
        key = _required_parameter(request, "key")
        return json_response(await asyncio.to_thread(matrix_page_data, self._library, key))

    async def _matrix_file(self, request: web.Request) -> web.Response:
        key = _required_parameter(request, "key")
        id, body = await asyncio.to_thread(stored_matrix_page, self._library, key)
        headers = _download_headers(f"matrix-{id}.html", "text/html; charset=utf-8")
        return web.Response(body=body, headers=headers)

    async def _maps(self, _: web.Request) -> web.Response:
        return json_response({"maps": await asyncio.to_thread(self._library.map_summaries)})

    async def _map(self, request: web.Request) -> web.Response:
        return json_response(
            await asyncio.to_thread(self._library.map_detail, _required_parameter(request, "key"))
        )

    # --- running again

    async def _again_place(self, request: web.Request) -> web.Response:
        located, again = (
            self._library.find(_required_parameter(request, "key")),
            self._require_run_again(),
        )
        return json_response(
            await again.turn_to_edit(
                located, _required_parameter(request, "id"), _number_parameter(request, "turn")
            )
        )

    async def _again_cost(self, request: web.Request) -> web.Response:
        again, wanted = self._require_run_again(), await _decode_body(request, RerunFromTurnRequest)
        return json_response(await again.estimate(self._library.find(wanted.key), wanted))

    async def _again_start(self, request: web.Request) -> web.Response:
        again, wanted = self._require_run_again(), await _decode_body(request, RerunFromTurnRequest)
        store, id = await again.start(self._library.find(wanted.key), wanted)
        return json_response({"key": self._library.key_of_stored_run(store, id)})

    def _require_run_again(self) -> RerunStarter:
        self._refuse_if_open("running a turn again costs money")
        if self._again is None:
            raise RequestRejected("this server cannot start runs", status=403)
        return self._again

    def _refuse_if_open(self, why: str) -> None:
        if self.address.is_open:
            raise RequestRejected(
                f"{why}, and this page is open to every user of this machine: start ramify view "
                "without --open-to-this-machine",
                status=403,
            )

    async def _write_review(self, request: web.Request) -> web.Response:
        self._refuse_if_open("saving a review changes the store")
        wanted = await _decode_body(request, SubmitReviewRequest)
        feed = self._feeds.feed_for_run(self._library.find(wanted.key))
        await feed.refresh_watched()

        def write(run: WatchedRun) -> dict[str, Any]:
            review = HumanRunReview(
                wanted.labels, wanted.note, wanted.rewards, run.human_review.verdicts
            )
            return struct_fields(run.source.write_review(run.review_key, review))

        return json_response(await feed.call_locked(write))

    async def _write_verdicts(self, request: web.Request) -> web.Response:
        self._refuse_if_open("saving a label changes the store")
        wanted = await _decode_body(request, SaveVerdictRequest)
        if not 1 <= len(wanted.keys) <= MAX_LABELLED:
            raise RequestRejected(
                f"{request.path} labels 1 to {MAX_LABELLED:,} runs, but got {len(wanted.keys):,}"
            )
        person = wanted.person.strip() or self._person

        def write(run: WatchedRun) -> dict[str, Any]:
            review = run.human_review
            if wanted.note is not None:
                review = msgspec.structs.replace(review, note=wanted.note)
            if wanted.verdict != "":
                reward = next(iter(run.tree.run_data.rewards), UNSCORED)
                verdict = None if wanted.verdict == "none" else wanted.verdict
                review = review.with_verdict(person, verdict, reward)
            saved = run.source.write_review(run.review_key, review)
            return {**struct_fields(saved), "verdict": saved.combined_verdict}

        reviews = {}
        for key in wanted.keys:
            feed = self._feeds.feed_for_run(self._library.find(key))
            await feed.refresh_watched()
            reviews[key] = await feed.call_locked(write)
        return json_response({"person": person, "reviews": reviews})

    async def _agreements(self, _: web.Request) -> web.Response:
        listed = await asyncio.to_thread(self._listing.full_listing)
        return json_response(
            {"agreements": inter_rater_agreements(run.verdicts for run in listed["runs"])}
        )

    # --- changes

    async def _events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feed(request)
        await feed.refresh_watched()
        return await stream(request, feed.follow(_number_parameter(request, "version")))

    async def _training_events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feeds.training_feed(
            self._library.find_training_folder(_required_parameter(request, "key"))
        )
        await feed.refresh_watched()
        return await stream(request, feed.follow(_number_parameter(request, "version")))


def _download_headers(name: str, kind: str) -> dict[str, str]:
    """Return the headers that make a browser save a response as a file instead of showing it."""
    return {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}",
        "Content-Type": kind,
    }


def _check_shown(located: LocatedRun) -> None:
    """Raise StoreError if a file contains no runs and so cannot be shown.

    The folders given to the viewer may hold other files.
    """
    if located.run.path is None:
        return
    try:
        kind = detect_file_kind(located.run.path)
    except OSError as error:
        raise StoreError(f"cannot read {located.run}: {error.strerror}") from None
    if kind not in get_args(Kind):
        raise StoreError(kind)


async def _decode_body(request: web.Request, type: type[B]) -> B:
    """Decode the JSON body of a request as a struct of type ``type``.

    Raises RequestRejected if the body is invalid.
    """
    async with receive_body(request) as body:
        try:
            return msgspec.json.decode(body, type=type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestRejected(f"{request.path}: {error}") from None


def _required_parameter(request: web.Request, name: str) -> str:
    word = request.query.get(name)
    if not word:
        raise RequestRejected(f"{request.path} needs ?{name}=")
    return word


def _number_parameter(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise RequestRejected(f"{request.path}: {name}={text!r:.100} is not a number")
    return int(text)


B = TypeVar("B", bound=msgspec.Struct)
_MAX_DIGITS = 18
MAX_BODY = 8 << 20
"""Maximum bytes of a request's body, which may contain an edited prompt."""


class SubmitReviewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to save a person's review of a run.

    The fields are those of ``HumanRunReview``.
    """

    key: str
    labels: tuple[str, ...] = ()
    note: str = ""
    rewards: dict[str, float] = {}


class SaveVerdictRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to save one person's verdict and note on several runs."""

    keys: tuple[str, ...]
    verdict: Verdict | Literal["none", ""] = ""
    """The person's verdict. ``none`` removes it, and an empty string leaves it unchanged."""
    note: str | None = None
    """Note that replaces the present one. None leaves it unchanged."""
    person: str = ""
    """Name of the person. The default is the user that runs the server."""


MAX_LABELLED = 1_000
"""Maximum number of runs in one labelling request."""
_KEEP_ALIVE_S = 15.0
"""Seconds between keep-alive comments on an idle stream."""


class StaticAssets:
    """A cache of the page's scripts and styles.

    They are sent with ETags, so that browsers can reuse them.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}

    def file_response(self, request: web.Request, name: str) -> web.Response:
        """Return a response with the script or style ``name``.

        Raises HTTPNotFound if there is no such file.
        """
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


@functools.cache
def _files_of_page() -> dict[str, Path]:
    return {
        path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()
    }


def _body(name: str) -> bytes:
    if name == APP:
        return app_script().encode()
    path = _files_of_page().get(name)
    if path is None:
        raise web.HTTPNotFound
    if name == "index.html":
        return (
            path.read_text(encoding="utf-8")
            .replace("<script></script>", f"<script>{early_script()}</script>")
            .encode()
        )
    return (
        module_source(name).encode()
        if path.suffix == ".js" and path.parent == STATIC
        else path.read_bytes()
    )


def json_response(value: Any) -> web.Response:
    return web.Response(body=encode_json(value), content_type="application/json")


def compressed_response(value: Any) -> web.Response:
    """Return ``value`` as an HTTP response, compressed if the client accepts that."""
    response = json_response(value)
    response.enable_compression()
    return response


def encode_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates in a file from elsewhere
        return json.dumps(msgspec.to_builtins(value)).encode()


async def stream(
    request: web.Request, messages: AsyncGenerator[dict[str, Any], None]
) -> web.StreamResponse:
    """Send ``messages`` to the client as server-sent events until there are no more.

    The last event is named ``end``. It tells the page not to reconnect.
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
    # Sent at once, so that the browser knows that the stream is open.
    yield b": open\n\n"
    upcoming = asyncio.ensure_future(anext(messages))
    try:
        while True:
            done, _ = await asyncio.wait([upcoming], timeout=_KEEP_ALIVE_S)
            if not done:
                yield b": still here\n\n"
                continue
            try:
                yield b"data: " + encode_json(upcoming.result()) + b"\n\n"
            except StopAsyncIteration:
                return
            upcoming = asyncio.ensure_future(anext(messages))
    finally:
        upcoming.cancel()
        # A generator cannot be closed while it is still running.
        await asyncio.wait([upcoming])
        await messages.aclose()
