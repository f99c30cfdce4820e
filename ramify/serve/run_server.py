"""OpenAI-compatible server that answers each request with a recursive run: ``ramify serve``.

    GET  /v1/models, /v1/models/NAME     the only model
    POST /v1/chat/completions            when streamed: progress as reasoning, then the answer
    POST /v1/responses                   the same
    GET  /metrics                        Prometheus metrics; needs a key if there are keys
    GET  /healthz                        {"status": "ok", …}; 503 during shutdown

    request ──> key ──> read ──> hold budget ──> run ──> answer or stream ──> settle budget

Any model name is accepted; the answer names the actual model. A client that disconnects cancels its
run. Request sizes and waits are limited, and without keys only this machine has access. Not here:
the format of each API (see chat_completions.py and responses.py), admission and budgets (see
questions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from ramify.clients.base import Sampling
from ramify.engine.rlm import RLM
from ramify.engine.spans import continued
from ramify.errors import RamifyError
from ramify.logging import RoomLogger
from ramify.serve import chat_completions, responses
from ramify.serve.answer_request import AnswerRequest
from ramify.serve.chat_completions import ChatStream
from ramify.serve.completions import encode
from ramify.serve.keys import ApiKeys
from ramify.serve.prompt import LONG_CHARS, RunPrompt, prompt_of
from ramify.serve.questions import ServedAnswer, ServedQuestion, ServedQuestions
from ramify.serve.responses import ResponseStream
from ramify.serve.web import (
    METRICS_TYPE,
    HttpListener,
    RequestRejected,
    ServerMetrics,
    bearer,
    is_loopback,
    refuse_open,
)

_log = RoomLogger("serve")
_GONE = 499
"""Status that the metrics use for a client that disconnected."""
PING = b": waiting\n\n"
"""Comment in the event stream: clients ignore it, and proxies see that the connection is alive."""
_UPLOAD_S = 300.0
"""Maximum seconds for the body of a request to arrive."""
_LARGE_BYTES = 1 << 18
"""Size above which a body is parsed in a thread."""
_UNPACKED = 8
"""Maximum size of unpacked attachments, as a multiple of the maximum body size."""


class ApiFormat(Protocol):
    """Interface of the modules ``chat_completions`` and ``responses``."""

    @property
    def PATH(self) -> str: ...

    @property
    def FIELD(self) -> str: ...

    def read(self, body: bytes) -> AnswerRequest: ...

    def new_id(self) -> str: ...

    def response_body(
        self, answer: ServedAnswer, request: AnswerRequest, id: str, model: str
    ) -> dict[str, Any]: ...

    def open_stream(
        self, request: AnswerRequest, id: str, model: str
    ) -> ChatStream | ResponseStream: ...


APIS: tuple[ApiFormat, ...] = (chat_completions, responses)


class RunServer:
    """HTTP server for runs.

    ``async with`` starts it, and closes it at once at the end of the block. Call ``drain`` before
    that to let current runs end.
    """

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
        """``name`` is the model's name. ``max_runs`` is the maximum of concurrent runs; further
        requests get status 429. ``sampling`` is the default; a request may change its temperature,
        top_p and seed. ``ping_s`` is the maximum silence of a stream in seconds.

        Raises ConfigError for an address beyond loopback without a key.
        """
        self._keys = keys or ApiKeys({})
        refuse_open(host, not self._keys.is_open)
        self.name = name
        self.metrics = ServerMetrics()
        self._rlm = rlm
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s
        self._long_chars = LONG_CHARS
        self._questions = ServedQuestions(
            rlm, self._keys, self.metrics, max_runs, sampling or Sampling()
        )
        self._listener = HttpListener(host, port)
        self._is_open = False
        self._created = int(time.time())

    @property
    def url(self) -> str:
        """Base URL of the API: ``http://127.0.0.1:PORT/v1``."""
        return self._listener.url

    @property
    def num_runs(self) -> int:
        """Number of runs in progress."""
        return self._questions.num_active

    # --- start and shutdown

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
                app.router.add_post(api.PATH, self._handler(api))
            await self._listener.start(app)
            self._is_open = True
        except BaseException:
            await self._rlm.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop at once: cancel all runs and answer their requests with an error. Idempotent."""
        if self._is_open:
            self._is_open = False
            await self._questions.close()
            await self._listener.close()
            await self._rlm.__aexit__(None, None, None)

    async def drain(self, grace_s: float, last_s: float = 30.0) -> None:
        """Reject new requests and wait for the current runs.

        Runs get ``grace_s`` seconds to end. Then they are asked to finish with their best answer,
        and get ``last_s`` more seconds.
        """
        await self._questions.drain(grace_s, last_s)

    # --- every request

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the key, convert errors to the API's format, and count the request."""
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
            # The text of a 413 (body too large) has the sizes.
            why = error.text if error.status == 413 else error.reason
            if error.status == 404 and not http.path.startswith("/v1/"):
                why = f"{why}; the base URL is {self.url}"
            return RequestRejected(
                f"{http.method} {http.path}: {why}", status=error.status
            ).response()
        except RamifyError as error:
            _log.warning("request_failed", f"{http.method} {http.path}: {error}")
            return RequestRejected(str(error), status=500).response()
        except ConnectionResetError:  # the client disconnected in the middle of an event
            return web.Response(status=_GONE)
        except Exception as error:  # noqa: BLE001 -- a bug; the operator gets the full traceback
            text = f"{http.method} {http.path} failed: {type(error).__name__}"
            _log.error("internal_error", text, shown=True, error=error)
            return RequestRejected(f"internal error: {type(error).__name__}", status=500).response()
        return response

    def _check_host(self, http: web.Request) -> None:
        """Reject foreign host names if no key is needed (protection against DNS rebinding)."""
        host = http.url.host or ""
        if self._keys.is_open and not is_loopback(host):
            raise RequestRejected(
                f"the host {host!r} is not this machine: send requests to {self.url}", status=403
            )

    async def _health(self, _: web.Request) -> web.Response:
        is_ending = self._questions.is_ending
        state = {"status": "ending" if is_ending else "ok", "runs": self.num_runs}
        return web.json_response(state, status=503 if is_ending else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics.in_flight = self.num_runs
        return web.Response(
            body=self.metrics.text().encode(), headers={"Content-Type": METRICS_TYPE}
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["name"] != self.name:
            raise RequestRejected(
                f"unknown model {http.match_info['name']!r:.80}: this server has {self.name}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "ramify"}

    # --- one question

    def _handler(self, api: ApiFormat) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            request, prompt = await self._read(http, api)
            with continued(http.headers):
                async with self._questions.ask(
                    self._keys.caller(bearer(http)), request, prompt
                ) as question:
                    if request.stream:
                        return await self._streamed(http, api, question)
                    answer = await question.answer()
                    body = api.response_body(answer, request, api.new_id(), self.name)
                    return web.Response(body=encode(body), content_type="application/json")

        return handle

    async def _read(self, http: web.Request, api: ApiFormat) -> tuple[AnswerRequest, RunPrompt]:
        # A web page may post other content types to any host without asking.
        if http.content_type != "application/json":
            raise RequestRejected("send the body as application/json", status=415)
        try:
            async with asyncio.timeout(_UPLOAD_S):
                body = await http.read()
        except TimeoutError:
            raise RequestRejected(
                f"the body did not arrive within {_UPLOAD_S:g} s", status=408
            ) from None

        def read() -> tuple[AnswerRequest, RunPrompt]:
            request = api.read(body)
            return request, prompt_of(
                request.messages, api.FIELD, _UNPACKED * self._max_body_bytes, self._long_chars
            )

        return await asyncio.to_thread(read) if len(body) > _LARGE_BYTES else read()

    async def _streamed(
        self, http: web.Request, api: ApiFormat, question: ServedQuestion
    ) -> web.StreamResponse:
        """Stream an answer.

        A failure before the first reply of a model gives an error response; a later failure is
        written as the last event.
        """
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        stream = api.open_stream(question.request, api.new_id(), self.name)

        async def send(part: Callable[[], bytes]) -> None:
            data = b""
            if not response.prepared:
                await response.prepare(http)
                data = stream.begin()
            data += part()
            self.metrics.events(data.count(b"data: "))
            await response.write(data)

        try:
            async with contextlib.aclosing(question.watch.texts(self._ping_s)) as texts:
                async for text in texts:
                    await send(partial(stream.progress, text) if text else lambda: PING)
            answer = await question.answer()
            await send(lambda: b"".join(stream.end(answer)))
        except RequestRejected as error:
            if not response.prepared:
                raise
            last = b"".join(stream.fail(error))
            await send(lambda: last)
        await response.write_eof()
        return response
