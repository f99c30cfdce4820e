"""A model for tests of the APIs: it says what a test gives it, one character per token, behind a
real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from ramify.clients.base import Request
from ramify.errors import RamifyError, RequestRefusedError
from ramify.http_server.access import AcceptedApiKeys, ListenAddress
from ramify.http_server.base_server import AiohttpServer
from ramify.http_server.model_api_routes import (
    CallerModelAccess,
    ModelApiRoutes,
    model_list_response,
)
from ramify.http_server.responses_api import RecentResponseStore
from ramify.models.chat_template import split_reply, streamable_reply
from ramify.types.message import Message, Reply, Usage

KEY = "rk-of-the-scripted-model"
CALL = '<tool_call>\n{"name": "look", "arguments": {"line": 1, "b": "\u00fc"}}\n</tool_call>'
"""A call of a tool, as a model writes it."""


class ScriptedModel:
    """Implements ``ServedModel``. Each text of ``says`` answers one request, in order; the last one
    answers all that follow. An error is raised instead."""

    name = "scripted"

    def __init__(
        self, *says: str | RamifyError, window: int = 1000, reports_top: bool = True
    ) -> None:
        self.window = window
        self.requests: list[Request] = []
        self.stored = RecentResponseStore()
        self._says = list(says)
        self._reports_top = reports_top

    async def generate_replies(self, request: Request, num_replies: int) -> Sequence[Reply]:
        self.requests.append(request)
        says = self._says[0] if len(self._says) == 1 else self._says.pop(0)
        if isinstance(says, RamifyError):
            raise says
        if self.num_tokens(request) >= self.window:
            error = RequestRefusedError(f"the prompt has {self.num_tokens(request)} tokens")
            error.too_long = True
            raise error
        return [self._reply(request, says, index) for index in range(num_replies)]

    async def stream(
        self, request: Request, num_replies: int
    ) -> AsyncGenerator[tuple[int, Message | Reply], None]:
        replies = await self.generate_replies(request, num_replies)
        for index, reply in enumerate(replies):
            text = "".join(map(chr, reply.token_ids or ()))
            for end in range(1, len(text)):
                message = split_reply(text[:end], thinks=True, tool_calls=True)
                yield index, streamable_reply(message, request.sampling.stop, tool_calls=True)
        for index, reply in enumerate(replies):
            yield index, reply

    def num_tokens(self, request: Request) -> int:
        return sum(len(message.content) for message in request.messages)

    def token_text(self, id: int) -> str:
        return chr(id)

    def _reply(self, request: Request, says: str, index: int) -> Reply:
        text = says.replace("{index}", str(index))
        ends = [at + len(stop) for stop in request.sampling.stop if (at := text.find(stop)) >= 0]
        text = text[: min([*ends, request.sampling.max_tokens])]
        message = split_reply(text, thinks=True, tool_calls=True)
        for stop in request.sampling.stop:
            content = message.content.partition(stop)[0]
            message = msgspec.structs.replace(message, content=content)
        finish = "length" if len(text) == request.sampling.max_tokens else "stop"
        ids = tuple(map(ord, text))
        top = request.sampling.top_logprobs if self._reports_top else 0
        tops = tuple(tuple((id + n, -0.5 - n) for n in range(top)) for id in ids)
        return Reply(
            message=message,
            usage=Usage(self.num_tokens(request), len(ids), cached_tokens=2, calls=1),
            finish="tool_calls" if message.tool_calls else finish,
            prompt_ids=(1, 2, 3),
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            top_logprobs=tops if top else None,
        )


@asynccontextmanager
async def serving(model: ScriptedModel) -> AsyncIterator[str]:
    """Serve ``model`` and yield the address without ``/v1``."""

    @asynccontextmanager
    async def admit(_: web.Request) -> AsyncIterator[CallerModelAccess]:
        yield CallerModelAccess(model, model.stored)

    async def models(http: web.Request) -> web.Response:
        return model_list_response(http, model.name, model.window)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    ModelApiRoutes(admit).add_to(app)
    server = AiohttpServer(ListenAddress(), AcceptedApiKeys.from_key(KEY))
    await server.start(app)
    try:
        yield server.url
    finally:
        await server.close()
