"""An OpenAI-compatible HTTP server that answers each request with a recursive run: ``ramify
serve``.

    GET  /v1/models, /v1/models/NAME     the only model
    POST /v1/chat/completions            when streamed: progress as reasoning, then the answer
    POST /v1/responses                   the same
    POST /v1/feedback                    a score of a recorded run (see feedback.py)
    GET  /metrics                        Prometheus metrics; needs a key
    GET  /healthz                        {"status": "ok", …}; 503 during shutdown

    request ──> key ──> admit ──> read ──> hold budget ──> run ──> answer or stream ──> settle

Any model name is accepted; the answer names the actual model. A client that disconnects cancels its
run. Keys, sizes and timeouts are checked in ``ramify/http_server/``, the formats of the APIs are in
``chat_completions.py`` and ``responses_api.py``, and admission and budgets in
``question_serving.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from ramify.clients.base import Client, Sampling
from ramify.engine.opentelemetry_spans import continue_trace
from ramify.engine.rlm import RLM
from ramify.http_server.access import ListenAddress
from ramify.http_server.base_server import CALLER, AiohttpServer, receive_body
from ramify.http_server.chat_completions_api import encode
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.machine_capacity import max_runs as runs_of_this_machine
from ramify.http_server.rejections import RequestRejected
from ramify.serve import chat_completions, responses_api
from ramify.serve.answer_request import AnswerRequest
from ramify.serve.api_keys import ServerApiKeys
from ramify.serve.chat_completions import ChatStreamEncoder
from ramify.serve.conversation_to_question import (
    LONG_CHARS,
    QuestionAndContext,
    build_question_and_context,
)
from ramify.serve.feedback import add_feedback_route
from ramify.serve.question_serving import ActiveQuestions, ServedAnswer, ServedQuestion
from ramify.serve.responses_api import ResponsesStreamEncoder
from ramify.serve.server_metrics import METRICS_TYPE, ServerMetrics
from ramify.serve.traffic_recorder import ServedTrafficRecorder

PING = b": waiting\n\n"
"""Comment line in an event stream. Clients ignore it, but proxies keep the connection open."""
_LARGE_BYTES = 1 << 18
"""Size in bytes above which a request body is parsed in a thread."""
_UNPACKED = 8
"""Maximum unpacked size of attachments, as a multiple of the maximum body size."""


class ApiFormatModule(Protocol):
    """The common interface of the modules ``chat_completions`` and ``responses``."""

    @property
    def PATH(self) -> str: ...

    @property
    def FIELD(self) -> str: ...

    def parse_request(self, body: bytes) -> AnswerRequest: ...

    def new_id(self) -> str: ...

    def response_body(
        self, answer: ServedAnswer, request: AnswerRequest, id: str, model: str
    ) -> dict[str, Any]: ...

    def open_stream(
        self, request: AnswerRequest, id: str, model: str
    ) -> ChatStreamEncoder | ResponsesStreamEncoder: ...


APIS: tuple[ApiFormatModule, ...] = (chat_completions, responses_api)


class RecursiveRunServer:
    """An HTTP server that answers each request with a recursive run of language model calls.

    ``async with`` starts it, and stops it at once at the end of the block. Call ``drain`` before
    that to let current runs end.
    """

    def __init__(
        self,
        rlm: RLM,
        *,
        name: str,
        address: ListenAddress | None = None,
        keys: ServerApiKeys | None = None,
        max_body_bytes: int = 64 << 20,
        max_runs: int | None = None,
        sampling: Sampling | None = None,
        ping_s: float = 15.0,
        open_recorder: Callable[[Sequence[Client]], ServedTrafficRecorder] | None = None,
    ) -> None:
        """Create a server whose answers come from the recursive language model ``rlm``.

        ``async with`` starts it.

        ``name``: the model's name. ``keys``: the API keys that clients may use; without them, the
        server generates a key for this start (``key``) if its ``address`` needs one. ``max_runs``:
        the maximum number of concurrent runs, by default as many as this machine can hold; further
        requests get status 429. ``sampling``: the default settings; a request may change its
        temperature, top_p and seed. ``ping_s``: the maximum silence of a stream in seconds.

        ``open_recorder``: a function that gets the clients of the models and returns the recorder
        of runs and of feedback about them, which the server closes. Requests with ``store: false``
        are not recorded.
        """
        self.address = address = address or ListenAddress()
        self.key = ""
        """The key that this server generated; empty if it has other keys or needs none."""
        self.keys = keys or ServerApiKeys({})
        if self.keys.bearer_keys is None and address.needs_key:
            self.keys, self.key = ServerApiKeys.with_generated_key()
        self.name = name
        self.metrics = ServerMetrics()
        self._rlm = rlm
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s
        self._open_recorder = open_recorder
        self._recorder: ServedTrafficRecorder | None = None
        self._sampling = sampling or Sampling()
        self._long_chars = LONG_CHARS
        self._questions = ActiveQuestions(
            rlm,
            self.keys,
            self.metrics,
            max_runs or runs_of_this_machine(),
            self._sampling,
        )
        self._http = AiohttpServer(
            address,
            self.keys.bearer_keys,
            public=("/healthz",),
            limits=HttpLimits(max_body_bytes=max_body_bytes),
            on_response=self.metrics.count_request,
        )
        self._is_open = False
        self._created = int(time.time())

    @property
    def url(self) -> str:
        """The base URL of the API, such as ``http://127.0.0.1:PORT/v1``."""
        return f"{self._http.url}/v1"

    @property
    def num_runs(self) -> int:
        """The number of runs in progress."""
        return self._questions.num_active

    def unfinished_runs(self) -> list[str]:
        """Return the ids of stored, resumable runs that a stopped server left unfinished."""
        return self._questions.unfinished.resumable_runs()

    # --- start and shutdown

    async def __aenter__(self) -> RecursiveRunServer:
        await self._rlm.__aenter__()
        try:
            window = await self._questions.prepare_models()
            self._long_chars = min(LONG_CHARS, window)
            if self._open_recorder is not None:
                self._recorder = self._open_recorder(await self._rlm.prepare())
            app = web.Application()
            for path, get in (
                ("/healthz", self._health),
                ("/metrics", self._metrics),
                ("/v1/models", self._models),
                ("/v1/models/{name:.+}", self._model),
            ):
                app.router.add_get(path, get)
            for api in APIS:
                app.router.add_post(api.PATH, self._make_handler(api))
            add_feedback_route(app, self._recorder)
            await self._http.start(app)
            self._is_open = True
        except BaseException:
            await self._rlm.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the server immediately, without waiting for its runs to finish.

        All runs are cancelled, and their requests get an error. Calling this twice is harmless.
        """
        if self._is_open:
            self._is_open = False
            await self._questions.close()
            await self._http.close()
            if self._recorder is not None:
                await self._recorder.close()
            await self._rlm.__aexit__(None, None, None)

    async def drain(self, grace_s: float, last_s: float = 30.0) -> None:
        """Reject new requests and wait for the runs in progress to end.

        Runs get ``grace_s`` seconds to end. Then they are asked to finish with their best answer,
        and get ``last_s`` more seconds.
        """
        await self._questions.drain(grace_s, last_s)

    # --- routes

    async def _health(self, _: web.Request) -> web.Response:
        is_ending = self._questions.is_ending
        state = {"status": "ending" if is_ending else "ok", "runs": self.num_runs}
        return web.json_response(state, status=503 if is_ending else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics.in_flight = self.num_runs
        return web.Response(
            body=self.metrics.to_prometheus_text().encode(), headers={"Content-Type": METRICS_TYPE}
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["name"] != self.name:
            raise RequestRejected(
                f"unknown model {http.match_info['name']!r:.80}: this server has {self.name}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return web.json_response(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": self._created}
        return {
            **about,
            "owned_by": "ramify",
            **({} if self._recorder is None else {"recorded": True}),
        }

    # --- one question

    def _make_handler(self, api: ApiFormatModule) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            caller = self.keys.caller_named(http[CALLER])
            with self._questions.admit_request(caller), continue_trace(http.headers):
                request, prompt = await self._read(http, api)
                async with self._questions.ask(caller, request, prompt) as question:
                    if request.stream:
                        return await self._stream_answer(http, api, question)
                    answer, id = await question.answer(), api.new_id()
                    await self._record(id, question)
                    body = api.response_body(answer, request, id, self.name)
                    return web.Response(
                        body=encode(body),
                        content_type="application/json",
                        headers=self._recording_headers(request),
                    )

        return handle

    async def _record(self, id: str, question: ServedQuestion) -> None:
        """Store the run that answered a question as recorded traffic, unless the client forbids it.

        The last part of its answer is sent only afterwards.
        """
        request, running = question.request, question.watch.running
        if self._recorder is not None and running is not None and not request.is_private:
            temperature = request.merged_sampling(self._sampling).temperature
            await self._recorder.record_run(id, running.recorder.trajectory, temperature)

    def _recording_headers(self, request: AnswerRequest) -> dict[str, str]:
        """Return an HTTP header that tells the client that the run is recorded, or no header."""
        is_recorded = self._recorder is not None and not request.is_private
        return {"Ramify-Recorded": "true"} if is_recorded else {}

    async def _read(
        self, http: web.Request, api: ApiFormatModule
    ) -> tuple[AnswerRequest, QuestionAndContext]:
        def read(body: bytes) -> tuple[AnswerRequest, QuestionAndContext]:
            request = api.parse_request(body)
            return request, build_question_and_context(
                request.messages, api.FIELD, _UNPACKED * self._max_body_bytes, self._long_chars
            )

        async with receive_body(http) as body:
            is_large = len(body) > _LARGE_BYTES
            return await asyncio.to_thread(read, body) if is_large else read(body)

    async def _stream_answer(
        self, http: web.Request, api: ApiFormatModule, question: ServedQuestion
    ) -> web.StreamResponse:
        """Send an answer as a stream of events.

        A failure before the first reply of a model gives an error response; a later failure is
        written as the last event.
        """
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                **self._recording_headers(question.request),
            }
        )
        id = api.new_id()
        stream = api.open_stream(question.request, id, self.name)

        async def send(part: Callable[[], bytes]) -> None:
            data = b""
            if not response.prepared:
                await response.prepare(http)
                data = stream.begin()
            data += part()
            self.metrics.count_sent_events(data.count(b"data: "))
            await response.write(data)

        try:
            async with contextlib.aclosing(question.watch.stream_texts(self._ping_s)) as texts:
                async for text in texts:
                    await send(partial(stream.encode_progress, text) if text else lambda: PING)
            answer = await question.answer()
            await self._record(id, question)
            await send(lambda: b"".join(stream.encode_answer(answer)))
        except RequestRejected as error:
            if not response.prepared:
                raise
            last = b"".join(stream.fail(error))
            await send(lambda: last)
        await response.write_eof()
        return response
