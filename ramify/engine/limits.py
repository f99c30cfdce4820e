"""What a run may spend, and the one ledger that keeps the whole tree within it.

Before every attempt to reach a model the most that it can cost is reserved; afterwards what it did
cost is settled. So a limit is never passed, however many calls are in flight: at all times

    spent + outstanding + held <= limit            for calls, tokens and dollars

where ``held`` is the price of one last turn of the root, so that "answer with what you have" always
fits. A request that does not fit now waits while others' reservations may still be freed, and is
refused once they cannot.

    limit 10 calls, 8 spent, 1 held, 1 outstanding:  reserve -> waits;  release -> goes on;  settle -> LimitReached

Time is not kept here: deadlines cut work in flight and belong to the ``Run``.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import NamedTuple

import msgspec

from ramify.clients.base import Price
from ramify.errors import ConfigError, LimitReached
from ramify.types.message import Usage
from ramify.types.trajectory import Stop

DEFAULT_MAX_COST = 5.0
"""Dollars, for models that have a price."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one question may spend over its whole tree. Zero is an error, but for ``max_depth``."""

    max_turns: int = 30
    """Requests of one RLM call, each child counting its own."""
    max_depth: int = 1
    """How deep ``rlm_query`` may nest; 0 is the root alone, whose ``rlm_query`` becomes one plain
    call."""
    max_calls: int = 1000
    """Requests to models in the whole tree that were, or may have been, paid for."""
    max_tokens: int = 20_000_000
    """Input and output tokens of the whole tree."""
    max_cost: float | None = None
    """Dollars of the whole tree. None: 5 where the models have prices, no limit where they have
    none."""
    max_seconds: float = 1800.0
    """From question to answer. The last tenth, 30 s at most, is kept for the last word."""
    max_concurrency: int = 64
    """Requests on the wire at once, over the whole tree."""
    max_children: int = 64
    """Children of one call that run at once; each holds a session."""
    max_reply_tokens: int = 8192
    """Of any single reply."""
    patience_s: float = 300.0
    """How long a request is tried again while its model cannot be reached; a tenth of it, 30 s at
    most, for a model that has not answered yet."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            low = 0 if name == "max_depth" else 1 if isinstance(value, int) else math.ulp(0.0)
            if value is not None and not value >= low:
                remedy = (
                    "0 is the root alone"
                    if name == "max_depth"
                    else "give a positive number, or leave it out"
                )
                raise ConfigError(f"limit {name}={value!r} allows nothing: {remedy}")

    @property
    def last_word_s(self) -> float:
        """Seconds before the deadline at which work is cut, so that an answer can still be
        given."""
        return min(30.0, 0.1 * self.max_seconds)

    @property
    def last_word_tokens(self) -> int:
        """Length of the reply that is held back for the root's last word."""
        return min(self.max_reply_tokens, 4096)


class ResourceAmount(NamedTuple):
    """What is counted of one or more requests."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(
            self.calls + other.calls, self.tokens + other.tokens, self.cost + other.cost
        )

    def minus(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(
            self.calls - other.calls, self.tokens - other.tokens, self.cost - other.cost
        )


def bound(max_input_tokens: int, max_output_tokens: int, price: Price | None) -> ResourceAmount:
    """The most that one request can cost, whether or not the provider's cache takes part."""
    usage = Usage(max_input_tokens, max_output_tokens)
    as_cached = Usage(max_input_tokens, max_output_tokens, cached_tokens=max_input_tokens)
    as_stored = Usage(max_input_tokens, max_output_tokens, cache_write_tokens=max_input_tokens)
    dearest = max(price.of(kind) for kind in (usage, as_cached, as_stored)) if price else 0.0
    return ResourceAmount(1, usage.total_tokens, dearest)


