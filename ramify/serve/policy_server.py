"""An OpenAI-compatible HTTP server for one local policy, started with ``ramify serve-policy
FOLDER``.

    GET  /health                 {"status": "ok", "version": 0, …}, also while it sleeps
    GET  /metrics                cache usage, under vLLM's metric names
    GET  /v1/models              the only model, with its window
    POST /v1/chat/completions    } streaming, log-probabilities, token ids (return_token_ids), and
    POST /v1/responses           } tools if the chat template supports them
    POST /v1/messages            } (see ramify/http_server/model_api_routes.py)
    POST /v1/completions         token ids in, token ids out (see token_completions.py)
    POST /generate               the same in SGLang's format
    POST /v1/feedback            a score of a recorded reply (see feedback.py)
    GET  /version, /server_info  facts that a trainer compares with its policy

The server remembers the token ids of its last replies. If a conversation comes back with one more
message, it continues from exactly those ids. A client that disconnects frees its slot. Keys are
checked in ``ramify/http_server/``; replacing the weights and giving memory back is in
``weight_routes.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ramify.clients.base import KnownPrefix, Request, Tool
from ramify.engine.json_schema_checking import JsonSchema, SchemaCheckTooLong
from ramify.errors import ConfigError
from ramify.http_server.access import AcceptedApiKeys, ListenAddress, new_key
from ramify.http_server.base_server import AiohttpServer, receive_body
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.model_api import unmet_reply_requirement_error
from ramify.http_server.model_api_routes import (
    CallerModelAccess,
    ModelApiRoutes,
    errors_as_rejections,
    model_list_response,
)
from ramify.http_server.rejections import RequestRejected
from ramify.http_server.responses_api import RecentResponseStore
from ramify.inference.http.engine_client import format_kv_cache_prometheus
from ramify.inference.local.local_client import LocalClient
from ramify.serve import token_completions
from ramify.serve.feedback import add_feedback_route
from ramify.serve.server_metrics import METRICS_TYPE
from ramify.serve.traffic_recorder import ServedTrafficRecorder
from ramify.serve.weight_routes import WAIT_S, WeightUpdateRoutes, served_policy_info
from ramify.types.message import Message, Reply

_MAX_BODY_BYTES = 64 << 20
_MAX_REPLIES = 1024
"""Maximum number of replies that are generated at the same time, over all requests."""
_MAX_PATHS = 4096
"""Number of conversations whose token ids are remembered."""


class PolicyServer:
    """An HTTP server for one policy, a local model.

    ``async with`` starts and stops it.
    """

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
        recorder: ServedTrafficRecorder | None = None,
        max_replies: int = _MAX_REPLIES,
    ) -> None:
        """Create a server for one policy.

        ``async with`` starts it. Raises ConfigError if clients could replace the weights without a
        key.

        ``name``: the model's name. ``key``: the bearer key that clients must send; by default the
        server generates one for this start, if its ``address`` needs one. ``recorder``: stores
        replies and feedback about them, but no requests with ``store: false``; its owner closes it.
        ``max_replies``: the maximum number of replies in progress; further requests are rejected
        with status 429.

        ``weight_transfer``: clients may also replace the weights. ``weight_syncs``: the names of
        your own weight sync classes that a trainer may use. ``weights_root``: the only folder from
        which weight files are read. ``wait_s``: how long a request waits for a sleeping engine, in
        seconds.
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
        self._progress = _RepliesInProgress(max_replies)
        self._policy = PolicyRequestHandler(client, name, self._progress)
        self._recorder = recorder
        self._caller = CallerModelAccess(
            self._policy, RecentResponseStore(), None if recorder is None else self._record
        )
        self._weights: WeightUpdateRoutes | None = None
        if weight_transfer:
            self._weights = WeightUpdateRoutes(
                client,
                lambda: self._in_flight,
                weight_syncs=weight_syncs,
                root=weights_root,
                wait_s=wait_s,
            )
        self._http = AiohttpServer(
            address,
            AcceptedApiKeys.from_key(self.key) if self.key else None,
            public=("/health",),
            limits=HttpLimits(max_body_bytes=_MAX_BODY_BYTES),
        )

    @property
    def url(self) -> str:
        """The base URL of the API, such as ``http://127.0.0.1:PORT/v1``."""
        return f"{self._http.url}/v1"

    async def __aenter__(self) -> PolicyServer:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        ModelApiRoutes(self._admit_request).add_to(app)
        app.router.add_post("/v1/completions", self._sample)
        app.router.add_post("/generate", self._sample)
        add_feedback_route(app, self._recorder)
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
        asleep = self._weights.sleep.sleeping_parts if self._weights is not None else []
        state = {"status": "ok", "version": self._client.version, "in_flight": self._in_flight}
        return web.json_response(
            {**state, "asleep": asleep, "held_bytes": self._client.device_memory_usage()}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        text = format_kv_cache_prometheus(await self._client.pressure())
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})

    async def _models(self, http: web.Request) -> web.Response:
        return model_list_response(
            http, self.name, self._client.window, is_recorded=self._recorder is not None
        )

    async def _facts(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                **served_policy_info(self._client, self.name),
                "weight_transfer": self._weights is not None,
            }
        )

    async def _sample(self, http: web.Request) -> web.StreamResponse:
        async with self._admit_request(http):
            with errors_as_rejections():
                async with receive_body(http) as body:
                    if http.path == "/generate":
                        reply = await token_completions.answer_sglang_generate(self._client, body)
                    else:
                        reply = await token_completions.answer_vllm_completion(
                            self._client, body, self.name
                        )
            return web.json_response(reply, dumps=_dumps)

    @asynccontextmanager
    async def _admit_request(self, _: web.Request) -> AsyncIterator[CallerModelAccess]:
        """Admit one request, and count it as in progress until the ``with`` block ends.

        Raises RequestRejected if the server is overloaded, or if its engine is asleep or has no
        valid weights.
        """
        with self._progress.more(1):
            if self._weights is not None:
                with errors_as_rejections():  # the engine sleeps too long
                    await self._weights.sleep.wait()
                if self._weights.broken:
                    text = f"{self._weights.broken}; send all of them again"
                    raise RequestRejected(text, status=503)
            self._in_flight += 1
            try:
                yield self._caller
            finally:
                self._in_flight -= 1

    async def _record(self, id: str, index: int, request: Request, reply: Reply) -> None:
        assert self._recorder is not None
        await self._recorder.record(id, index, self._policy.with_known_prefix_ids(request), reply)


