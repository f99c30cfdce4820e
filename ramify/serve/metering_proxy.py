"""The metering proxy, an OpenAI-compatible HTTP server in front of one model.

It counts what each caller spends, and refuses requests that exceed the caller's budget.

    system ── POST /v1/chat/completions, its key ──> seat ── reserve ──> pool ──> model
                 <── reply, with the usage that was charged   │ 402 with a sentence: nothing is left
                                                              └─ lower max_tokens to the rest

Each item of an evaluation has a seat, which is an account with a key and a budget
(``metered_request.py``). The meter's own key opens and ends seats, and is the key of the seat
``default``:

    POST   /seats          {"name": "item-1", "max_calls": 20, "max_tokens": 200000}; then its key
    GET    /seats          what each seat has spent
    DELETE /seats/NAME     ends one, with the requests that are still unanswered

The systems that use seats are in ``evaluate/systems/``, and the formats of the APIs in
``http_server/``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ramify.clients.base import Client, OnPiece, PromptRenderer, ReplyPiece, Request
from ramify.clients.model_config import Model, bare_name
from ramify.clients.providers import import_client_modules
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError, RequestRefusedError
from ramify.evaluate.systems.base import NO_LIMIT, MeteredModelAccess, TaskItemBudget
from ramify.http_server.access import AcceptedApiKeys, ListenAddress, digest_of, new_key
from ramify.http_server.base_server import CALLER, GONE, AiohttpServer, receive_body
from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.model_api_routes import (
    CallerModelAccess,
    ModelApiRoutes,
    model_list_response,
)
from ramify.http_server.rejections import RequestRejected
from ramify.http_server.responses_api import RecentResponseStore
from ramify.secret_redaction import register_secret
from ramify.serve.metered_request import REPLY_TOKENS, MeteredRequest
from ramify.serve.metered_request_log import MeterLogWriter
from ramify.types.message import Message, Reply

DEFAULT_SEAT = "default"
_MAX_BODY_BYTES = 256 << 20


class OpenMeterAccountRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to open an account with a budget for one caller.

    Limits that are not set default to those of the proxy.
    """

    name: str
    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None


