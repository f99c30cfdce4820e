"""Make plain model calls outside of any run, to ask many small questions.

All questions share one budget and one client. Each emits a few events instead of writing a journal
and a trajectory.

    calls = DirectModelCaller(setup, models, budget)         RLM.direct_calls opens them
    await calls.answer(question, emit) ──> CallOutcome
         │                        └── DirectRequestEvent, ModelReplyEvent or
         │                            DirectRequestFailedEvent, before each is acted on; who
         │                            records them can resume the question
         └── reserve ── emit(DirectRequestEvent) ── send ── settle ── emit(ModelReplyEvent)

The prompt, the check of the reply, retries and rate limits are those of a run's plain call. Other
features of a run are left out, because they cost three times the CPU time of the request itself:
the journal and the ledger of each run, the trajectory, listeners, spans, and the text of a reply
while it arrives. ``ways_to_answer.py`` decides which questions a plain call can answer. Storing the
events is left to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Price, Request
from ramify.clients.rate_limited_requests import reply_with_cost
from ramify.engine.answer_strategies import Mode
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.limits import BudgetAmount, BudgetLedger, BudgetReservation, max_request_amount
from ramify.engine.model_requests import (
    check_prices_known,
    filtered_reply_error,
    prepare_reply_for_record,
    truncation_error,
)
from ramify.engine.plain_call import answer_without_session, direct_prompt, with_answer_format
from ramify.engine.question import ALWAYS, Question
from ramify.engine.reply_token_limits import ReplyTokenLimits
from ramify.engine.resources import ModelsByDepth, RlmSetup
from ramify.engine.ways_to_answer import way_to_answer
from ramify.errors import LimitReached, ReplyTruncatedError
from ramify.format_quantities import format_plain_number
from ramify.types.message import Message, Reply, Usage
from ramify.types.picture import has_pictures
from ramify.types.trajectory import Stop


class DirectRequestEvent(msgspec.Struct, frozen=True):
    """An event that is emitted right before a request is sent to the model."""

    turn: int
    """0 for the first request of a question; otherwise the number of the repair attempt."""
    new: tuple[Message, ...]
    """Messages added since the previous turn."""
    most: Usage
    """Upper bound on the request's usage, which the budget reserves."""
    cost: float | None
    """Dollars that the budget reserves; None if the model has no price."""


class ModelReplyEvent(msgspec.Struct, frozen=True):
    """An event that is emitted when the reply to a request has arrived."""

    turn: int
    reply: Reply


class DirectRequestFailedEvent(msgspec.Struct, frozen=True):
    """An event that is emitted when a request has failed.

    It holds the usage and the cost that may have been billed.
    """

    turn: int
    error: str
    usage: Usage
    """Usage that may have been billed. Its number of calls is 0 if nothing was billed."""
    cost: float | None
    """Dollars that may have been billed."""


DirectEvent = DirectRequestEvent | ModelReplyEvent | DirectRequestFailedEvent


