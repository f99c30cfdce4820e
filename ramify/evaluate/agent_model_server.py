"""Serve models to external agents and environments through a local OpenAI and Anthropic API.

    program ── POST /v1/chat/completions, X-Session-ID ──> seat ──> ``RunModelClient``
            ── POST /seats/NAME/v1/chat/completions     ──> seat ──┤
    agent   ── POST /v1/messages, its key               ──> seat ──┘

One endpoint serves many runs. Each conversation partner has a *seat*: its run, its thread, the
depth of its model, and whether training learns from its replies. A request names its seat in the
path or in a header, and proves with the endpoint's key that it comes from a program that was given
the address. An agent that knows only a base URL and an API key gets a key that identifies its seat,
and sends it as ``Authorization: Bearer`` or as ``x-api-key``. Replies are served whole or as a
stream that contains each reply in one piece.

Which call a request continues is decided in engine/external_conversations.py. The routes and
formats of the APIs are in http_server/model_api_routes.py.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from ramify.clients.base import PromptRenderer, Request
from ramify.engine.external_conversations import RunModelClient
from ramify.errors import RamifyError, RequestRefusedError
from ramify.http_server.access import ListenAddress, digest_of, new_key, presented_key
from ramify.http_server.base_server import AiohttpServer
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.model_api_routes import (
    CallerModelAccess,
    ModelApiRoutes,
    model_list_response,
)
from ramify.http_server.rejections import RequestRejected
from ramify.http_server.responses_api import RecentResponseStore
from ramify.types.message import Message, Reply

SEAT_HEADER = "X-Session-ID"
KEY_HEADER = "x-ramify-key"
MODEL = "policy"
"""Name of the model in the requests and replies of agents."""
_MAX_BODY_BYTES = 64 << 20
_WRONG_KEY = (
    "no running rollout has this key: send the rollout's own key as Authorization: Bearer KEY or "
    "as x-api-key; it ends with its rollout"
)


class AgentModelAccess(msgspec.Struct):
    """An agent's access to one of the models of a run.

    It names the run that records the agent's requests, and says how they are answered.
    """

    conversations: RunModelClient
    thread: str
    """Name under which the run records the agent's conversations."""
    depth: int = 0
    """Depth in the call tree of the model that replies; 0 is the root's model."""
    learns: bool = True
    """True if training learns from the replies."""
    num_requests: int = 0
    """Number of requests that have arrived, including refused ones."""
    last_refusal: str = ""
    """Error message of the last refused request; empty if none was refused."""
    stored: RecentResponseStore = msgspec.field(default_factory=RecentResponseStore)
    """Responses that later requests may continue (``previous_response_id``)."""


class AgentFacingModel:
    """The model that an agent reaches through an ``AgentModelServer``.

    The agent's requests are recorded as turns in its run.
    """

    name = MODEL

    def __init__(self, seat: AgentModelAccess) -> None:
        self._seat = seat
        self.window = seat.conversations.context_window(seat.depth)
        client = seat.conversations.client_at(seat.depth)
        self._rendering: PromptRenderer | None = getattr(client, "rendering", None)

    async def generate_replies(self, request: Request, num_replies: int) -> Sequence[Reply]:
        """Send a request to the agent's model, and return the replies.

        The replies are sampled with the settings of the run. Of the request's own settings, only
        ``max_tokens``, ``stop`` and ``top_logprobs`` are used.
        """
        seat = self._seat
        return await seat.conversations.request_replies(
            request.messages,
            thread=seat.thread,
            tools=request.tools,
            schema=request.schema,
            depth=seat.depth,
            learns=seat.learns,
            num_replies=num_replies,
            sampling=request.sampling,
        )

    async def stream(
        self, request: Request, num_replies: int
    ) -> AsyncGenerator[tuple[int, Message | Reply], None]:
        """Yield the replies to a request, each in one piece, after all of them have arrived."""
        for index, reply in enumerate(await self.generate_replies(request, num_replies)):
            yield index, reply

    def num_tokens(self, request: Request) -> int:
        if self._rendering is None:
            raise RequestRefusedError("the tokens of this model's prompts cannot be counted here")
        return len(self._rendering.ids(request))

    def token_text(self, id: int) -> str:
        return "" if self._rendering is None else self._rendering.text_of(id)


