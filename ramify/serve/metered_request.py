"""One request to a metered model.

This module reserves budget from the caller's account ("seat"), lowers the limit on the reply's
tokens if the budget requires it, and charges the actual cost.

    tokens of the prompt + limit of the reply ── reserve ──> sent ──> reply ── settle ──> charged
      │ does not fit: the limit of the reply is lowered to the rest
      └ nothing is left: 402, with a sentence

Before a request is sent, the most that it can cost is reserved: the tokens of its prompt and of the
longest reply. A prompt has at most as many tokens as it has bytes; if the model's template is in
this process, its tokens are counted. A request waits while the reservations of others may still be
freed, and is refused once nothing can be left for it. So no seat spends a token more than its
budget, however many requests it sends at once, and whatever they ask for.

Failures that cost nothing (rate limits, connections, 5xx) are retried, so that every system meets
the same model. A reply that was lost after it may have been paid is charged in full and answered
with 504; whether to ask again is the caller's decision. Accounts and routes are in
``metering_proxy.py``.
"""

from __future__ import annotations

import asyncio
import math

import msgspec

from ramify.clients.base import Client, OnPiece, PromptRenderer, Request
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.limits import BudgetAmount, BudgetReservation
from ramify.errors import LimitReached, ModelError, RamifyError
from ramify.evaluate.systems.base import MeteredModelAccess
from ramify.http_server.model_api_routes import rejection_of
from ramify.http_server.rejections import RequestRejected
from ramify.types.message import Reply, Usage
from ramify.types.trajectory import Stop

REPLY_TOKENS = 8192
"""Default maximum length of a reply in tokens, for requests that do not set one."""
EXHAUSTED = "budget_exhausted"
"""Error code for a request that exceeds the budget."""
_LARGE_CHARS = 1 << 16
"""Length of a prompt in characters above which its tokens are counted in a thread."""


class _ReplyLostAfterPayment(Exception):
    """Raised to stop retrying a request whose lost reply may already have been billed."""