class DirectModelCaller:
    """Answers small questions, each with one plain model call instead of a whole run.

    An instance belongs to one event loop.
    """

    def __init__(
        self, setup: RlmSetup, models: ModelsByDepth, budget: BudgetLedger, mode: Mode | None = None
    ) -> None:
        """Prepare to answer small questions with the root model of ``models``.

        ``budget`` limits all questions together, and the limits of ``setup`` apply to each one.
        ``mode`` is the mode in which the questions are answered, or None for the default.
        """
        self.mode = mode
        self.setup = setup
        self.client = models.client_at_depth(0)
        self.budget = budget
        self.limit = BudgetLedger(setup.limits, priced=self.client.price is not None).limit
        """Maximum calls, tokens and cost of one question."""
        check_prices_known(setup.limits, models.all)
        self._models = models
        self._pool = models.pool
        lengths = ReplyTokenLimits(setup, models, self.limit)
        text_tokens, self._setting = lengths.visible_reply_token_limit(self.client, 0, False)
        reasoning_tokens = lengths.reasoning_token_allowance(self.client)
        self._max_tokens = text_tokens + reasoning_tokens
        # A stream costs the CPU time of half a request more. It shows that a model that reasons for
        # minutes is alive.
        self._whole = not reasoning_tokens
        sampling = lengths.sampling_of(self.client)
        self._sampling = msgspec.structs.replace(sampling, max_tokens=self._max_tokens)

    def can_answer(self, question: Question) -> bool:
        """Return True if one plain call is enough to answer ``question``.

        Questions with pictures always give False.
        """
        if question.pictures or has_pictures(question.context):
            return False
        if self.mode in ("free", "plan"):
            return False
        if self.mode == "direct":
            question = msgspec.structs.replace(question, direct=ALWAYS)
        return way_to_answer(self.setup, question, self._models, None) == "plain call"

    @property
    def max_reply_tokens(self) -> int:
        """The maximum number of tokens in one reply, including hidden reasoning."""
        return self._max_tokens

    @property
    def max_context_chars(self) -> int:
        """The maximum length, in characters, of a context that one plain call may read."""
        return min(self.setup.scaffold.direct_chars, 2 * self.client.window)

    @property
    def pause_remaining_s(self) -> float:
        """The seconds until a pause imposed by a rate limit ends; 0 if requests are not paused."""
        return self._pool.pause_remaining_s

    @property
    def is_priced(self) -> bool:
        """True if any of the models has a price."""
        return any(client.price is not None for client in self._models.all)

    def first_request_messages(self, question: Question) -> list[Message]:
        """Return the messages of the first request for ``question``."""
        before, prompt = direct_prompt(
            self.setup.scaffold, self.setup.instructions, self.setup.examples, question
        )
        return [*before, Message("user", with_answer_format(prompt, question.kind))]

    async def answer(
        self,
        question: Question,
        emit: Callable[[DirectEvent], None],
        recorded: Sequence[Reply] = (),
        spent: BudgetAmount | None = None,
    ) -> CallOutcome:
        """Answer ``question`` with a plain model call.

        ``emit`` is called with each event before the event takes effect, so that the caller can
        record it first.

        To resume an interrupted attempt, pass the replies that it has already received as
        ``recorded`` and their cost as ``spent``; the budget must already include that cost. A
        failed model never raises: the outcome holds the error.
        """
        call = _DirectCall(self, question, emit, recorded, spent or BudgetAmount())
        limits = self.setup.limits
        try:
            now_s = asyncio.get_running_loop().time()
            with self._pool.deadlines.timeout_at(now_s + limits.max_seconds):
                return await answer_without_session(
                    call.ask,
                    self.client.name,
                    self.first_request_messages(question),
                    question.kind,
                    self._truncation_error,
                )
        except TimeoutError:
            why = f"no answer within {limits.max_seconds:g} s: raise max_seconds"
            return CallOutcome(Stop.DEADLINE, error=why)

    async def send(self, request: Request, account: _DirectAccount) -> Reply:
        """Send one request, with retries, and return the reply.

        Its cost is reserved in ``account``, and then charged to it. Raises ModelError or
        LimitReached.
        """
        reply = await self._pool.ask(
            self.client, request, account, patience_s=self.setup.limits.retry_patience_s()
        )
        return prepare_reply_for_record(reply, self.setup.scaffold.stop, account.most())

    def first_request(self, question: Question) -> Request:
        """Return the first request for ``question`` without sending it.

        This is for callers that send it by other means, such as a batch API.
        """
        return self.build_request(
            tuple(self.first_request_messages(question)), _enforced_schema(question)
        )

    def can_afford(self, request: Request, price: Price | None) -> bool:
        """Return True if one question's limits allow ``request`` even at its maximum token
        usage."""
        most, limit = max_request_usage(request, price), self.limit
        fits = most.tokens <= limit.tokens and most.cost <= limit.cost * (1 + 1e-9)
        return fits and limit.calls >= 1

    def complete_usage_and_cost(self, reply: Reply, request: Request, price: Price | None) -> Reply:
        """Complete the usage and cost of a reply that ``send`` did not return, so that it can be
        recorded.

        Such a reply comes, for example, from a batch API. This adds the cost at ``price``, and
        assumes the maximum usage of the request if the server reported none.
        """
        reply = reply_with_cost(reply, request, self.client.window, price)
        cost = None if price is None else max_request_usage(request, price).cost
        return prepare_reply_for_record(
            reply, self.setup.scaffold.stop, (request.max_usage(), cost)
        )

    def build_request(
        self, messages: tuple[Message, ...], schema: dict[str, Any] | None
    ) -> Request:
        return Request(messages, self._sampling, schema, whole=self._whole)

    def _truncation_error(self, text: str) -> ReplyTruncatedError:
        setting = self._setting if text.strip() else "max_reasoning_tokens"
        return truncation_error(self.client.name, self._max_tokens, setting, text)


def max_request_usage(request: Request, price: Price | None) -> BudgetAmount:
    """Return the maximum usage and cost of one attempt to send ``request``."""
    return max_request_amount(request.max_input_tokens(), request.sampling.max_tokens, price)


