"""Define the limits of a run, and the budget ledger that keeps all of its model calls within them.

Before every attempt to reach a model, the most that it can cost is reserved. Afterwards its actual
cost is settled. A limit is therefore never exceeded, however many calls are in flight: at all times

    spent + outstanding + held <= limit            for calls, tokens and dollars

where ``held`` is the cost of one final request of the root, so that "answer with what you have"
always fits. A request that does not fit waits while other reservations may still be released, and
is refused once none remains.

    limit 10 calls, 8 spent, 1 held, 1 outstanding:
        reserve -> waits;  then release -> admitted,  or settle -> LimitReached

Only a provider can break this rule, by reporting more usage than was reserved. Every later request
to that model then reserves correspondingly more, and no request is sent until those in flight are
settled. So a run exceeds a limit by at most the excess of the requests that were in flight.

    600 tokens reserved, 60,600 reported:  later requests reserve 60,000 tokens more

Several runs may share a budget, as the rows of a map do. The ledger of each run then also reserves
in the shared ledger, and a request is sent only if it fits both. Deadlines, which cancel work in
flight, are enforced by ``run_ending.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import NamedTuple

import msgspec

from ramify.clients.base import Price
from ramify.errors import ConfigError, LimitReached, StrictKeywordsMeta
from ramify.format_quantities import format_plain_number
from ramify.types.message import Usage
from ramify.types.trajectory import Stop

DEFAULT_MAX_COST = 5.0
"""Default limit in dollars on the cost of a question, if any model has a price."""

_NO_PATIENCE_S = 1e-9
"""Patience that ends with the first failure."""
_MAY_BE_ZERO = ("max_depth", "max_reasoning_tokens", "patience_s")


_WRAP_UP_S = 10.0


class Limits(msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True, forbid_unknown_fields=True):
    """Limits on the calls, tokens, dollars, time and nesting of one question.

    Except where a field says otherwise, all calls of the question count together. A limit of zero
    is an error, except for ``max_depth`` and ``max_reasoning_tokens``.
    """

    max_turns: int = 30
    """Maximum number of turns (model requests) of one RLM call. After them, one more request asks
    for a final answer. Each child call counts its own turns."""
    max_depth: int = 1
    """How deeply ``rlm_query`` may nest. With 0, only the root has a session, and its ``rlm_query``
    becomes one plain call."""
    max_calls: int = 1000
    """Maximum number of requests to models in the whole tree that were billed, or may have been."""
    max_tokens: int = 20_000_000
    """Maximum number of input and output tokens of the whole tree."""
    max_cost: float | None = None
    """Maximum cost of the whole call tree, in dollars. None means 5 dollars if any model has a
    price, and no limit otherwise."""
    max_seconds: float = 1800.0
    """Maximum seconds from question to answer. Part is reserved for the final answer: at first a
    tenth (at most 30 s), later the time that measured replies took."""
    max_concurrency: int = 64
    """Maximum number of model requests in flight at once, over the whole call tree."""
    max_children: int = 64
    """Maximum number of child calls that one call runs at once. Each has a separate session."""
    max_reply_tokens: int = 8192
    """Maximum tokens of one reply. In a session, a reply truncated there is continued, or requested
    again with two and then four times as many."""
    max_sub_reply_tokens: int | None = None
    """Maximum tokens of one reply to ``llm_query``. None means ``max_reply_tokens``."""
    max_reasoning_tokens: int | None = None
    """Maximum tokens of hidden reasoning per reply, in addition to its text. None means 16,384 for
    a model known to reason (less if its window or the budget is small), else 0."""
    patience_s: float = 600.0
    """Seconds for which a request is retried after refused connections, rate limits, 5xx, or web
    pages instead of replies. 0: not retried. Retries never go past ``max_seconds``."""
    stall_s: float = 30.0
    """Seconds for which code may block the run's event loop after ``max_seconds`` has passed. The
    run is then suspended from another thread."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            low = 0 if name in _MAY_BE_ZERO else 1 if isinstance(value, int) else math.ulp(0.0)
            if value is not None and not value >= low:
                remedy = (
                    "0 allows only the root"
                    if name == "max_depth"
                    else "give a positive number, or omit it"
                )
                raise ConfigError(f"limit {name}={value!r} allows nothing: {remedy}")

    @property
    def last_word_s(self) -> float:
        """Time in seconds reserved before the deadline for the root call's final answer.

        All other work is cancelled when this time begins. Once the root has received a reply,
        measured reply times replace this initial value.
        """
        return min(30.0, 0.1 * self.max_seconds)

    @property
    def last_word_tokens(self) -> int:
        """Maximum length in tokens of the root call's final reply.

        Budget is reserved for this reply.
        """
        return min(self.max_reply_tokens, 4096)

    def retry_patience_s(self, last_word: Stop | None = None) -> float:
        """Return for how many seconds a failing request is retried, which is never 0.

        For clients, 0 means that attempts are counted instead.

        The time is short for the final request after the user asked the run to finish, because the
        user is waiting. ``last_word`` is the reason for the final request, or None for other
        requests.
        """
        is_awaited = last_word is Stop.CANCELLED
        patience_s = self.patience_s or _NO_PATIENCE_S
        return min(patience_s, _WRAP_UP_S) if is_awaited else patience_s