class MeteringProxy:
    """An HTTP server that forwards requests to one model and limits what each caller spends.

    ``async with`` starts and stops it.

    Example:
        async with MeteringProxy("openai:gpt-5-mini") as meter:
            async with meter.seat("item-1", TaskItemBudget(max_tokens=200_000)) as seat:
                …    a system asks seat.base_url with seat.key
            print(seat.usage, seat.cost)
    """

    def __init__(
        self,
        model: str | Model | Client,
        *,
        budget: TaskItemBudget = NO_LIMIT,
        name: str = "",
        address: ListenAddress | None = None,
        key: str | None = None,
        record: Path | None = None,
        reply_tokens: int = REPLY_TOKENS,
        max_in_flight: int = 64,
    ) -> None:
        """Create a metering proxy for one model.

        ``async with`` starts it.

        ``budget``: the budget of each seat (a caller's account) that is opened without one.
        ``name``: the model's name in requests and replies; the default is the provider's name for
        it. ``key``: the meter's own API key; by default, a new one is generated. ``record``: a file
        in which each request is recorded. ``reply_tokens``: the limit of a reply if the caller
        gives none.
        """
        self._model = Model(model) if isinstance(model, str) else model
        self._budget = budget
        self.address = address or ListenAddress()
        self.key = key or new_key()
        """The proxy's own key. A client can open accounts ("seats") with it. Other requests with
        this key are charged to the seat ``default``."""
        self.name = name or bare_name(self._model.name)
        self.seats: dict[str, MeteredModelAccess] = {}
        """Open seats by name. A seat is the account of one caller."""
        self._reply_tokens = reply_tokens
        self._pool = RateLimitedClientPool(max_in_flight=max_in_flight)
        self._client: Client | None = None
        self._stored: dict[str, RecentResponseStore] = {}
        self.record_path = record
        """File in which each request is recorded; None for no recording."""
        self._record: MeterLogWriter | None = None
        self._keys = _SeatKeys()
        register_secret("key of the meter", self.key)
        self._http = AiohttpServer(
            self.address,
            self._keys,
            limits=HttpLimits(max_body_bytes=_MAX_BODY_BYTES),
            statuses={ConfigError: 400},
            key_help="send the key of an open seat as Authorization: Bearer KEY",
        )

    @property
    def url(self) -> str:
        """The base URL for clients of OpenAI's API, such as ``http://127.0.0.1:PORT/v1``."""
        return f"{self._http.url}/v1"

    @property
    def upstream_client(self) -> Client:
        """The client through which the proxy calls the model that it meters.

        It exists once the proxy has started.
        """
        assert self._client is not None, "the meter has not started"
        return self._client

    async def __aenter__(self) -> MeteringProxy:
        if isinstance(self._model, Model):
            await import_client_modules([self._model.provider])
            self._client = self._pool.client_for_model(self._model)
        else:
            self._client = self._pool.register(self._model)
        self._check_price(self._budget)
        if self.record_path is not None:
            self._record = MeterLogWriter(self.record_path)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        ModelApiRoutes(self._admit_request).add_to(app)
        app.router.add_post("/seats", self._open_seat)
        app.router.add_get("/seats", self._list_seats)
        app.router.add_delete("/seats/{name:.+}", self._end_seat)
        await self._http.start(app)
        self._open(DEFAULT_SEAT, self._budget, self.key)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._http.close()
            for seat in self.seats.values():
                await seat.cancel_requests()
        finally:
            await self._pool.close()
            if self._record is not None:
                self._record.close()

    @asynccontextmanager
    async def open_account(
        self, name: str, budget: TaskItemBudget | None = None
    ) -> AsyncIterator[MeteredModelAccess]:
        """Open an account with a budget for one caller, and close it when the block ends.

        An account is also called a "seat". If the name is in use, a number is appended to it.
        Raises ConfigError for a limit in dollars if the model has no price.
        """
        names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        free = next(each for each in names if each not in self.seats)
        seat = self._open(free, budget or self._budget)
        try:
            yield seat
        finally:
            await self._close(seat)

    def _open(self, name: str, budget: TaskItemBudget, key: str = "") -> MeteredModelAccess:
        if name in self.seats:
            raise ConfigError(f"the meter has a seat {name!r:.80} already: give another name")
        self._check_price(budget)
        seat = MeteredModelAccess(
            name,
            base_url=self.url,
            key=key or new_key(),
            model=self.name,
            window=self.upstream_client.window,
            budget=budget,
            price=self.upstream_client.price,
        )
        self.seats[name] = seat
        self._stored[name] = RecentResponseStore()
        self._keys.add(seat.key, name)
        return seat

    async def _close(self, seat: MeteredModelAccess) -> None:
        self._keys.remove(seat.key)
        await seat.cancel_requests()
        self.seats.pop(seat.name, None)
        self._stored.pop(seat.name, None)

    def _check_price(self, budget: TaskItemBudget) -> None:
        if budget.max_cost is not None and self.upstream_client.price is None:
            raise ConfigError(
                f"max_cost={budget.max_cost:g} cannot be enforced: {self.upstream_client.name} "
                "has no known price; limit calls or tokens, or give its price"
            )

    # --- requests

    @asynccontextmanager
    async def _admit_request(self, http: web.Request) -> AsyncIterator[CallerModelAccess]:
        seat = self.seats[http[CALLER]]
        with seat.cancellable_request():
            yield CallerModelAccess(MeteredModel(self, seat), self._stored[seat.name])

    async def ask(
        self, seat: MeteredModelAccess, asked: Request, on_piece: OnPiece | None = None
    ) -> Reply:
        """Forward one request to the model within the caller's budget.

        Raises RequestRejected with status 402 if the budget is used up.
        """
        seat.num_requests += 1
        number, began = seat.num_requests, time.perf_counter()
        metered = MeteredRequest(seat, asked, self.upstream_client, self._reply_tokens)
        status, error_text, reply = 200, "", None
        try:
            await metered.count_prompt()
            reply = await metered.send(self._pool, on_piece)
            return reply
        except RequestRejected as error:
            status, error_text = error.status, str(error)
            raise
        except asyncio.CancelledError:
            status, error_text = GONE, "the caller did not wait for the reply"
            raise
        finally:
            if self._record is not None:
                self._record.add(
                    seat.name,
                    number,
                    asked,
                    metered.sent,
                    status=status,
                    reply=reply,
                    usage=metered.usage,
                    cost=metered.cost,
                    seconds=time.perf_counter() - began,
                    error=error_text,
                )

    async def _models(self, http: web.Request) -> web.Response:
        return model_list_response(http, self.name, self.upstream_client.window)

    # --- seats over HTTP

    async def _open_seat(self, http: web.Request) -> web.Response:
        self._check_owner(http)
        async with receive_body(http) as body:
            try:
                wanted = msgspec.json.decode(body, type=OpenMeterAccountRequest)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RequestRejected(f"not a request for a seat: {error}") from None
        limits = {
            name: value
            for name in TaskItemBudget.__struct_fields__
            if (value := getattr(wanted, name)) is not None
        }
        seat = self._open(wanted.name, msgspec.structs.replace(self._budget, **limits))
        return web.json_response({"key": seat.key, "base_url": seat.base_url, **_seat_report(seat)})

    async def _list_seats(self, http: web.Request) -> web.Response:
        self._check_owner(http)
        return web.json_response({"seats": [_seat_report(seat) for seat in self.seats.values()]})

    async def _end_seat(self, http: web.Request) -> web.Response:
        self._check_owner(http)
        name = http.match_info["name"]
        seat = self.seats.get(name)
        if seat is None or name == DEFAULT_SEAT:
            raise RequestRejected(f"no seat {name!r:.80} is open", status=404)
        await self._close(seat)
        return web.json_response(_seat_report(seat))

    def _check_owner(self, http: web.Request) -> None:
        if http[CALLER] != DEFAULT_SEAT:
            raise RequestRejected(
                "a seat's key cannot open or end seats: send the meter's own key", status=403
            )