def _enforced_schema(question: Question) -> dict[str, Any] | None:
    return question.kind.enforceable_schema if question.kind else None


class _DirectCall:
    """The conversation and the spending so far of one question that is being answered."""

    def __init__(
        self,
        calls: DirectModelCaller,
        question: Question,
        emit: Callable[[DirectEvent], None],
        recorded: Sequence[Reply],
        spent: BudgetAmount,
    ) -> None:
        self.calls = calls
        self.emit = emit
        self.spent = spent
        self.turn = -1
        self._schema = _enforced_schema(question)
        self._recorded = recorded
        self._messages: tuple[Message, ...] = ()

    async def ask(self, new: list[Message], reused: int | None) -> Reply:
        """Send the next request of this question and return the reply.

        If an interrupted attempt has already received that reply, the recorded one is returned
        instead.
        """
        self.turn += 1
        messages = (*self._messages, *new) if reused is None else tuple(new)
        if self.turn < len(self._recorded):
            reply = self._recorded[self.turn]
        else:
            request = self.calls.build_request(messages, self._schema)
            account = _DirectAccount(self, request, tuple(new))
            reply = await self.calls.send(request, account)
            self.emit(ModelReplyEvent(self.turn, reply))
        self._messages = (*messages, reply.message)
        if reply.finish == "content_filter":
            raise filtered_reply_error(self.calls.client.name, reply)
        return reply


class _DirectAccount:
    """Reserves the budget for one request, and records the attempts to send it.

    Implements ``RequestBudgetReservation``.
    """

    def __init__(self, call: _DirectCall, request: Request, new: tuple[Message, ...]) -> None:
        calls, tokens = call.calls, request.max_input_tokens()
        most = Usage(tokens, request.sampling.max_tokens, calls=1, unknown_calls=1)
        client = calls.client
        self._call = call
        self._new = new
        self._reservation = BudgetReservation(calls.budget, client.name, most, client.price)

    def most(self) -> tuple[Usage, float | None]:
        """Return the usage and the cost reserved for the request, which are upper bounds."""
        return self._reservation.usage, self._reservation.cost

    async def reserve(self) -> None:
        self._check_question()
        try:
            await self._reservation.reserve()
        except LimitReached as error:
            error.is_shared = True
            raise

    def _check_question(self) -> None:
        """Raise LimitReached if one more attempt could exceed the limits of this question."""
        limit, call, amount = self._call.calls.limit, self._call, self._reservation.amount
        if not call.spent.calls and amount.within(limit):
            return
        total = call.spent.plus(amount)
        for stop, used, most, unit in (
            (Stop.MAX_CALLS, total.calls, limit.calls, "{} calls"),
            (Stop.MAX_TOKENS, total.tokens, limit.tokens, "{} tokens"),
            (Stop.MAX_COST, total.cost, limit.cost, "${}"),
        ):
            if used > most * (1 + 1e-9):
                may, can = (
                    unit.format(
                        format_plain_number(each) if isinstance(each, float) else f"{each:,}"
                    )
                    for each in (used, most)
                )
                raise LimitReached(
                    f"the question may take {may}, but its limit is {can}: raise its {stop}",
                    stop,
                )

    def is_still_valid(self) -> bool:
        """Return True if the reservation still covers the attempt.

        If so, also emit the event that announces the request, because the request is sent right
        afterwards.
        """
        if not self._reservation.confirm_or_release():
            return False
        most, cost = self.most()
        try:
            self._call.emit(DirectRequestEvent(self._call.turn, self._new, most, cost))
        except BaseException:
            self._reservation.release()
            raise
        return True

    def settle(self, usage: Usage, cost: float | None) -> None:
        self._spend(usage, cost)
        self._reservation.settle(usage, cost, f"turn {self._call.turn}")

    def release(self, error: str) -> None:
        self._reservation.release()
        self._call.emit(DirectRequestFailedEvent(self._call.turn, error, Usage(), None))

    def charge_full_reservation(self, error: str) -> None:
        usage, cost = self.most()
        self._spend(usage, cost)
        self._reservation.settle(usage, cost, f"turn {self._call.turn}")
        self._call.emit(DirectRequestFailedEvent(self._call.turn, error, usage, cost))

    def _spend(self, usage: Usage, cost: float | None) -> None:
        amount = BudgetAmount(usage.calls, usage.total_tokens, cost or 0.0)
        self._call.spent = self._call.spent.plus(amount)
