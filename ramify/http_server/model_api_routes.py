"""HTTP routes of three APIs for one model: chat completions, responses, and Anthropic's messages.

    POST {prefix}/v1/chat/completions          chat_completions_api.py
    POST {prefix}/v1/responses                 responses_api.py
    GET, DELETE {prefix}/v1/responses/ID       a response that is remembered
    POST {prefix}/v1/messages                  anthropic_messages_api.py
    POST {prefix}/v1/messages/count_tokens     number of tokens of a prompt

    request ──> admit ──> ServedModel ── replies or a stream ──> body or events

A server decides which requests it accepts and which model answers them (``Admission``). Sampling is
not constrained, so a reply that does not obey ``tool_choice`` is an error. An error before the
first part of a stream becomes an error response; a later one is the stream's last event. Each
server has its own route for the list of models, whose response ``model_list_response`` writes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ramify.clients.base import Request
from ramify.errors import ModelError, RamifyError, RateLimited, RequestRefusedError
from ramify.http_server import anthropic_messages_api, chat_completions_api, responses_api
from ramify.http_server.base_server import receive_body
from ramify.http_server.model_api import ModelApiReplyWriter, ServedModel, encode
from ramify.http_server.rejections import TOO_LONG, RequestRejected, is_anthropic_request
from ramify.http_server.responses_api import RecentResponseStore
from ramify.types.message import Reply

T = TypeVar("T")
_LARGE_BYTES = 1 << 18
"""Body size in bytes above which parsing moves to a thread."""


Recorder = Callable[[str, int, Request, Reply], Awaitable[None]]
"""Function that records a reply: (response id, number of the reply in it, request, reply)."""


class CallerModelAccess(msgspec.Struct, frozen=True):
    """One caller's access to a served model, and the responses stored for that caller."""

    model: ServedModel
    stored: RecentResponseStore
    recorder: Recorder | None = None
    """Records each reply before its last part is sent. None if nothing is recorded."""

    async def record_exchange(
        self, exchange: ModelApiReplyWriter, index: int, reply: Reply
    ) -> None:
        if self.recorder is not None and not exchange.is_private:
            await self.recorder(exchange.id, index, exchange.request, reply)

    def recording_status_headers(self, exchange: ModelApiReplyWriter) -> dict[str, str]:
        """Return the HTTP headers that tell a client whether its conversation is recorded."""
        is_recorded = self.recorder is not None and not exchange.is_private
        return {"Ramify-Recorded": "true"} if is_recorded else {}


Admission = Callable[[web.Request], AbstractAsyncContextManager[CallerModelAccess]]
"""Context manager that admits a request until its block ends. Raises RequestRejected if the request
is not admitted."""


class ModelApiRoutes:
    """HTTP routes for using a model through three APIs: chat completions, responses, and
    Anthropic's messages.

    ``admit`` accepts each request and selects the model that answers.
    """

    def __init__(self, admit: Admission) -> None:
        self._admit = admit

    def add_to(self, app: web.Application, prefix: str = "") -> None:
        """Add the routes of the model APIs to an aiohttp application.

        Their paths start with ``prefix``.
        """
        base = f"{prefix}/v1"
        app.router.add_post(base + chat_completions_api.PATH, self._answer_chat)
        app.router.add_post(base + responses_api.PATH, self._answer_responses)
        app.router.add_get(f"{base}{responses_api.PATH}/{{id}}", self._get_stored_response)
        app.router.add_delete(f"{base}{responses_api.PATH}/{{id}}", self._forget)
        app.router.add_post(base + anthropic_messages_api.PATH, self._answer_messages)
        app.router.add_post(base + anthropic_messages_api.COUNT_PATH, self._count_tokens)

    async def _answer_chat(self, http: web.Request) -> web.StreamResponse:
        async with self._admit(http) as caller:
            return await self._answer_request(
                http, caller, lambda body: chat_completions_api.parse_request(body, caller.model)
            )

    async def _answer_responses(self, http: web.Request) -> web.StreamResponse:
        async with self._admit(http) as caller:
            return await self._answer_request(
                http,
                caller,
                lambda body: responses_api.parse_request(body, caller.model, caller.stored),
            )

    async def _answer_messages(self, http: web.Request) -> web.StreamResponse:
        async with self._admit(http) as caller:
            return await self._answer_request(
                http, caller, lambda body: anthropic_messages_api.parse_request(body, caller.model)
            )

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        async with self._admit(http) as caller:
            model = caller.model
            with errors_as_rejections():
                request = await _read(
                    http, lambda body: anthropic_messages_api.parse_token_count_request(body, model)
                )
                num_tokens = model.num_tokens(request)
            return _json(encode({"input_tokens": num_tokens}))

    async def _get_stored_response(self, http: web.Request) -> web.StreamResponse:
        async with self._admit(http) as caller:
            response = caller.stored.get(http.match_info["id"])
            if response is None:
                raise _no_response(http)
            return _json(response.body)

    async def _forget(self, http: web.Request) -> web.StreamResponse:
        async with self._admit(http) as caller:
            id = http.match_info["id"]
            if not caller.stored.forget(id):
                raise _no_response(http)
            return _json(encode({"id": id, "object": "response", "deleted": True}))

    async def _answer_request(
        self,
        http: web.Request,
        caller: CallerModelAccess,
        read: Callable[[bytes], ModelApiReplyWriter],
    ) -> web.StreamResponse:
        with errors_as_rejections():
            exchange = await _read(http, read)
            if exchange.is_streamed:
                return await _stream_reply(http, caller, exchange)
            replies = await caller.model.generate_replies(exchange.request, exchange.num_replies)
            for index, reply in enumerate(replies):
                _check(reply, exchange)
                await caller.record_exchange(exchange, index, reply)
            return _json(exchange.response_body(replies), caller.recording_status_headers(exchange))