class AgentModelServer:
    """An HTTP server through which the agents of many runs call models.

    Each agent has a *seat*, which determines its run and its model. ``async with`` starts and stops
    the server.
    """

    def __init__(self) -> None:
        self._seats: dict[str, AgentModelAccess] = {}
        self._keyed: dict[str, AgentModelAccess] = {}
        self._waiting: dict[str, set[asyncio.Task[Any]]] = {}
        """API key of an agent -> the tasks of its unanswered requests."""
        self._key = secrets.token_urlsafe(24)
        self._own_digest = digest_of(self._key)
        # The key is checked here instead of in the shell: programs send another one, which
        # they read from a variable, as Authorization.
        self._http = AiohttpServer(
            ListenAddress(is_open=True), limits=HttpLimits(max_body_bytes=_MAX_BODY_BYTES)
        )

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that every request to the server must contain."""
        return {KEY_HEADER: self._key}

    def url(self, seat: str = "") -> str:
        """Return the base URL of the API through which agents call models.

        With ``seat``, the URL identifies one agent's access to a model. Without it, each request
        must name its seat in a header.
        """
        return f"{self._http.url}/seats/{seat}/v1" if seat else f"{self._http.url}/v1"

    @contextmanager
    def access_registry(self) -> Iterator[dict[str, AgentModelAccess]]:
        """Yield a dict in which a run registers the access (seat) of each of its agents to a model.

        Each seat gives one agent access to a model. When the ``with`` block ends, the endpoint no
        longer accepts them.
        """
        mine = _Seats(self._seats)
        try:
            yield mine
        finally:
            for name in mine:
                self._seats.pop(name, None)

    @contextmanager
    def temporary_seat_key(self, seat: AgentModelAccess) -> Iterator[str]:
        """Yield a temporary API key for ``seat``, an agent's access to a model.

        When the ``with`` block ends, the key becomes invalid and its unanswered requests are
        cancelled.
        """
        key = new_key()
        self._keyed[key], self._waiting[key] = seat, set()
        try:
            yield key
        finally:
            del self._keyed[key]
            for task in self._waiting.pop(key):
                task.cancel()

    @contextmanager
    def _track_request(self, key: str, seat: AgentModelAccess) -> Iterator[None]:
        """Keep track of one request of an agent while it is answered.

        It counts the request, cancels it if the agent's key is revoked, and stores the error
        message if the request is refused.
        """
        task = asyncio.current_task()
        tasks = self._waiting.get(key)
        if task is not None and tasks is not None:
            tasks.add(task)
        seat.num_requests += 1
        try:
            yield
        except (RamifyError, RequestRejected) as error:
            seat.last_refusal = str(error)
            raise
        finally:
            if task is not None and tasks is not None:
                tasks.discard(task)

    async def __aenter__(self) -> AgentModelServer:
        app = web.Application()
        routes = ModelApiRoutes(self._admit_request)
        for prefix in ("", "/seats/{seat}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            routes.add_to(app, prefix)
        await self._http.start(app)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @asynccontextmanager
    async def _admit_request(self, http: web.Request) -> AsyncIterator[CallerModelAccess]:
        seat = self._seat(http)
        with self._track_request(presented_key(http), seat):
            yield CallerModelAccess(AgentFacingModel(seat), seat.stored)

    def _seat(self, http: web.Request) -> AgentModelAccess:
        if (key := presented_key(http)) in self._keyed:
            return self._keyed[key]
        if KEY_HEADER not in http.headers:
            raise RequestRejected(_WRONG_KEY, status=401, code="invalid_api_key")
        if not self._has_own_key(http):
            raise RequestRejected(f"send the endpoint's key as {KEY_HEADER}", status=401)
        name = http.match_info.get("seat") or http.headers.get(SEAT_HEADER, "")
        seat = self._seats.get(name or "")
        if seat is None:
            raise RequestRejected(
                f"no run has the seat {name:.80!r}: its run may have ended, or the name in "
                f"{SEAT_HEADER} is wrong",
                status=404,
            )
        return seat

    def _has_own_key(self, http: web.Request) -> bool:
        # A header may hold surrogate escapes, which cannot be compared as text.
        return hmac.compare_digest(digest_of(http.headers.get(KEY_HEADER, "")), self._own_digest)

    async def _models(self, http: web.Request) -> web.Response:
        if (key := presented_key(http)) in self._keyed:
            seats = [self._keyed[key]]
        elif self._has_own_key(http):
            seats = list(self._seats.values())
        else:
            raise RequestRejected(_WRONG_KEY, status=401, code="invalid_api_key")
        windows = [seat.conversations.context_window(seat.depth) for seat in seats]
        return model_list_response(http, MODEL, min(windows, default=None))


class _Seats(dict[str, AgentModelAccess]):
    """A dict that maps names to the seats of one run's agents.

    A seat gives one agent access to a model. Adding a seat also registers it at the endpoint.
    """

    def __init__(self, table: dict[str, AgentModelAccess]) -> None:
        super().__init__()
        self._table = table

    def __setitem__(self, name: str, seat: AgentModelAccess) -> None:
        super().__setitem__(name, seat)
        self._table[name] = seat
