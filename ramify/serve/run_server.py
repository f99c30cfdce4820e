"""Whole recursive runs behind an OpenAI-compatible address: ``ramify serve``.

    GET  /v1/models, /v1/models/NAME     the one model
    POST /v1/chat/completions            also streamed: progress as reasoning, then the answer as content
    POST /v1/responses                   the same
    GET  /metrics                        for Prometheus; with a key where there are keys
    GET  /healthz                        {"status": "ok", …}; 503 while it ends

    request ──> key ──> read ──> budget held ──> run ──> answer or stream ──> budget settled
Any model name is taken, and the answer says which model it was. Whoever hangs up cancels the tree. Bodies are bounded, waits
are bounded, and without a key only this machine may ask. What an API looks like is ``chat_completions.py``'s and ``responses.py``'s;
who may ask, and for how much, is ``questions.py``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.engine.spans import continued
from ramify.errors import RamifyError
from ramify.serve import chat_completions, responses
from ramify.serve.answer import ServedAnswer
from ramify.serve.answer_request import AnswerRequest
from ramify.serve.completions import encode
from ramify.serve.keys import ApiKeys
from ramify.serve.prompt import LONG_CHARS, RunPrompt, prompt_of
from ramify.serve.questions import ServedQuestion, ServedQuestions
from ramify.serve.server_metrics import TYPE, ServerMetrics
from ramify.serve.web import HttpListener, RequestRejected, bearer, is_loopback, refuse_open

_log = logging.getLogger(__name__)

_GONE = 499
"""How a caller who hung up is counted."""
PING = b": waiting\n\n"
"""A comment, which clients pass over and proxies take for life."""
_UPLOAD_S = 300.0
"""For a request's body to arrive."""
_LARGE_BYTES = 1 << 18
"""A larger body is read in a thread."""
_UNPACKED = 8
"""What attached files may unpack to, in largest bodies."""


class StreamEvents(Protocol):
    """The events of one stream, in an API's words; see ``chat.ChatStream``."""

    def begin(self) -> bytes: ...

    def progress(self, text: str) -> bytes: ...

    def end(self, answer: ServedAnswer) -> Iterator[bytes]: ...

    def fail(self, error: RequestRejected) -> Iterator[bytes]: ...


class ApiFormat(Protocol):
    """What the modules ``chat`` and ``responses`` both have."""

    @property
    def PATH(self) -> str: ...

    @property
    def FIELD(self) -> str: ...

    def read(self, body: bytes) -> AnswerRequest: ...

    def new_id(self) -> str: ...

    def whole(
        self, answer: ServedAnswer, wanted: AnswerRequest, id: str, model: str
    ) -> dict[str, Any]: ...

    def open_stream(self, wanted: AnswerRequest, id: str, model: str) -> StreamEvents: ...


APIS: tuple[ApiFormat, ...] = (chat_completions, responses)