class MeteredRequest:
    """A caller's request to the metered model, paid from the caller's budget.

    The budget limits the length of the reply. Implements ``RequestBudgetReservation``.
    """

    def __init__(
        self, seat: MeteredModelAccess, asked: Request, client: Client, reply_tokens: int
    ) -> None:
        self.sent: Request | None = None
        """The request as sent to the model, or None if the budget is used up."""
        self.usage = Usage()
        """The usage that was charged."""
        self.cost: float | None = None
        self._seat = seat
        self._client = client
        self._reply_tokens = reply_tokens
        self._asked = asked
        self._num_prompt = asked.max_input_tokens()
        self._is_exact = False
        """True if the prompt's exact number of tokens is known, and not only an upper bound."""
        self._lost = ""
        self._reservation: BudgetReservation

    async def count_prompt(self) -> None:
        """Count the prompt's tokens exactly if the model's chat template is available.

        It must be available in this process. Otherwise an upper bound is used.
        """
        rendering: PromptRenderer | None = getattr(self._client, "rendering", None)
        if rendering is None:
            return
        if self._num_prompt > _LARGE_CHARS:
            ids = await asyncio.to_thread(rendering.ids, self._asked)
        else:
            ids = rendering.ids(self._asked)
        self._num_prompt, self._is_exact = len(ids), True

    async def send(self, pool: RateLimitedClientPool, on_piece: OnPiece | None) -> Reply:
        """Send the request with a reply limit that fits the budget, and return the reply.

        Raises RequestRejected if the budget is used up, or if the model fails.
        """
        try:
            while True:
                self.sent, self._reservation = self._fit_to_budget()
                try:
                    reply = await pool.ask(self._client, self.sent, self, on_piece=on_piece)
                    self._seat.outage = ""
                    return reply
                except LimitReached:
                    continue  # others have spent in the meantime: less of the budget remains
        except _ReplyLostAfterPayment as lost:
            self._seat.outage = str(lost)
            raise RequestRejected(str(lost), status=504) from None
        except ModelError as error:
            if error.transient:
                self._seat.outage = str(error)
            if error.may_be_paid:
                raise RequestRejected(str(error), status=504) from None
            raise rejection_of(error) from None
        except RamifyError as error:
            raise rejection_of(error) from None

    def _fit_to_budget(self) -> tuple[Request, BudgetReservation]:
        """Shorten the reply limit until the request fits the budget, and return the request.

        Also return the amount to reserve. Raises RequestRejected if the budget allows no reply.
        """
        most = float(self._longest_reply())
        # Rounding of dollars to tokens may need a second look.
        for _ in range(3):
            request = _with_limit(self._asked, int(most))
            reservation = self._reservation_for(request)
            over = self._tokens_over(reservation.amount)
            if not over:
                return request, reservation
            if (most := most - over) < 1:
                break
        raise self._refuse_over_budget(reservation.amount)

    def _longest_reply(self) -> int:
        """Return the maximum number of reply tokens, before the caller's budget is considered.

        A caller's limit as large as the model's context window counts as no limit.
        """
        asked, window = self._asked.sampling.max_tokens, self._seat.window
        limit = asked if asked < window else min(self._reply_tokens, window)
        room = window - self._num_prompt
        return min(limit, room) if self._is_exact and room > 0 else limit

    def _tokens_over(self, amount: BudgetAmount) -> float:
        """Return by how many tokens the reply limit must shrink so that the request fits the
        budget.

        The result is infinite if no reply is short enough.
        """
        ledger, price = self._seat.ledger, self._client.price
        exceeded = ledger.limit_exceeded_by(amount)
        if exceeded is None:
            return 0
        total, limit = ledger.spent.plus(amount), ledger.limit
        over = float(max(0, total.tokens - limit.tokens))
        if exceeded is Stop.MAX_CALLS:
            return math.inf
        if total.cost > limit.cost:
            if price is None or not price.output > 0:
                return math.inf
            over = max(over, math.ceil((total.cost - limit.cost) * 1e6 / price.output))
        return max(over, 1)

    def _refuse_over_budget(self, amount: BudgetAmount) -> RequestRejected:
        """Record that a request exceeds the budget of its caller, and return the error to send."""
        seat, ledger = self._seat, self._seat.ledger
        stop = ledger.limit_exceeded_by(amount) or Stop.MAX_TOKENS
        spent, limit = ledger.spent, ledger.limit
        how = {
            Stop.MAX_CALLS: f"{spent.calls:,} of {limit.calls:,} requests were sent",
            Stop.MAX_TOKENS: f"{spent.tokens:,} of {limit.tokens:,} tokens were used, and this "
            f"prompt may have {self._num_prompt:,}",
            Stop.MAX_COST: f"${spent.cost:.4g} of ${limit.cost:.4g} were spent, and this prompt "
            f"may have {self._num_prompt:,} tokens",
        }[stop]
        text = f"the budget of {seat.name} is used up: {how}; answer with what you have"
        seat.record_refusal(text, stop)
        return RequestRejected(text, status=402, code=EXHAUSTED, kind="insufficient_quota")

    def _reservation_for(self, request: Request) -> BudgetReservation:
        most = Usage(
            self._num_prompt,
            request.sampling.max_tokens,
            cache_write_tokens=self._num_prompt,
            calls=1,
            unknown_calls=1,
        )
        return BudgetReservation(self._seat.ledger, self._client.name, most, self._client.price)

    # --- the ``RequestBudgetReservation`` of each attempt

    async def reserve(self) -> None:
        if self._lost:
            raise _ReplyLostAfterPayment(self._lost)
        await self._reservation.reserve()

    def is_still_valid(self) -> bool:
        return self._reservation.confirm_or_release()

    def settle(self, usage: Usage, cost: float | None) -> None:
        self._reservation.settle(usage, cost, "a request")
        self.usage, self.cost = usage, cost

    def charge_full_reservation(self, error: str) -> None:
        self._lost = error
        self.settle(self._reservation.usage, self._reservation.cost)

    def release(self, error: str) -> None:
        self._reservation.release()


def _with_limit(request: Request, max_tokens: int) -> Request:
    """Return a copy of the request whose reply may have at most ``max_tokens`` tokens.

    It asks for log-probabilities only if the caller wants the likeliest tokens, because many models
    refuse to report them.
    """
    sampling = msgspec.structs.replace(
        request.sampling,
        max_tokens=max_tokens,
        logprobs=request.sampling.top_logprobs > 0,
    )
    return msgspec.structs.replace(request, sampling=sampling)