class Ledger:
    """Spending of one question's tree, over all of its calls. Lives on one event loop."""

    def __init__(self, limits: Limits, *, priced: bool) -> None:
        max_cost = (
            limits.max_cost
            if limits.max_cost is not None
            else (DEFAULT_MAX_COST if priced else math.inf)
        )
        self.limit = ResourceAmount(limits.max_calls, limits.max_tokens, max_cost)
        self.spent = ResourceAmount()
        self.outstanding = ResourceAmount()
        self.held = ResourceAmount()
        self.usage = Usage()
        self.cost: float | None = 0.0 if priced else None
        self._waiting: deque[tuple[ResourceAmount, asyncio.Future[None]]] = deque()

    def _over(self, total: ResourceAmount) -> Stop | None:
        """The first limit that ``total`` would pass."""
        limit = self.limit
        if total.calls > limit.calls:
            return Stop.MAX_CALLS
        if total.tokens > limit.tokens:
            return Stop.MAX_TOKENS
        # Sums of floats may miss a limit by a rounding error; a billionth of it is not a breach.
        return Stop.MAX_COST if total.cost > limit.cost * (1 + 1e-9) else None

    def would_pass(self, amount: ResourceAmount) -> Stop | None:
        """The limit that ``amount`` cannot fit under, even if everything outstanding turns out to
        cost nothing."""
        return self._over(self._committed().plus(amount))

    def _committed(self) -> ResourceAmount:
        return self.spent.plus(self.held)

    def hold(self, amount: ResourceAmount) -> Stop | None:
        """Hold ``amount`` back for the last word, in place of what was held. Returns the limit it
        does not fit under."""
        over = self._over(self.spent.plus(self.outstanding).plus(amount))
        if over is None:
            self.held = amount
        return over

    async def reserve(self, amount: ResourceAmount) -> None:
        """Set ``amount`` aside; first come, first served. Raises LimitReached."""
        wanted = self.outstanding.plus(amount)
        if not self._waiting and self._over(self._committed().plus(wanted)) is None:
            self.outstanding = wanted
            return
        over = self.would_pass(amount)
        if over is not None:
            raise self._reached(over)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.free(amount)
            raise

    def settle(self, reserved: ResourceAmount, usage: Usage, cost: float | None) -> None:
        """A reservation turned into spending."""
        self.outstanding = self.outstanding.minus(reserved)
        self.charge(usage, cost)

    def charge(self, usage: Usage, cost: float | None) -> None:
        """Spending that was not reserved here: the replies that a resumed run had already been
        given."""
        self.spent = self.spent.plus(ResourceAmount(usage.calls, usage.total_tokens, cost or 0.0))
        self.usage += usage
        if cost is not None:
            self.cost = (self.cost or 0.0) + cost
        self._admit()

    def free(self, reserved: ResourceAmount) -> None:
        """A reservation that cost nothing."""
        self.outstanding = self.outstanding.minus(reserved)
        self._admit()

    def _admit(self) -> None:
        """Let those in who fit now, in order; refuse those who never will."""
        while self._waiting:
            amount, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            never = self.would_pass(amount)
            if never is not None:
                turn.set_exception(self._reached(never))
            elif self._over(self._committed().plus(self.outstanding).plus(amount)) is None:
                self.outstanding = self.outstanding.plus(amount)
                turn.set_result(None)
            else:
                return
            self._waiting.popleft()

    def _reached(self, stop: Stop) -> LimitReached:
        what = {
            Stop.MAX_CALLS: f"{self.limit.calls} calls",
            Stop.MAX_TOKENS: f"{self.limit.tokens:,} tokens",
            Stop.MAX_COST: f"${self.limit.cost:g}",
        }[stop]
        return LimitReached(f"the run's limit of {what} is reached", stop)

    def state(self) -> list[tuple[str, float, float]]:
        """(name, spent, limit) for each finite limit: for budget bars and for telling the model."""
        rows = [
            ("calls", self.spent.calls, self.limit.calls),
            ("tokens", self.spent.tokens, self.limit.tokens),
        ]
        costs = (
            [("dollars", self.spent.cost, self.limit.cost)]
            if math.isfinite(self.limit.cost)
            else []
        )
        return [*rows, *costs]