class RunServer:
    """The server; ``async with`` starts it and, at its end, closes it at once. ``drain`` first lets
    runs end."""

    def __init__(
        self,
        rlm: RLM,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 8000,
        keys: ApiKeys | None = None,
        max_body_bytes: int = 64 << 20,
        max_runs: int = 256,
        sampling: Sampling | None = None,
        ping_s: float = 15.0,
    ) -> None:
        """``name`` is the model's; ``max_runs`` go on at once, and who comes then is told to come
        back; ``sampling`` is what a request may change temperature, top_p and seed of; a stream is
        silent for ``ping_s`` at most. Raises ConfigError for an address beyond loopback without a
        key."""
        self._keys = keys or ApiKeys({})
        refuse_open(host, not self._keys.is_open)
        self.name, self.metrics = name, ServerMetrics()
        self._rlm, self._max_body_bytes, self._ping_s = rlm, max_body_bytes, ping_s
        self._long_chars = LONG_CHARS
        self._questions = ServedQuestions(
            rlm, self._keys, self.metrics, max_runs, sampling or Sampling()
        )
        self._listener = HttpListener(host, port)
        self._is_open = False
        self._created = int(time.time())

    @property
    def url(self) -> str:
        """The base URL, ``http://127.0.0.1:PORT/v1``."""
        return self._listener.url

    @property
    def num_runs(self) -> int:
        """Questions that are being answered."""
        return self._questions.num_present

    # --- beginning and end
    # -------------------------------------------------------------------------------------

    async def __aenter__(self) -> RunServer:
        await self._rlm.__aenter__()
        try:
            window = await self._questions.prepare()
            self._long_chars = min(LONG_CHARS, window)
            app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guarded])
            for path, get in (
                ("/healthz", self._health),
                ("/metrics", self._metrics),
                ("/v1/models", self._models),
                ("/v1/models/{name:.+}", self._model),
            ):
                app.router.add_get(path, get)
            for api in APIS:
                app.router.add_post(api.PATH, self._asked_over(api))
            await self._listener.start(app)
            self._is_open = True
        except BaseException:
            await self._rlm.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End at once: runs are cancelled, and whoever waits is told so. Idempotent."""
        if self._is_open:
            self._is_open = False
            await self._questions.close()
            await self._listener.close()
            await self._rlm.__aexit__(None, None, None)

    async def drain(self, grace_s: float, last_s: float = 30.0) -> None:
        """Take no more requests; let runs end for ``grace_s``, then ask them for their last word,
        and wait ``last_s``."""
        await self._questions.drain(grace_s, last_s)

    # --- every request
    # -----------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The key, every error as the API writes it, and the count."""
        status = _GONE
        try:
            response = await self._handled(request, handler)
            status = response.status
        finally:
            resource = request.match_info.route.resource
            self.metrics.request(resource.canonical if resource else "other", status)
        return response

    async def _handled(self, http: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if http.path != "/healthz":
                self._check_host(http)
                self._keys.caller(bearer(http))
            response: web.StreamResponse = await handler(http)
        except RequestRejected as error:
            return error.response()
        except web.HTTPException as error:
            why = error.text if error.status == 413 else error.reason  # which has the sizes
            return RequestRejected(
                f"{http.method} {http.path}: {why}", status=error.status
            ).response()
        except RamifyError as error:
            return RequestRejected(str(error), status=500).response()
        except ConnectionResetError:  # whoever asked is gone in the middle of an event
            return web.Response(status=_GONE)
        except Exception as error:  # noqa: BLE001 -- a bug; whoever runs the server is told all of it
            _log.exception("%s %s", http.method, http.path)
            return RequestRejected(f"internal error: {type(error).__name__}", status=500).response()
        return response

    def _check_host(self, http: web.Request) -> None:
        """A page in a browser can have its own name point here; without a key, only this machine's
        names are taken."""
        host = http.url.host or ""
        if self._keys.is_open and not is_loopback(host):
            raise RequestRejected(
                f"the host {host!r} is not this machine: ask {self.url}", status=403
            )

    async def _health(self, _: web.Request) -> web.Response:
        is_ending = self._questions.is_ending
        state = {"status": "ending" if is_ending else "ok", "runs": self.num_runs}
        return web.json_response(state, status=503 if is_ending else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics.in_flight = self.num_runs
        return web.Response(body=self.metrics.text().encode(), headers={"Content-Type": TYPE})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["name"] != self.name:
            raise RequestRejected(
                f"there is no model {http.match_info['name']!r:.80}: this server has {self.name}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "ramify"}

    # --- one question
    # ------------------------------------------------------------------------------------------

    def _asked_over(self, api: ApiFormat) -> Any:
        async def asked(http: web.Request) -> web.StreamResponse:
            wanted, prompt = await self._read(http, api)
            with continued(http.headers):
                async with self._questions.ask(
                    self._keys.caller(bearer(http)), wanted, prompt
                ) as one:
                    if wanted.stream:
                        return await self._streamed(http, api, one)
                    answer = await one.answer()
                    body = api.whole(answer, wanted, api.new_id(), self.name)
                    return web.Response(body=encode(body), content_type="application/json")

        return asked

    async def _read(self, http: web.Request, api: ApiFormat) -> tuple[AnswerRequest, RunPrompt]:
        if (
            http.content_type != "application/json"
        ):  # a page in a browser may post other types without asking
            raise RequestRejected("send the body as application/json", status=415)
        try:
            async with asyncio.timeout(_UPLOAD_S):
                body = await http.read()
        except TimeoutError:
            raise RequestRejected(
                f"the body did not arrive within {_UPLOAD_S:g} s", status=408
            ) from None

        def read() -> tuple[AnswerRequest, RunPrompt]:
            wanted = api.read(body)
            return wanted, prompt_of(
                wanted.said, api.FIELD, _UNPACKED * self._max_body_bytes, self._long_chars
            )

        return await asyncio.to_thread(read) if len(body) > _LARGE_BYTES else read()

    async def _streamed(
        self, http: web.Request, api: ApiFormat, one: ServedQuestion
    ) -> web.StreamResponse:
        """What fails before a model has answered is an error with its status; what fails later is
        the last event."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        stream = api.open_stream(one.wanted, api.new_id(), self.name)

        async def send(part: Callable[[], bytes]) -> None:
            data = b""
            if not response.prepared:
                await response.prepare(http)
                data = stream.begin()
            data += part()
            self.metrics.events(data.count(b"data: "))
            await response.write(data)

        try:
            async with contextlib.aclosing(one.watch.texts(self._ping_s)) as texts:
                async for text in texts:
                    await send(partial(stream.progress, text) if text else lambda: PING)
            answer = await one.answer()
            await send(lambda: b"".join(stream.end(answer)))
        except RequestRejected as error:
            if not response.prepared:
                raise
            last = b"".join(stream.fail(error))
            await send(lambda: last)
        await response.write_eof()
        return response