@contextlib.contextmanager
def errors_as_rejections() -> Iterator[None]:
    """Turn errors in the handling of a request into error responses, within a ``with`` block."""
    try:
        yield
    except RamifyError as error:
        raise rejection_of(error) from None
    except RecursionError:
        raise RequestRejected("a value in the request is nested too deeply: flatten it") from None


def rejection_of(error: RamifyError) -> RequestRejected:
    """Return the error response that reports an error of a model or of a request."""
    match error:
        case RequestRefusedError():
            return RequestRejected(str(error), code=TOO_LONG if error.too_long else None)
        case RateLimited():
            wait_s = error.retry_after_s
            return RequestRejected(str(error), status=429, retry_after_s=wait_s)
        case ModelError():
            return RequestRejected(str(error), status=503)
        case _:
            return RequestRejected(str(error))


def model_list_response(
    http: web.Request, name: str, window: int | None, *, is_recorded: bool = False
) -> web.Response:
    """Return the response to a request for the list of models.

    It lists the one served model, in OpenAI's or Anthropic's format depending on the request.
    """
    about: dict[str, Any] = {} if window is None else {"max_model_len": window}
    if is_recorded:
        about["recorded"] = True
    if is_anthropic_request(http):
        model = {"type": "model", "id": name, "display_name": name}
        model["created_at"] = "1970-01-01T00:00:00Z"
        return web.json_response(
            {"data": [{**model, **about}], "has_more": False, "first_id": name, "last_id": name}
        )
    model = {"id": name, "object": "model", "owned_by": "ramify"}
    return web.json_response({"object": "list", "data": [{**model, **about}]})


async def _read(http: web.Request, read: Callable[[bytes], T]) -> T:
    async with receive_body(http) as body:
        is_large = len(body) > _LARGE_BYTES
        return await asyncio.to_thread(read, body) if is_large else read(body)


async def _stream_reply(
    http: web.Request, caller: CallerModelAccess, exchange: ModelApiReplyWriter
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            **caller.recording_status_headers(exchange),
        }
    )
    try:
        stream = caller.model.stream(exchange.request, exchange.num_replies)
        async with contextlib.aclosing(stream) as parts:
            async for index, part in parts:
                if isinstance(part, Reply):
                    _check(part, exchange)
                    await caller.record_exchange(exchange, index, part)
                events = b""
                if not response.prepared:  # the first part has arrived, so the request is valid
                    await response.prepare(http)
                    events = exchange.encode_stream_start()
                if isinstance(part, Reply):
                    events += exchange.encode_reply_end(index, part)
                else:
                    events += exchange.encode_message_delta(index, part)
                if events:
                    await response.write(events)
        last = exchange.encode_stream_end()
    except (RamifyError, RequestRejected) as error:
        if not response.prepared:
            raise
        failure = rejection_of(error) if isinstance(error, RamifyError) else error
        last = exchange.encode_stream_error(failure)
    await response.write(last)
    await response.write_eof()
    return response


def _check(reply: Reply, exchange: ModelApiReplyWriter) -> None:
    """Raise RequestRejected if a reply lacks tool calls or log-probabilities that its request
    demands."""
    exchange.tool_choice.check_reply(reply)
    top_logprobs = exchange.request.sampling.top_logprobs
    if top_logprobs and reply.token_ids and reply.top_logprobs is None:
        raise RequestRejected(
            f"top_logprobs={top_logprobs} is not supported: this model reports only the sampled "
            "tokens",
            param="top_logprobs",
        )


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)


def _no_response(http: web.Request) -> RequestRejected:
    return RequestRejected(
        f"no response has the id {http.match_info['id']!r:.80}: only the last ones with store=true "
        "are remembered",
        status=404,
    )
