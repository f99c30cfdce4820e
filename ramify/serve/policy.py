"""OpenAI-compatible server for one local policy: ``ramify serve-policy FOLDER``.

    GET  /health                 {"status": "ok", "version": 0, …}, also while it sleeps
    GET  /metrics                cache usage, under vLLM's metric names
    GET  /v1/models              the only model, with its window
    POST /v1/chat/completions    streaming, logprobs, token ids (return_token_ids), and tools if the
                                 chat template supports them
    POST /v1/completions         token ids in, token ids out (see token_completions.py)
    POST /generate               the same in SGLang's format
    GET  /version, /server_info  facts that a trainer compares with its policy

The server remembers the token ids of its last replies. If a conversation comes back with one more
message, it continues from exactly those ids. A client that disconnects frees its slot. Not here:
keys (see ramify/http_server/), replacing the weights and giving memory back (see weight_routes.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ramify.clients.base import KnownPrefix, Request
from ramify.errors import ConfigError, ModelError, RamifyError, Refused
from ramify.http_server import completions
from ramify.http_server.access import BearerKeys, ListenAddress, new_key
from ramify.http_server.completions import CompletionRequest
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.rejections import RequestRejected, error_body
from ramify.http_server.shell import HttpServer, received
from ramify.inference.http.engine_server import pressure_text
from ramify.inference.local.local_client import LocalClient
from ramify.serve import token_completions
from ramify.serve.server_metrics import METRICS_TYPE
from ramify.serve.weight_routes import WAIT_S, WeightRoutes, facts
from ramify.types.message import Message, Reply

_MAX_BODY_BYTES = 64 << 20
_MAX_IN_FLIGHT = 1024
"""Maximum requests in progress; further requests are rejected with status 429."""
_MAX_PATHS = 4096
"""Number of conversations whose token ids are remembered."""


class PolicyServer:
    """HTTP server for one policy; ``async with`` starts and stops it."""

    def __init__(
        self,
        client: LocalClient,
        *,
        name: str,
        address: ListenAddress | None = None,
        key: str | None = None,
        weight_transfer: bool = False,
        weight_syncs: Sequence[str] = (),
        weights_root: Path | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """``name`` is the model's name. ``key`` is the bearer key that clients must send; by
        default the server makes one for this start, if its ``address`` needs one. With
        ``weight_transfer``, clients may also replace the weights; the last three parameters are
        those of ``WeightRoutes``.

        Raises ConfigError for an open address with ``weight_transfer``.
        """
        self.address = address = address or ListenAddress()
        if address.is_open and weight_transfer:
            raise ConfigError(
                "a server that takes weights always needs a key, since a client that sends "
                "weights decides what the model says: remove --open-to-this-machine"
            )
        self.name = name
        self.key = key or (new_key() if address.needs_key else "")
        """The key that clients must send; empty if the address needs none."""
        self._client = client
        self._in_flight = 0
        self._waiting = 0
        self._paths = _KnownPaths()
        self._weights: WeightRoutes | None = None
        if weight_transfer:
            self._weights = WeightRoutes(
                client,
                lambda: self._in_flight,
                weight_syncs=weight_syncs,
                root=weights_root,
                wait_s=wait_s,
            )
        self._http = HttpServer(
            address,
            BearerKeys.of(self.key) if self.key else None,
            public=("/health",),
            limits=HttpLimits(max_body_bytes=_MAX_BODY_BYTES),
        )

    @property
    def url(self) -> str:
        """Base URL of the API: ``http://127.0.0.1:PORT/v1``."""
        return f"{self._http.url}/v1"

    async def __aenter__(self) -> PolicyServer:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._sample)
        app.router.add_post("/generate", self._sample)
        for path in ("/version", "/server_info", "/model_info"):
            app.router.add_get(path, self._facts)
        if self._weights is not None:
            self._weights.add_to(app)
        await self._http.start(app)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()
        if self._weights is not None:
            self._weights.close()

    async def _health(self, _: web.Request) -> web.Response:
        asleep = self._weights.sleep.asleep if self._weights is not None else []
        state = {"status": "ok", "version": self._client.version, "in_flight": self._in_flight}
        return web.json_response({**state, "asleep": asleep, "held_bytes": self._client.held()})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = pressure_text(await self._client.pressure())
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.name,
            "object": "model",
            "owned_by": "ramify",
            "max_model_len": self._client.window,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _facts(self, _: web.Request) -> web.Response:
        return web.json_response(
            {**facts(self._client, self.name), "weight_transfer": self._weights is not None}
        )

    async def _sample(self, http: web.Request) -> web.StreamResponse:
        async def answer() -> web.StreamResponse:
            async with received(http) as body:
                if http.path == "/generate":
                    reply = await token_completions.generate(self._client, body)
                else:
                    reply = await token_completions.complete(self._client, body, self.name)
            return web.json_response(reply, dumps=_dumps)

        return await self._counted(answer)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        async def answer() -> web.StreamResponse:
            async with received(http) as body:
                api_request = completions.read(body)
            request = self._paths.continued(
                completions.request_of(api_request, self._client.window)
            )
            return await (
                self._streamed(http, api_request, request)
                if api_request.stream
                else self._whole(api_request, request)
            )

        return await self._counted(answer)

    async def _counted(
        self, answer: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Call ``answer`` as a counted request. Its errors become rejections."""
        if self._in_flight + self._waiting >= _MAX_IN_FLIGHT:
            raise RequestRejected(
                f"{self._in_flight + self._waiting} requests are in progress: try again later",
                status=429,
                retry_after_s=1,
            )
        try:
            await self._wait_until_ready()
        except ModelError as error:
            raise RequestRejected(str(error), status=503) from None
        if self._weights is not None and self._weights.broken:
            raise RequestRejected(f"{self._weights.broken}; send all of them again", status=503)
        self._in_flight += 1
        try:
            return await answer()
        except Refused as error:
            code = "context_length_exceeded" if error.too_long else None
            raise RequestRejected(str(error), code=code) from None
        except ModelError as error:
            raise RequestRejected(str(error), status=503) from None
        except RamifyError as error:
            raise RequestRejected(str(error)) from None
        finally:
            self._in_flight -= 1

    async def _wait_until_ready(self) -> None:
        """Wait until the engine is awake and its weights are complete.

        Raises ServerFailed if that takes too long.
        """
        if self._weights is None:
            return
        self._waiting += 1
        try:
            await self._weights.sleep.wait()
        finally:
            self._waiting -= 1

    async def _whole(self, api_request: CompletionRequest, request: Request) -> web.Response:
        reply = await self._client.complete(request)
        self._paths.remember(request, reply)
        body = completions.completion(reply, api_request, _new_id(), self.name, self._text)
        return web.Response(body=completions.encode(body), content_type="application/json")

    async def _streamed(
        self, http: web.Request, api_request: CompletionRequest, request: Request
    ) -> web.StreamResponse:
        """Stream a reply.

        An error before the first event is raised; a later error is written as the last event.
        """
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            await self._send_events(http, response, api_request, request)
        except RamifyError as error:
            if not response.prepared:
                raise
            await response.write(b"data: " + error_body(str(error), "server_error") + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _send_events(
        self,
        http: web.Request,
        response: web.StreamResponse,
        api_request: CompletionRequest,
        request: Request,
    ) -> None:
        id, before = _new_id(), Message("assistant")
        async with contextlib.aclosing(self._client.stream(request)) as parts:
            async for part in parts:
                if not response.prepared:  # the first part has arrived, so the request is valid
                    await response.prepare(http)
                    await _send(response, completions.opening(id, self.name))
                now = part.message if isinstance(part, Reply) else part
                if event := completions.growth(before, now, id, self.name):
                    await _send(response, event)
                    before = now
                if isinstance(part, Reply):
                    self._paths.remember(request, part)
                    for last in completions.ending(part, api_request, id, self.name, self._text):
                        await _send(response, last)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._client.policy.tokenizer.decode(list(ids), skip_special_tokens=False))


class _KnownPaths:
    """Token ids (prompt and sampled) of the last few thousand conversations, up to a reply."""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def continued(self, request: Request) -> Request:
        """Return ``request`` with the token ids of its longest known prefix."""
        for end in range(len(request.messages), 0, -1):
            if request.messages[end - 1].role != "assistant":
                continue
            ids = self._ids.get(_key(request, request.messages[:end]))
            if ids is not None:
                return msgspec.structs.replace(request, known=KnownPrefix(end, ids))
        return request

    def remember(self, request: Request, reply: Reply) -> None:
        if reply.prompt_ids is None or reply.token_ids is None:
            return
        key = _key(request, (*request.messages, reply.message))
        self._ids[key] = reply.prompt_ids + reply.token_ids
        self._ids.move_to_end(key)
        while len(self._ids) > _MAX_PATHS:
            self._ids.popitem(last=False)


def _key(request: Request, messages: Sequence[Message]) -> bytes:
    return hashlib.blake2b(msgspec.json.encode([request.tools, messages]), digest_size=16).digest()


async def _send(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + completions.encode(event) + b"\n\n")


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex[:24]}"