class BudgetAmount(NamedTuple):
    """A number of calls, a number of tokens and a cost in dollars: a limit, or an amount to reserve
    or charge."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, other: BudgetAmount) -> BudgetAmount:
        return BudgetAmount(
            self.calls + other.calls, self.tokens + other.tokens, self.cost + other.cost
        )

    def within(self, limit: BudgetAmount) -> bool:
        """Return True if the calls, tokens and dollars of this amount are all within ``limit``."""
        return self.calls <= limit.calls and self.tokens <= limit.tokens and self.cost <= limit.cost

    def least(self, other: BudgetAmount) -> BudgetAmount:
        """Return the minimum of two amounts, computed separately for calls, tokens and dollars."""
        return BudgetAmount(
            min(self.calls, other.calls), min(self.tokens, other.tokens), min(self.cost, other.cost)
        )

    def minus(self, other: BudgetAmount) -> BudgetAmount:
        return BudgetAmount(
            self.calls - other.calls, self.tokens - other.tokens, self.cost - other.cost
        )


_NOTHING = BudgetAmount()


def max_request_amount(
    max_input_tokens: int, max_output_tokens: int, price: Price | None
) -> BudgetAmount:
    """Return the maximum calls, tokens and dollars that one request can use.

    Its cost assumes the highest input price, with or without the provider's prompt cache.
    """
    cost = 0.0
    if price is not None:
        rates = (price.input, price.cached, price.cache_write)
        highest = max(rate for rate in rates if rate is not None)
        cost = (max_input_tokens * highest + max_output_tokens * price.output) / 1e6
    return BudgetAmount(1, max_input_tokens + max_output_tokens, cost)


class ReservationOverrun(NamedTuple):
    """The largest amounts by which a model's replies have exceeded their reservations.

    Later requests to the model reserve that much more.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    extra_input: int = 0
    """Prompt tokens beyond the expected upper bound."""
    extra_output: int = 0
    """Reply tokens beyond the maximum that was requested."""
    cost: float = 0.0
    """Highest cost of one reply, in dollars."""

    def updated_with_usage(self, most: Usage, reported: Usage, cost: float) -> ReservationOverrun:
        """Return the overrun updated with a reply that exceeded its reservation.

        The reply used ``reported`` although at most ``most`` was expected.
        """
        return ReservationOverrun(
            max(self.input_tokens, reported.input_tokens),
            max(self.output_tokens, reported.output_tokens),
            max(self.extra_input, reported.input_tokens - most.input_tokens),
            max(self.extra_output, reported.output_tokens - most.output_tokens),
            max(self.cost, cost),
        )

    def padded_max_usage(self, most: Usage) -> Usage:
        """Return the maximum usage ``most``, increased by the largest overrun of the model so
        far."""
        return msgspec.structs.replace(
            most,
            input_tokens=max(self.input_tokens, most.input_tokens + self.extra_input),
            output_tokens=max(self.output_tokens, most.output_tokens + self.extra_output),
        )


_NO_EXCESS = ReservationOverrun()