class _SeatKeys(AcceptedApiKeys):
    """The API keys of all callers that currently have an account at the proxy.

    An account is also called a "seat". The HTTP server identifies callers by them.
    """

    def __init__(self) -> None:
        super().__init__({})
        self._names: dict[str, str] = {}
        """Digest of a key -> name of the account that it belongs to."""

    def add(self, key: str, name: str) -> None:
        self._names[digest_of(key)] = name

    def remove(self, key: str) -> None:
        self._names.pop(digest_of(key), None)

    def caller_of_key(self, presented: str) -> str | None:
        # What is looked up is a digest: its duration says nothing about a key.
        return self._names.get(digest_of(presented))


class MeteredModel:
    """The proxy's model as seen by one caller, to whose account each request is charged.

    Each object acts for one caller's account ("seat").
    """

    def __init__(self, meter: MeteringProxy, seat: MeteredModelAccess) -> None:
        self.name = meter.name
        self.window = seat.window
        self._meter = meter
        self._seat = seat
        self._rendering: PromptRenderer | None = getattr(meter.upstream_client, "rendering", None)

    async def generate_replies(self, request: Request, num_replies: int) -> Sequence[Reply]:
        """Return several replies to a request, each from a separate call of the model.

        Each request is charged for the whole prompt, but an API response reports a single usage.
        The first reply's usage therefore has the prompt tokens of all requests.
        """
        if num_replies == 1:
            return (await self._meter.ask(self._seat, request),)
        asking = [
            asyncio.ensure_future(self._meter.ask(self._seat, each))
            for each in _with_seeds(request, num_replies)
        ]
        try:
            await asyncio.wait(asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return _prompts_in_first([task.result() for task in asking])

    async def stream(
        self, request: Request, num_replies: int
    ) -> AsyncGenerator[tuple[int, Message | Reply], None]:
        if num_replies > 1:
            for index, reply in enumerate(await self.generate_replies(request, num_replies)):
                yield index, reply
            return
        arrived: asyncio.Queue[ReplyPiece | None] = asyncio.Queue()
        asking = asyncio.ensure_future(self._meter.ask(self._seat, request, arrived.put_nowait))
        asking.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            text, reasoning = "", ""
            while (piece := await arrived.get()) is not None:
                text, reasoning = text + piece.text, reasoning + piece.reasoning
                if piece.text or piece.reasoning:
                    yield 0, Message("assistant", text, reasoning or None)
            yield 0, await asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    def num_tokens(self, request: Request) -> int:
        if self._rendering is None:
            raise RequestRefusedError("the tokens of this model's prompts cannot be counted here")
        return len(self._rendering.ids(request))

    def token_text(self, id: int) -> str:
        return "" if self._rendering is None else self._rendering.text_of(id)


def _with_seeds(request: Request, num_replies: int) -> list[Request]:
    """Return ``num_replies`` copies of the request, each of which asks for one reply.

    If the request has a seed, the request for reply number i has ``seed + i``.
    """
    seed = request.sampling.seed
    if seed is None:
        return [request] * num_replies
    samplings = [
        msgspec.structs.replace(request.sampling, seed=seed + index) for index in range(num_replies)
    ]
    return [msgspec.structs.replace(request, sampling=each) for each in samplings]


def _prompts_in_first(replies: Sequence[Reply]) -> list[Reply]:
    """Return the replies after moving the prompt tokens of all of them to the first one's usage."""
    usages = [reply.usage for reply in replies]
    first = msgspec.structs.replace(
        usages[0],
        input_tokens=sum(usage.input_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
    return [msgspec.structs.replace(replies[0], usage=first), *replies[1:]]


def _seat_report(seat: MeteredModelAccess) -> dict[str, Any]:
    """Return a report on one caller's account: its usage so far and its budget.

    An account is also called a "seat".
    """
    return {
        "name": seat.name,
        "requests": seat.usage.calls,
        "input_tokens": seat.usage.input_tokens,
        "output_tokens": seat.usage.output_tokens,
        "dollars": seat.cost,
        "refused": seat.num_refused,
        "budget": msgspec.to_builtins(seat.budget),
    }
