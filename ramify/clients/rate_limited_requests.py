"""Send all model requests of a run, with rate limiting and retries.

    ask ── account.reserve()        may wait; holds no slot meanwhile
         ─ acquire slots            first the model's limiter, then the run's
         ─ account.is_still_valid() or else again from the start
         ─ client.complete()        the slots are held only for this
         ─ settle / charge_full_reservation / release, exactly once, whatever happened
         ─ wait and retry, if the error is transient

If a client raises an error that is not one of this package's, it failed to read an untrusted reply.
The error becomes a MalformedResponse here, with its traceback in the log, so no reply can end a
tree of calls.

Every model has its own limiter, so a rate-limited model does not slow the others. ``max_in_flight``
applies to each model and to all models together. How long a failing request is retried is decided
by ``RequestRetryPolicy``, and how many are in flight by ``AdaptiveConcurrencyLimiter``. Nothing is
imported or opened before the first request, so naming a model costs nothing.
``http_client/http_transport.py`` opens the connections.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ramify.clients.base import (
    ASSUMED_WINDOW,
    Client,
    OnPiece,
    Price,
    ReplyPiece,
    Request,
    RequestBudgetReservation,
    plausible_usage,
    reported_cost,
)
from ramify.clients.chat_json import redact_secrets
from ramify.clients.deadlines import TimeoutScheduler, TimeoutScope
from ramify.clients.model_config import Model
from ramify.clients.providers import CLIENTS, ModelProviderSpec, PriceTable, resolve_endpoint
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    RamifyError,
    RateLimited,
    ReplyLostError,
    Unreachable,
)
from ramify.http_client.http_transport import HttpConnectionPool
from ramify.logging import ComponentLogger
from ramify.secret_redaction import redact_likely_secrets, register_secret
from ramify.types.message import Reply

if TYPE_CHECKING:
    import random


_log = ComponentLogger("clients")
AnyClient = TypeVar("AnyClient", bound=Client)
Sleep = Callable[[float], Awaitable[object]]

_FIRST_WAIT_S = 0.5
_LONGEST_BACKOFF_S = 30.0
RETRYING = "trying again in"
"""Words by which a log message about a retry is recognised."""
_LONG_WAIT_S = 1.0
"""Minimum wait of a request, in seconds, that is logged."""
_WAITED_FOR = {
    "budget": "the part of the budget that other requests held",
    "rate_limit": "a slot, because of a rate limit",
    "outage": "an answer, because its requests failed",
}
_MOST_TIMEOUTS = 6
"""Maximum time, as a multiple of the timeout, for which a reasoning model's stream may send
keep-alive signals but no text."""
_LOCAL_WINDOW = 32_768
"""Context window (tokens) that is assumed for a local model if its window is unknown."""


class RateLimitedClientPool:
    """Creates clients for models by name, and sends their requests with rate limiting and retries.

    A pool belongs to one event loop.
    """

    def __init__(
        self,
        max_in_flight: int = 64,
        max_attempts: int = 5,
        timeout_s: float = 600.0,
        prices: PriceTable | None = None,
        *,
        keys: Mapping[str, str] | None = None,
        base_urls: Mapping[str, str] | None = None,
        max_wait_s: float = 300.0,
        rng: random.Random | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Create a pool that sends at most ``max_in_flight`` requests at a time.

        ``timeout_s`` is the longest time without any data. For a reply that is not streamed, it is
        the time until the whole reply has arrived. If a server asks to wait longer than
        ``max_wait_s``, the request fails. ``keys`` and ``base_urls`` map a provider's name to a
        value that replaces its environment variables.
        """
        for name, value in (
            ("max_in_flight", max_in_flight),
            ("max_attempts", max_attempts),
            ("timeout_s", timeout_s),
        ):
            if value <= 0:
                raise ConfigError(f"{name} is {value}: give at least 1")
        self.max_in_flight = max_in_flight
        self.max_attempts = max_attempts
        self.timeout_s = timeout_s
        self.max_wait_s = max_wait_s
        self._prices = prices
        self._keys = dict(keys or {})
        for provider, key in self._keys.items():
            register_secret(f"{provider} key", key)
        self._base_urls = dict(base_urls or {})
        self._random = rng
        self._sleep = sleep
        self._wire = HttpConnectionPool()
        self.deadlines = TimeoutScheduler()
        """Schedules the timeouts of all requests that the pool sends."""
        self._clients: dict[str, Client] = {}
        self._bound: list[tuple[Model, Client]] = []
        self._own: list[Client] = []
        self._gate = AdaptiveConcurrencyLimiter(max_in_flight)
        self._gates: dict[str, AdaptiveConcurrencyLimiter] = {}
        self._take_pieces: dict[str, bool] = {}
        """Model -> whether its client receives replies piece by piece."""

    @property
    def pause_remaining_s(self) -> float:
        """The number of seconds until rate limits no longer pause any model; 0 if none is
        paused."""
        return max((gate.pause_remaining_s() for gate in self._gates.values()), default=0.0)

    def client(self, name: str) -> Client:
        """Return the client of the model with the given full name (``provider:model``).

        The client connects at its first request.
        """
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = self._connect(Model(name))
        return client

    def client_for_model(self, model: Model) -> Client:
        """Return the client for a ``Model`` object.

        The client uses the API key of that object.
        """
        for known, client in self._bound:
            if known == model:
                return client
        client = self._connect(model)
        self._bound.append((model, client))
        return client

    def register(self, client: AnyClient) -> AnyClient:
        """Register an existing client under its model's name, and return it.

        The caller remains responsible for closing the client.
        """
        self._clients[client.name] = client
        return client

    async def ask(
        self,
        client: Client,
        request: Request,
        account: RequestBudgetReservation,
        on_retry: Callable[[str], None] | None = None,
        patience_s: float = 0.0,
        *,
        on_send: Callable[[], None] | None = None,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Send a request, and retry it after transient failures.

        Returns the reply with its cost.

        Raises the last attempt's ModelError, or what ``account.reserve`` raises. ``on_send`` is
        called once, when the request is about to be sent for the first time. ``on_retry`` receives
        one readable line for each failure that is retried. ``on_piece`` receives the reply as it
        arrives, if the client supports that; after a failure it begins again. If ``patience_s`` is
        not 0, a transient failure is retried for that long, however many attempts that takes;
        otherwise there are at most ``max_attempts`` attempts.
        """
        gate = self._gates.get(client.name)
        if gate is None:
            gate = self._gates[client.name] = AdaptiveConcurrencyLimiter(self.max_in_flight)
        retries = RequestRetryPolicy(self, client, patience_s, on_retry)
        try:
            while True:
                passed = gate.passed
                try:
                    return await self._attempt(
                        client, request, account, gate, retries, on_send, on_piece
                    )
                except ModelError as error:
                    on_send = None
                    wait_s = retries.retry_delay_s(error, gate, gate.passed > passed)
                if wait_s is not None:
                    await self._sleep(wait_s)
        finally:
            retries.log_outage_duration()

    async def close(self) -> None:
        """Close the connections and every client that this pool created.

        Calling this again has no effect.
        """
        own, self._own = self._own, []
        self._clients.clear()
        self._bound.clear()
        try:
            for client in own:
                await client.close()
        finally:
            self.deadlines.close()
            await self._wire.close()

    async def _attempt(
        self,
        client: Client,
        request: Request,
        account: RequestBudgetReservation,
        gate: AdaptiveConcurrencyLimiter,
        retries: RequestRetryPolicy,
        on_send: Callable[[], None] | None,
        on_piece: OnPiece | None,
    ) -> Reply:
        entered = await self._reserve(client, account, gate)
        # While this request waited for a slot, another reply may have raised the amount to reserve.
        while not self._is_enough(account, gate):
            entered = await self._reserve(client, account, gate)
        arrival = _Arrival(self.deadlines, self.timeout_s, on_piece)
        try:
            if on_send is not None:
                on_send()
            retries.sent_s = _now_s()
            with arrival.timeout(retries.sent_s):
                if self._takes_pieces(client):
                    complete: Any = client.complete
                    reply = await complete(request, arrival.add)
                else:
                    reply = await client.complete(request)
                reply = reply_with_cost(reply, request, client.window, client.price)
        except TimeoutError:
            lost = arrival.lost(client)
            account.charge_full_reservation(str(lost))
            raise lost from None
        except ModelError as error:
            # A wait that is too long for this request must not pause all others to the model.
            if isinstance(error, RateLimited) and retries.is_wait_acceptable(error):
                gate.slow_down(entered, self.backoff_s(error, retries.failed + 1))
            (account.charge_full_reservation if error.may_be_paid else account.release)(str(error))
            raise
        except ConfigError as error:  # such as a missing certificate bundle: nothing was sent
            account.release(str(error))
            raise
        except Exception as error:
            if isinstance(error, RamifyError):
                account.charge_full_reservation(str(error))
                raise
            bad = _log_unexpected(client, error)
            account.charge_full_reservation(str(bad))
            raise bad from error
        except BaseException as error:
            what = "cancelled" if isinstance(error, asyncio.CancelledError) else repr(error)
            account.charge_full_reservation(
                f"{client.name}: no reply had arrived when the request ended ({what})"
            )
            raise
        finally:
            self._gate.release()
            gate.release()
        gate.speed_up()
        account.settle(reply.usage, reply.cost)
        return reply

    async def _reserve(
        self, client: Client, account: RequestBudgetReservation, gate: AdaptiveConcurrencyLimiter
    ) -> int:
        """Reserve the budget for an attempt, and wait until the rate limiters allow it.

        Returns the current round of the model's limiter.
        """
        began_s = _now_s()
        try:
            await account.reserve()
        finally:
            _record_wait(client, "budget", _now_s() - began_s)
        try:
            return await self._acquire_slots(client, gate)
        except BaseException:
            account.release(f"{client.name}: given up before it was sent")
            raise

    def _is_enough(
        self, account: RequestBudgetReservation, gate: AdaptiveConcurrencyLimiter
    ) -> bool:
        """Return True if the budget reserved for the attempt still covers it.

        Otherwise the attempt's slots in the rate limiters are released.
        """
        is_enough = False
        try:
            is_enough = account.is_still_valid()
        finally:
            if not is_enough:
                self._gate.release()
                gate.release()
        return is_enough

    def _takes_pieces(self, client: Client) -> bool:
        takes_pieces = self._take_pieces.get(client.name)
        if takes_pieces is None:
            takes_pieces = "on_piece" in inspect.signature(client.complete).parameters
            self._take_pieces[client.name] = takes_pieces
        return takes_pieces

    async def _acquire_slots(self, client: Client, gate: AdaptiveConcurrencyLimiter) -> int:
        # The model's own slot first: a rate-limited model must not hold slots that others could
        # use.
        if not gate.try_acquire():
            began_s, was_slowed = _now_s(), gate.is_slowed
            try:
                await gate.acquire()
            finally:
                if was_slowed or gate.is_slowed:
                    _record_wait(client, "rate_limit", _now_s() - began_s)
        entered = gate.round
        if not self._gate.try_acquire():
            try:
                await self._gate.acquire()
            except BaseException:
                gate.release()
                raise
        return entered

    def backoff_s(self, error: ModelError, failed: int) -> float:
        """Return the seconds to wait before a retry: as the server asks, or random exponential
        backoff."""
        if self._random is None:
            import random  # few runs have failures

            self._random = random.Random()
        # 2.0 ** 1024 overflows, and patience does not limit the number of failures.
        backoff_s = self._random.uniform(
            0.0, min(_LONGEST_BACKOFF_S, _FIRST_WAIT_S * 2.0 ** min(failed - 1, 9))
        )
        return _asked_s(error) or backoff_s

    def _connect(self, model: Model) -> Client:
        name, provider = model.name, model.provider
        prices = self._prices = self._prices or PriceTable.load()
        price = model.price or prices.price(name)
        window = model.window or prices.context_window(name)
        key, headers, environ = model.secrets()
        key = key or self._keys.get(provider)
        base_url = model.base_url or self._base_urls.get(provider)
        connect = CLIENTS.resolve(provider)
        if isinstance(connect, ModelProviderSpec):
            from ramify.clients.openai import OpenAIClient

            endpoint = resolve_endpoint(
                name, key=key, base_url=base_url, headers=headers, environ=environ
            )
            window = window or (_LOCAL_WINDOW if connect.local else ASSUMED_WINDOW)
            client: Client = OpenAIClient(
                name, endpoint, self._wire, window=window, price=price, streams=model.stream
            )
        else:
            options: dict[str, Any] = {"key": key, "base_url": base_url}
            accepted = inspect.signature(connect).parameters
            if headers and "headers" not in accepted:
                raise ConfigError(f"{name}: provider '{provider}' sends no headers: omit them")
            options |= {"headers": headers} if headers else {}
            options |= {"environ": environ} if "environ" in accepted else {}
            options |= {"streams": model.stream} if "streams" in accepted else {}
            client = connect(name, window=window, price=price, **options)
            if not isinstance(client, Client):
                raise ConfigError(
                    f"provider '{provider}' gives a {type(client).__name__}, not a Client"
                )
        self._own.append(client)
        return client


class _Arrival:
    """The arrival of one reply, during which an idle timeout applies.

    Every piece of the reply restarts it, but pieces without text can do so only for a limited time.
    """

    def __init__(
        self, deadlines: TimeoutScheduler, timeout_s: float, on_piece: OnPiece | None
    ) -> None:
        self._deadlines = deadlines
        self._timeout_s = timeout_s
        self._on_piece = on_piece
        self._timeout: TimeoutScope | None = None
        self._text_at_s = 0.0
        """Event-loop time at which the last piece with text arrived; until then, the time at which
        the timeout started."""
        self._num_chars = 0

    def timeout(self, now_s: float) -> TimeoutScope:
        """Start the timeout at the given event-loop time, and return a context manager that
        applies it."""
        self._text_at_s = now_s
        self._timeout = self._deadlines.timeout_at(now_s + self._timeout_s)
        return self._timeout

    def add(self, piece: ReplyPiece) -> None:
        now_s = _now_s()
        size = len(piece.text) + len(piece.reasoning)
        if size:
            self._text_at_s, self._num_chars = now_s, self._num_chars + size
        ends_s = self._text_at_s + _MOST_TIMEOUTS * self._timeout_s
        if self._timeout is not None:
            self._timeout.reschedule(min(now_s + self._timeout_s, ends_s))
        if self._on_piece is not None:
            self._on_piece(piece)

    def lost(self, client: Client) -> ReplyLostError:
        """Return the error for a reply that did not arrive in time."""
        where = getattr(client, "where", client.name)
        if not self._num_chars:
            return ReplyLostError(f"{where}: no reply within {self._timeout_s:g} s")
        return ReplyLostError(
            f"{where}: the reply stopped after {self._num_chars:,} characters, and nothing arrived "
            f"for {self._timeout_s:g} s; if the server cannot stream, give Model(…, stream=False)"
        )


class RequestRetryPolicy:
    """Decides how often and for how long a failing request is retried.

    If ``patience_s`` is not 0, a transient failure is retried until the request has been failing
    for that many seconds. Rate limits do not count as failures while other requests to the model
    succeed, because a busy server will then get to this request too.
    """

    def __init__(
        self,
        pool: RateLimitedClientPool,
        client: Client,
        patience_s: float,
        on_retry: Callable[[str], None] | None,
    ) -> None:
        self.failed = 0
        """Number of failed attempts."""
        self.sent_s = 0.0
        """Event-loop time at which the last attempt was sent."""
        self._pool = pool
        self._client = client
        self._patience_s = patience_s
        self._on_retry = on_retry
        self._began_s = math.inf
        """Event-loop time of the first failure."""
        self._waited_s = 0.0
        self._num_retries = 0

    def is_wait_acceptable(self, error: ModelError) -> bool:
        """Return True if the server's requested wait is short enough to try again."""
        return _asked_s(error) <= (self._left_s() if self._patience_s else self._pool.max_wait_s)

    def retry_delay_s(
        self, error: ModelError, gate: AdaptiveConcurrencyLimiter, others_passed: bool
    ) -> float | None:
        """Return the seconds to wait before a retry, or None if the rate limiter does the waiting.

        Raises the given error if the request should not be retried.
        """
        is_limited = isinstance(error, RateLimited)
        if is_limited and others_passed:
            self._began_s, self._waited_s = math.inf, 0.0
        else:
            self.failed += 1
        # What cannot be reached was failing all the while that a connection was tried.
        since_s = self.sent_s if isinstance(error, Unreachable) else _now_s()
        self._began_s = min(self._began_s, since_s)
        if not error.transient or self._is_used_up() or not self.is_wait_acceptable(error):
            error.waited_s = self._out_s()
            raise error
        wait_s = (
            gate.pause_remaining_s() if is_limited else self._pool.backoff_s(error, self.failed)
        )
        if self._patience_s:
            wait_s = min(wait_s, self._left_s())
        self._report(error, wait_s)
        self._waited_s += wait_s
        return None if is_limited else wait_s

    def log_outage_duration(self) -> None:
        """Log how long a retried request kept failing, if that was at least a second."""
        if self._patience_s and self._num_retries:
            _record_wait(self._client, "outage", self._out_s())

    def _is_used_up(self) -> bool:
        if self._patience_s:
            return self._left_s() <= 0
        return self.failed >= self._pool.max_attempts

    def _left_s(self) -> float:
        return self._patience_s - self._out_s()

    def _out_s(self) -> float:
        """Return for how many seconds the request has been failing.

        This is at least the time spent waiting between attempts.
        """
        # The clock does not show the waits if the pool's ``sleep`` is one that returns at once.
        return max(self._waited_s, _now_s() - self._began_s) if self.failed else 0.0

    def _report(self, error: ModelError, wait_s: float) -> None:
        tried = (
            f"for {self._left_s():.0f} s at most"
            if self._patience_s
            else f"attempt {self.failed} of {self._pool.max_attempts}"
        )
        tried = tried if self.failed else "others got through"
        text = f"{error}; {RETRYING} {wait_s:.1f} s ({tried})"
        self._num_retries += 1
        # A request may be retried many times while patience lasts: one record is enough.
        log = _log.warning if self._num_retries < 2 or not self._patience_s else _log.debug
        log(
            "retry",
            text,
            model=self._client.name,
            reason=type(error).__name__,
            attempt=self.failed,
            wait_s=wait_s,
        )
        if self._on_retry is not None:
            self._on_retry(text)


class AdaptiveConcurrencyLimiter:
    """Limits how many requests are in flight at a time, and admits them in order of arrival.

    After a rate-limit error the limit is lowered. A limiter belongs to one event loop.

    The gate starts fully open. A rate limit halves its width, once for all requests that were in
    flight together, and pauses all requests for the time that the server asked for. Every success
    widens the gate again, by about a thirtieth of the limit per round of requests. The gate owns no
    task: a request that leaves admits the next one, so an uncontended pass costs a microsecond.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.in_flight = 0
        self.passed = 0
        """Number of requests that succeeded so far."""
        self._most = max_in_flight
        self._allowed = float(max_in_flight)
        self._step = max(1.0, max_in_flight / 32)
        self.round = 0
        """Number of the current round. Requests of one round entered at the same width, and only
        the first rate limit of a round narrows it."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._opens_at: float | None = None
        """Event-loop time at which the current pause ends; None if requests are not paused."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_slowed(self) -> bool:
        """True if a rate limit currently pauses requests or reduces their number."""
        return self._opens_at is not None or self._allowed < self._most

    @property
    def max_in_flight(self) -> int:
        """The number of requests that may currently be in flight."""
        return int(self._allowed)

    def pause_remaining_s(self) -> float:
        """Return the seconds until the current pause in requests ends, or 0 if there is none."""
        return (
            0.0
            if self._opens_at is None
            else max(0.0, self._opens_at - asyncio.get_running_loop().time())
        )

    def try_acquire(self) -> bool:
        """Admit a request if it may be sent now, and return True if it was admitted.

        If it returns False, the caller must wait with ``acquire``.
        """
        if self._waiting or self._opens_at is not None or self.in_flight >= self.max_in_flight:
            return False
        self.in_flight += 1
        return True

    async def acquire(self) -> int:
        """Wait until a request may be sent under the concurrency limit.

        Returns the number of the current round. The caller passes it to ``slow_down`` if the
        request hits a rate limit.
        """
        if not self.try_acquire():
            await self._wait_for_slot()
        return self.round

    def release(self) -> None:
        self.in_flight -= 1
        if self._waiting:
            self._admit()

    def speed_up(self) -> None:
        """Record a successful request, and allow slightly more requests at a time."""
        self.passed += 1
        if self._allowed < self._most:
            self._allowed = min(self._most, self._allowed + self._step / self._allowed)

    def slow_down(self, round: int, pause_s: float) -> None:
        """Send fewer requests at a time, after a request hit a rate limit.

        This halves the number of concurrent requests, once per round, and starts no request for
        ``pause_s`` seconds.
        """
        if round == self.round:
            self.round += 1
            # Halve the load that was really in flight, which may be far below the limit.
            self._allowed = max(1.0, min(self._allowed, self.in_flight) / 2)
        opens_at = asyncio.get_running_loop().time() + pause_s
        if self._opens_at is None or opens_at > self._opens_at:
            self._opens_at = opens_at
            self._schedule_open()

    async def _wait_for_slot(self) -> None:
        slot = asyncio.get_running_loop().create_future()
        # In turn: a success may have raised the limit, which by itself admits no request.
        self._waiting.append(slot)
        self._admit()
        try:
            await slot
        except asyncio.CancelledError:
            # The slot was handed over at the moment of cancellation, so pass it on.
            if slot.done() and not slot.cancelled():
                self.release()
            raise

    def _admit(self) -> None:
        if self._opens_at is not None:
            return
        while self._waiting and self.in_flight < self.max_in_flight:
            slot = self._waiting.popleft()
            if not slot.done():
                self.in_flight += 1
                slot.set_result(None)

    def _schedule_open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._opens_at is not None
        self._timer = asyncio.get_running_loop().call_at(self._opens_at, self._open)

    def _open(self) -> None:
        self._opens_at = self._timer = None
        self._admit()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _record_wait(client: Client, reason: str, wait_s: float) -> None:
    """Log how long a request waited before it was sent, if that was unusually long."""
    if wait_s >= _LONG_WAIT_S:
        text = f"{client.name}: waited {wait_s:.1f} s for {_WAITED_FOR[reason]}"
        _log.info("wait", text, model=client.name, reason=reason, wait_s=wait_s)


def _log_unexpected(client: Client, error: Exception) -> MalformedResponse:
    """Log an unexpected client exception, and return a MalformedResponse to raise instead."""
    text = " ".join(redact_secrets(redact_likely_secrets(str(error))).split())[:200]
    bad = MalformedResponse(
        f"{client.name}: the reply could not be read ({type(error).__name__}: {text}); the log has "
        "the traceback"
    )
    _log.error("unreadable_reply", str(bad), error=error, model=client.name)
    return bad


def _asked_s(error: ModelError) -> float:
    return (error.retry_after_s or 0.0) if isinstance(error, RateLimited) else 0.0


def reply_with_cost(reply: Reply, request: Request, window: int, price: Price | None) -> Reply:
    """Return a copy of a reply in which implausible usage is replaced and the cost is filled in.

    The cost is computed at ``price``, or is the reported one if ``price`` is None.
    """
    usage = plausible_usage(reply, request, window)
    cost = price.of(usage) if price is not None else reported_cost(reply.cost)
    is_full = reply.finish == "other" and reply.usage.output_tokens >= request.sampling.max_tokens
    finish = "length" if is_full else reply.finish
    if usage is reply.usage and cost == reply.cost and not is_full:
        return reply
    return msgspec.structs.replace(reply, usage=usage, cost=cost, finish=finish)