class BudgetLedger:
    """Tracks how much of one question's budget its model calls have spent and reserved.

    An instance belongs to one event loop.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        priced: bool,
        shared: BudgetLedger | None = None,
        owner: str = "run",
    ) -> None:
        """Open a ledger that enforces the given limits.

        ``priced`` is True if any model has a price. ``shared`` is the ledger of a budget that
        several runs share; each amount is reserved there too. ``owner`` names the owner of the
        limits in error messages.
        """
        max_cost = (
            limits.max_cost
            if limits.max_cost is not None
            else (DEFAULT_MAX_COST if priced else math.inf)
        )
        self.limit = BudgetAmount(limits.max_calls, limits.max_tokens, max_cost)
        self.shared = shared
        self.owner = owner
        self.spent = BudgetAmount()
        self.outstanding = BudgetAmount()
        self.held = _NOTHING
        self.usage = Usage()
        self.cost: float | None = 0.0 if priced else None
        self.refusals: dict[Stop, str] = {}
        """Limit -> a sentence about the last request that it refused, with the amount requested and
        the amount left."""
        self.reported: set[tuple[Stop, str]] = set()
        """Limits that were already logged, as (limit, call id); the id is empty if all calls share
        the limit."""
        self.excess: dict[str, ReservationOverrun] = {}
        """Model -> its largest reported excess over its reservations."""
        self.last_excess = ""
        """Sentence about the latest excess, with the reported and the reserved amount."""
        self.is_draining = False
        """True while no request is admitted because outstanding requests must be settled first."""
        self._waiting: deque[tuple[BudgetAmount, asyncio.Future[None]]] = deque()

    def _first_exceeded(self, total: BudgetAmount) -> Stop | None:
        """Return the first limit (calls, tokens or cost) that ``total`` exceeds, or None."""
        limit = self.limit
        if total.calls > limit.calls:
            return Stop.MAX_CALLS
        if total.tokens > limit.tokens:
            return Stop.MAX_TOKENS
        # Sums of floats may miss a limit by a rounding error; a billionth of it is tolerated.
        return Stop.MAX_COST if total.cost > limit.cost * (1 + 1e-9) else None

    def limit_exceeded_by(self, amount: BudgetAmount) -> Stop | None:
        """Return the limit that ``amount`` would exceed even if all pending requests cost nothing.

        Return None if there is no such limit.
        """
        return self._first_exceeded(self._committed_amount().plus(amount))

    def record_turn_refusal(self, exceeded: Stop, turn: BudgetAmount, final: BudgetAmount) -> None:
        """Record that a turn was refused because it and the final request together exceed a limit.

        ``exceeded`` is that limit, and ``final`` is the final request that may follow ``turn``.
        """
        committed = self.spent.plus(self.outstanding)
        what = "the next turn and the final reply, with their prompts,"
        self.refusals[exceeded] = self._refusal(exceeded, turn.plus(final), committed, what)

    def _committed_amount(self) -> BudgetAmount:
        return self.spent.plus(self.held)

    def calls_left(self) -> int:
        """Return how many more requests may be sent.

        Requests in flight and the one reserved for the final answer are already subtracted.
        """
        own = self.limit.calls - self._committed_amount().plus(self.outstanding).calls
        return own if self.shared is None else min(own, self.shared.calls_left())

    def reserve_final_answer(self, amount: BudgetAmount) -> Stop | None:
        """Hold back ``amount`` for the run's final answer, replacing any earlier hold.

        Return None on success. If a limit would be exceeded, change nothing and return that limit.
        """
        committed = self.spent.plus(self.outstanding)
        exceeded = self._first_exceeded(committed.plus(amount))
        if exceeded is None:
            self.held = amount
        else:
            self.refusals[exceeded] = self._refusal(exceeded, amount, committed)
        return exceeded

    @property
    def is_paused_by_overrun(self) -> bool:
        """True while new requests are blocked because a reply used more than was reserved for it.

        The requests in flight must be settled first.
        """
        return self.is_draining or (self.shared is not None and self.shared.is_draining)

    async def reserve(self, amount: BudgetAmount) -> None:
        """Wait until ``amount`` fits into the budget, and reserve it.

        Waiting requests are served in order. Raises LimitReached if the amount can never fit.
        """
        # First, so that a request that waits here does not hold budget that other runs need.
        await self._reserve(amount)
        if self.shared is None:
            return
        try:
            await self.shared.reserve(amount)
        except BaseException as error:
            self._free(amount)
            if isinstance(error, LimitReached):
                error.is_shared = True
            raise

    def reserve_sent(self, amount: BudgetAmount) -> None:
        """Reserve budget, even beyond the limits, for a request that an earlier process sent."""
        if self.shared is not None:
            self.shared.reserve_sent(amount)
        self.outstanding = self.outstanding.plus(amount)

    async def _reserve(self, amount: BudgetAmount) -> None:
        """Wait until ``amount`` fits into this ledger, and reserve it in this ledger only."""
        total = self.outstanding.plus(amount)
        is_next = not self._waiting and not self.is_draining
        committed = self.spent if self.held is _NOTHING else self._committed_amount()
        if is_next and self._first_exceeded(committed.plus(total)) is None:
            self.outstanding = total
            return
        exceeded = self.limit_exceeded_by(amount)
        if exceeded is not None:
            raise self._limit_reached_error(exceeded, amount)
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, admission))
        # At once, because the requests before it may have been cancelled.
        self._admit()
        try:
            await admission
        except asyncio.CancelledError:
            # It was admitted at the moment of cancellation, so the reservation is returned. If it
            # was still waiting, the next settled request admits those behind it.
            if admission.done() and not admission.cancelled() and admission.exception() is None:
                self._free(amount)
            else:
                self._admit()  # those behind this request may fit now
            raise

    def is_over_reservation(self, reserved: BudgetAmount, usage: Usage, cost: float | None) -> bool:
        """Return True if the usage or cost of a reply exceeds what was reserved for it."""
        if usage.total_tokens > reserved.tokens:
            return True
        is_dear = cost is not None and cost > reserved.cost * (1 + 1e-9)
        return is_dear and math.isfinite(self.limit.cost)

    def settle(self, reserved: BudgetAmount, usage: Usage, cost: float | None) -> None:
        """Replace the budget reserved for a request with the amount that it actually used.

        If the reservation was too small, others may be too, so no request is admitted until all
        outstanding ones are settled.
        """
        if self.shared is not None:
            self.shared.settle(reserved, usage, cost)
        self.outstanding = self.outstanding.minus(reserved)
        self.is_draining = self.is_draining or self.is_over_reservation(reserved, usage, cost)
        self._book(usage, cost)

    def charge(self, usage: Usage, cost: float | None, *, is_recorded: bool = False) -> None:
        """Charge spending that was not reserved in this ledger.

        An example is a reply that a resumed run had already received. If ``is_recorded`` is True, a
        shared budget is not charged again, because it has already counted this spending.
        """
        if self.shared is not None and not is_recorded:
            self.shared.charge(usage, cost)
        self._book(usage, cost)

    def _book(self, usage: Usage, cost: float | None) -> None:
        self.spent = self.spent.plus(BudgetAmount(usage.calls, usage.total_tokens, cost or 0.0))
        self.usage += usage
        if cost is not None:
            self.cost = (self.cost or 0.0) + cost
        self._admit()

    def release(self, reserved: BudgetAmount) -> None:
        """Release the budget reserved for a request that cost nothing."""
        if self.shared is not None:
            self.shared.release(reserved)
        self._free(reserved)

    def _free(self, reserved: BudgetAmount) -> None:
        self.outstanding = self.outstanding.minus(reserved)
        self._admit()

    def _admit(self) -> None:
        """Admit waiting requests that now fit the budget, in order, and refuse those that can never
        fit."""
        # Draining ends when no request is in flight.
        self.is_draining = self.is_draining and self.outstanding.calls > 0
        while self._waiting:
            amount, admission = self._waiting[0]
            if admission.done():  # its caller was cancelled
                self._waiting.popleft()
                continue
            exceeded = self.limit_exceeded_by(amount)
            if exceeded is not None:
                admission.set_exception(self._limit_reached_error(exceeded, amount))
            # The first request in the queue blocks the others, so large ones are not starved.
            elif not self.is_draining and (
                self._first_exceeded(self._committed_amount().plus(self.outstanding).plus(amount))
                is None
            ):
                self.outstanding = self.outstanding.plus(amount)
                admission.set_result(None)
            else:
                return
            self._waiting.popleft()

    def _limit_reached_error(self, stop: Stop, amount: BudgetAmount) -> LimitReached:
        self.refusals[stop] = self._refusal(stop, amount, self._committed_amount())
        what = {
            Stop.MAX_CALLS: f"{self.limit.calls} calls",
            Stop.MAX_TOKENS: f"{self.limit.tokens:,} tokens",
            Stop.MAX_COST: f"${format_plain_number(self.limit.cost, 6)}",
        }[stop]
        return LimitReached(f"the {self.owner}'s limit of {what} is reached", stop)

    def _refusal(
        self,
        stop: Stop,
        amount: BudgetAmount,
        committed: BudgetAmount,
        what: str = "the next request, with its prompt,",
    ) -> str:
        limit, left = self.limit, self.limit.minus(committed)
        if stop is Stop.MAX_COST and self.spent.cost > limit.cost:
            return (
                f"${format_plain_number(self.spent.cost)} of "
                f"${format_plain_number(limit.cost, 6)} were spent, because "
                f"{self.last_excess}"
            )
        if stop is Stop.MAX_COST:
            return (
                f"{what} may cost ${format_plain_number(amount.cost)}, and "
                f"${format_plain_number(max(left.cost, 0))} of "
                f"${format_plain_number(limit.cost, 6)} were left: raise max_cost"
            )
        if stop is Stop.MAX_TOKENS and self.spent.tokens > limit.tokens:
            return (
                f"{self.spent.tokens:,} of {limit.tokens:,} tokens were used, because "
                f"{self.last_excess}"
            )
        if stop is Stop.MAX_TOKENS:
            return (
                f"{what} may take {amount.tokens:,} tokens, and {max(left.tokens, 0):,} of "
                f"{limit.tokens:,} were left: raise max_tokens"
            )
        kept = ", and one is kept for the final reply" if self.held.calls else ""
        return f"{self.spent.calls:,} of {limit.calls:,} requests were used{kept}: raise max_calls"

    def usage_by_limit(self) -> list[tuple[str, float, float]]:
        """Return the name, the amount spent and the maximum of each finite limit.

        Progress bars and messages to the model show these numbers.
        """
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


class BudgetReservation:
    """The budget reservation of one request, renewed for each attempt to send it.

    The amount grows if the model has reported more usage than expected for earlier requests.
    """

    def __init__(self, ledger: BudgetLedger, model: str, most: Usage, price: Price | None) -> None:
        """Prepare a reservation in ``ledger``, without reserving yet.

        ``most`` is the maximum usage of the request if the model respects the limits stated in it.
        """
        self.usage = most
        """Usage recorded for an attempt that reports none."""
        self.amount = BudgetAmount()
        self._ledger = ledger
        self._model = model
        self._most = most
        self._price = price
        self._excess: ReservationOverrun | None = None
        """Overrun from which the reserved amount was last computed; None before the first
        computation."""
        self.update_for_overrun()

    @property
    def cost(self) -> float | None:
        """Dollar cost to record for an attempt with unknown usage; None if the model has no
        price."""
        return self.amount.cost if self._price is not None or self.amount.cost else None

    def update_for_overrun(self) -> bool:
        """Recompute the reserved amount if the model's observed overrun has grown.

        Return True if the amount has changed.
        """
        excess = self._ledger.excess.get(self._model, _NO_EXCESS)
        if excess is self._excess:
            return False
        self._excess, before = excess, self.amount
        self.usage = self._most if excess is _NO_EXCESS else excess.padded_max_usage(self._most)
        self.amount = max_request_amount(
            self.usage.input_tokens, self.usage.output_tokens, self._price
        )
        # A server may also charge for a model without a known price.
        if excess.cost > self.amount.cost:
            self.amount = self.amount._replace(cost=excess.cost)
        return self.amount != before

    async def reserve(self) -> None:
        """Wait until one attempt fits the budget, and reserve its amount.

        Raises LimitReached if it can never fit.
        """
        self.update_for_overrun()
        while True:
            reserved = self.amount
            await self._ledger.reserve(reserved)
            if not self.update_for_overrun():
                return
            self._ledger.release(reserved)  # a report in the meantime showed that it is too small

    def confirm_or_release(self) -> bool:
        """Return True if the attempt may still be sent with this reservation.

        Otherwise release the reservation; it is invalid because another reply used more than was
        reserved for that reply.
        """
        if not self._ledger.is_paused_by_overrun:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Release the reservation of an attempt that cost nothing."""
        self._ledger.release(self.amount)

    def settle(self, usage: Usage, cost: float | None, request: str) -> str:
        """Record the usage of an attempt, or its upper bound if the usage is unknown.

        Return a warning if the attempt used more than was reserved, and an empty string otherwise.
        ``request`` names the request in the warning.
        """
        if usage.unknown_calls:
            usage, cost = self.usage, self.cost
        reserved, is_excess = (
            self.amount,
            self._ledger.is_over_reservation(self.amount, usage, cost),
        )
        if is_excess:
            # First, because settling may refuse other requests, whose error quotes this report.
            self.record_excess(usage, cost, request)
        self._ledger.settle(reserved, usage, cost)
        return self._ledger.last_excess if is_excess else ""

    def record_excess(self, usage: Usage, cost: float | None, request: str) -> None:
        """Record by how much an attempt exceeded its reservation, so that later ones reserve as
        much."""
        excess = self._ledger.excess.get(self._model, _NO_EXCESS)
        self._ledger.excess[self._model] = excess.updated_with_usage(self._most, usage, cost or 0.0)
        reported, reserved = (
            f"{tokens:,} tokens" + ("" if cost is None else f" (${format_plain_number(dollars)})")
            for tokens, dollars in (
                (usage.total_tokens, cost or 0.0),
                (self.amount.tokens, self.amount.cost),
            )
        )
        self._ledger.last_excess = (
            f"{self._model} reported {reported} for {request}, which had reserved {reserved}"
        )