class _RepliesInProgress:
    """Counts the replies that a server is generating, and limits their number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0

    @contextmanager
    def more(self, num_replies: int) -> Iterator[None]:
        """Count ``num_replies`` more replies as in progress until the ``with`` block ends.

        Raises RequestRejected if the limit is exceeded.
        """
        if self._num + num_replies > self._most:
            raise RequestRejected(
                f"{self._num} replies are in progress, and at most {self._most} are allowed: try "
                "again later",
                status=429,
                retry_after_s=1,
            )
        self._num += num_replies
        try:
            yield
        finally:
            self._num -= num_replies


class PolicyRequestHandler:
    """Answers API requests with replies sampled from a policy, the served local model.

    It remembers the exact token ids of its earlier replies, so that later turns of a conversation
    continue from them.
    """

    def __init__(self, client: LocalClient, name: str, progress: _RepliesInProgress) -> None:
        """Create a handler that samples its replies through ``client``.

        The client gives access to the policy. ``progress`` counts the replies in progress. The
        caller has already counted one reply for each request, so only further ones are counted
        here.
        """
        self.name = name
        self._progress = progress
        self.window = client.window
        self._client = client
        self._paths = _KnownPaths()

    def with_known_prefix_ids(self, request: Request) -> Request:
        """Add to a request the token ids of its longest conversation prefix that the server
        remembers."""
        return self._paths.with_known_prefix_ids(request)

    async def generate_replies(self, request: Request, num_replies: int) -> Sequence[Reply]:
        """Return ``num_replies`` independently sampled replies to a request.

        If it has a seed, reply number i is sampled with ``seed + i``.
        """
        request, schema = self.with_known_prefix_ids(request), await _schema_of(request)
        if num_replies == 1:
            return (await self._sample_reply(request, schema),)
        with self._progress.more(num_replies - 1):
            asking = [
                asyncio.create_task(self._sample_reply(each, schema))
                for each in _one_request_per_reply(request, num_replies)
            ]
            try:
                return await asyncio.gather(*asking)
            finally:
                for task in asking:
                    task.cancel()

    async def stream(
        self, request: Request, num_replies: int
    ) -> AsyncGenerator[tuple[int, Message | Reply], None]:
        request, schema = self.with_known_prefix_ids(request), await _schema_of(request)
        with self._progress.more(num_replies - 1):
            streams = [
                self._client.stream(each) for each in _one_request_per_reply(request, num_replies)
            ]
            async with contextlib.aclosing(_merge_streams(streams)) as parts:
                async for index, part in parts:
                    if isinstance(part, Reply):
                        await self._accept_reply(request, part, schema)
                    yield index, part

    def num_tokens(self, request: Request) -> int:
        return len(self._client.rendering.ids(self.with_known_prefix_ids(request)))

    def token_text(self, id: int) -> str:
        return self._client.rendering.text_of(id)

    async def _sample_reply(self, request: Request, schema: JsonSchema | None) -> Reply:
        reply = await self._client.complete(request)
        await self._accept_reply(request, reply, schema)
        return reply

    async def _accept_reply(
        self, request: Request, reply: Reply, schema: JsonSchema | None
    ) -> None:
        """Remember the token ids of a reply, and check that the reply matches the request's schema.

        Raises RequestRejected if the reply does not match the request's schema, since the engine
        does not enforce it.
        """
        self._paths.remember(request, reply)
        if schema is None or reply.finish != "stop":
            return
        try:
            value = msgspec.json.decode(reply.message.content)
        except msgspec.DecodeError as error:
            problem: str | None = f"not JSON: {error}"
        else:
            problem = await asyncio.to_thread(_failure, schema, value)
        if problem is not None:
            text = f"the reply does not match the schema ({problem}): ask again"
            raise unmet_reply_requirement_error(text, "json_validate_failed", reply)


def _failure(schema: JsonSchema, value: Any) -> str | None:
    try:
        return schema.find_mismatch(value)
    except SchemaCheckTooLong:
        return "the check takes too long"


async def _schema_of(request: Request) -> JsonSchema | None:
    """Compile the JSON schema of a request, or return None if the request has no schema.

    Raises ConfigError if the schema is invalid or too large.
    """
    if request.schema is None:
        return None
    return await asyncio.to_thread(partial(JsonSchema, request.schema, trusted=False))


def _one_request_per_reply(request: Request, num_replies: int) -> list[Request]:
    """Return one copy of the request for each reply to generate.

    The requests differ only in their seeds.
    """
    sampling = request.sampling
    if sampling.seed is None:
        return [request] * num_replies
    seeds = range(sampling.seed, sampling.seed + num_replies)
    samplings = (msgspec.structs.replace(sampling, seed=seed) for seed in seeds)
    return [msgspec.structs.replace(request, sampling=each) for each in samplings]


async def _merge_streams(
    streams: Sequence[AsyncGenerator[Message | Reply, None]],
) -> AsyncGenerator[tuple[int, Message | Reply], None]:
    """Yield the parts of several streamed replies in the order in which they arrive.

    Each part has the index of its stream.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as parts:
            async for part in parts:
                yield 0, part
        return
    arrived: asyncio.Queue[tuple[int, Message | Reply | Exception]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            async with contextlib.aclosing(streams[index]) as parts:
                async for part in parts:
                    arrived.put_nowait((index, part))
        except Exception as error:  # noqa: BLE001 (raised by the reader of the queue)
            arrived.put_nowait((index, error))

    reading = [asyncio.create_task(read(index)) for index in range(len(streams))]
    num_left = len(streams)
    try:
        while num_left:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_left -= isinstance(item, Reply)
            yield index, item
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


class _KnownPaths:
    """A cache of the token ids of recent conversations, which keeps up to a few thousand entries.

    Each entry holds the prompt and sampled tokens of a conversation up to one reply.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def with_known_prefix_ids(self, request: Request) -> Request:
        """Add to a request the token ids of its longest conversation prefix that is in this cache.

        The request is returned unchanged if no prefix is known.
        """
        known: KnownPrefix | None = None
        for end, key in _prefix_digests(request.tools, request.messages):
            if (ids := self._ids.get(key)) is not None:
                known = KnownPrefix(end, ids)
        return request if known is None else msgspec.structs.replace(request, known=known)

    def remember(self, request: Request, reply: Reply) -> None:
        if reply.prompt_ids is None or reply.token_ids is None:
            return
        *_, (_, key) = _prefix_digests(request.tools, (*request.messages, reply.message))
        self._ids[key] = reply.prompt_ids + reply.token_ids
        self._ids.move_to_end(key)
        while len(self._ids) > _MAX_PATHS:
            self._ids.popitem(last=False)


def _prefix_digests(
    tools: Sequence[Tool], messages: Sequence[Message]
) -> Iterator[tuple[int, bytes]]:
    """Yield the length and the digest of each prefix of the messages that ends with a model reply.

    The length is a number of messages.
    """
    digest = hashlib.blake2b(_encode(tools), digest_size=16)
    for index, message in enumerate(messages):
        digest.update(_encode(message))
        if message.role == "assistant":
            yield index + 1, digest.digest()


_encode = msgspec.json.Encoder().encode


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()
