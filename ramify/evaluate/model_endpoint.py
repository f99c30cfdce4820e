"""An OpenAI-compatible endpoint on loopback, through which programs that hold their own
conversations ask the models of runs.

    program ── POST /v1/chat/completions, X-Session-ID ──> seat ──> ``ModelConversations.ask``
            ── POST /seats/NAME/v1/chat/completions     ──> seat ──┘

One endpoint serves many runs. Each conversation partner has a *seat*: its run, its thread, the
depth of its model, and whether training learns from its replies. A request names its seat in the
path or in a header, and proves with the endpoint's key that it comes from a program that was given
the address. Both forms of a reply are served, whole and streamed in one piece.

Not here: which request continues which call (see engine/model_conversations.py), and the format of
requests and replies (see http_server/completions.py).
"""

from __future__ import annotations

import hmac
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from ramify.engine.model_conversations import ModelConversations
from ramify.errors import LimitReached, ModelError, Refused
from ramify.http_server import completions
from ramify.http_server.access import ListenAddress
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.rejections import RequestRejected
from ramify.http_server.shell import HttpServer, received
from ramify.types.message import Reply

SEAT_HEADER = "X-Session-ID"
KEY_HEADER = "x-ramify-key"
_MAX_BODY_BYTES = 64 << 20


class EndpointSeat(msgspec.Struct, frozen=True):
    """One agent of an episode that asks a model: its run, and how its requests are answered."""

    conversations: ModelConversations
    thread: str
    """Name of the agent's conversations in the run."""
    depth: int = 0
    """Depth of the model that replies. 0 is the root."""
    learns: bool = True
    """Whether training learns from the replies."""


class ModelEndpoint:
    """HTTP server through which the seats of many runs ask their models. ``async with`` starts and
    stops it."""

    def __init__(self) -> None:
        self._seats: dict[str, EndpointSeat] = {}
        self._key = secrets.token_urlsafe(24)
        # The key is checked here instead of in the shell: programs send another one, which
        # they read from a variable, as Authorization.
        self._http = HttpServer(
            ListenAddress(is_open=True), limits=HttpLimits(max_body_bytes=_MAX_BODY_BYTES)
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers that every request must have."""
        return {KEY_HEADER: self._key}

    def url(self, seat: str = "") -> str:
        """Base URL of the API. Without a ``seat``, requests name theirs in the header."""
        return f"{self._http.url}/seats/{seat}/v1" if seat else f"{self._http.url}/v1"

    @contextmanager
    def seats(self) -> Iterator[dict[str, EndpointSeat]]:
        """The seats of one run, by name, which the caller fills. They are removed at the end."""
        mine = _Seats(self._seats)
        try:
            yield mine
        finally:
            for name in mine:
                self._seats.pop(name, None)

    async def __aenter__(self) -> ModelEndpoint:
        app = web.Application()
        for prefix in ("", "/seats/{seat}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
        await self._http.start(app)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    def _seat(self, http: web.Request) -> EndpointSeat:
        if not hmac.compare_digest(http.headers.get(KEY_HEADER, ""), self._key):
            raise RequestRejected(f"send the endpoint's key as {KEY_HEADER}", status=401)
        name = http.match_info.get("seat") or http.headers.get(SEAT_HEADER, "")
        seat = self._seats.get(name or "")
        if seat is None:
            raise RequestRejected(
                f"no run has the seat {name:.80!r}: name one in {SEAT_HEADER}; it may have ended",
                status=404,
            )
        return seat

    async def _models(self, http: web.Request) -> web.Response:
        if not hmac.compare_digest(http.headers.get(KEY_HEADER, ""), self._key):
            raise RequestRejected(f"send the endpoint's key as {KEY_HEADER}", status=401)
        windows = [seat.conversations.window(seat.depth) for seat in self._seats.values()]
        model = {"id": MODEL, "object": "model", "owned_by": "ramify"}
        if windows:
            model["max_model_len"] = min(windows)  # type: ignore[assignment]
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        seat = self._seat(http)
        try:
            async with received(http) as body:
                api_request, schema = _read(body)
            window = seat.conversations.window(seat.depth)
            request = completions.request_of(api_request, window)
            reply = await seat.conversations.ask(
                request.messages,
                thread=seat.thread,
                tools=request.tools,
                schema=schema,
                depth=seat.depth,
                learns=seat.learns,
            )
        except (ModelError, LimitReached) as error:
            _reject(error)
        id = f"chatcmpl-{uuid.uuid4().hex[:24]}"
        if not api_request.stream:
            answer = completions.completion(reply, api_request, id, MODEL, _no_text)
            return web.Response(body=completions.encode(answer), content_type="application/json")
        events = b"".join(
            b"data: " + completions.encode(event) + b"\n\n"
            for event in _events(reply, api_request, id)
        )
        return web.Response(body=events + b"data: [DONE]\n\n", content_type="text/event-stream")


MODEL = "policy"
"""Name of the model in requests and replies."""


class _Seats(dict[str, EndpointSeat]):
    """The seats of one run. Adding one also registers it at the endpoint."""

    def __init__(self, table: dict[str, EndpointSeat]) -> None:
        super().__init__()
        self._table = table

    def __setitem__(self, name: str, seat: EndpointSeat) -> None:
        super().__setitem__(name, seat)
        self._table[name] = seat


def _read(body: bytes) -> tuple[completions.CompletionRequest, dict[str, Any] | None]:
    """Return the request and the JSON schema of its reply. Raises Refused if the request is
    invalid."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a request for a chat completion: {error}") from None
    wanted = fields.pop("response_format", None) or {}
    schema = (wanted.get("json_schema") or {}).get("schema") if isinstance(wanted, dict) else None
    return completions.read(msgspec.json.encode(fields)), schema


def _events(
    reply: Reply, api_request: completions.CompletionRequest, id: str
) -> Iterator[dict[str, Any]]:
    yield completions.opening(id, MODEL)
    delta = {"content": reply.message.content}
    if reply.message.reasoning is not None:
        delta["reasoning_content"] = reply.message.reasoning
    yield completions.event(id, MODEL, delta)
    yield from completions.ending(reply, api_request, id, MODEL, _no_text)


def _no_text(ids: Any) -> str:
    """Report that the texts of single tokens are unknown."""
    return ""


def _reject(error: ModelError | LimitReached) -> NoReturn:
    if isinstance(error, Refused):
        code = "context_length_exceeded" if error.too_long else None
        raise RequestRejected(str(error), code=code) from None
    status = 400 if isinstance(error, LimitReached) else 503
    raise RequestRejected(str(error), status=status) from None
