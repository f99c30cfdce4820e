"""Handle the requests that a run's calls make to their models.

Each request is answered from an earlier recording or from the cache, or sent to the model.

    ask ──> recorded? ──> cached? ──> reserve ── announce ── send ── settle ──> reply
                                         └─ retried, rate limited: ``RateLimitedClientPool``

A call holds a slot of the rate limiter only while a request is in flight, never while it waits for
its children, so calls at any depth make progress. ``RequestStarted`` is recorded when a request is
first sent: one that still waits for a slot cannot have been billed, and the journal must not say
that it may have been. Limits and the budget ledger are defined in ``limits.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.clients.base import Client, KnownPrefix, ReplyPiece, Request, Sampling, Tool
from ramify.clients.providers import CLIENTS, is_scripted_model, is_self_hosted
from ramify.engine import observation_messages, retool_protocol
from ramify.engine.limits import (
    DEFAULT_MAX_COST,
    BudgetAmount,
    BudgetLedger,
    BudgetReservation,
    Limits,
)
from ramify.engine.live_reply_writer import join_pieces
from ramify.engine.reply_token_limits import ReplyTokenLimits
from ramify.engine.run_ending import RunStopper, closing_error
from ramify.errors import (
    ConfigError,
    LimitReached,
    ModelError,
    ReplyFiltered,
    ReplyTruncatedError,
    RequestRefusedError,
    is_fixable_by_user,
)
from ramify.format_quantities import format_plain_number
from ramify.logging import ComponentLogger
from ramify.progress import report_reply_text
from ramify.types.event import SENT_AGAIN, ReplyReceived, RequestAttemptFailed, RequestStarted
from ramify.types.message import Message, Reply, Usage, escape_message_surrogates, escape_surrogates
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.event_recorder import EventRecorder
    from ramify.engine.live_call import LiveCall
    from ramify.engine.reply_cache_lookup import ReusableReplies
    from ramify.engine.resources import ModelsByDepth, RlmSetup
    from ramify.store.live_replies import ArrivingReply
    from ramify.store.recorded_replies import RunEventIndex


_log = ComponentLogger("engine")
_LEAST_REPLY_TOKENS = 512
"""Minimum tokens of a reply in a session. A shorter one is of no use."""
_BYTES_PER_TOKEN = 4
"""Typical number of bytes of text per token."""


class ModelRequestSender:
    """Sends all model requests of a run.

    For each request, it reserves the budget, records the request, sends it, and records the reply.
    """

    def __init__(
        self,
        setup: RlmSetup,
        models: ModelsByDepth,
        recorder: EventRecorder,
        ending: RunStopper,
        under_way: set[TurnRequester],
        recording: RunEventIndex | None,
        cache: ReusableReplies | None,
        read_picture: Callable[[str], bytes] | None = None,
    ) -> None:
        """Prepare to send the model requests of one run.

        ``cache`` finds replies of earlier runs to equal requests. ``read_picture`` returns the
        bytes of one of the run's pictures, given its digest. ``under_way`` is a set shared with the
        caller: the requests that may have been sent and whose outcome is not recorded yet.
        """
        clients = models.all
        self.setup = setup
        self.models = models
        self.recorder = recorder
        self.ending = ending
        self.under_way = under_way
        self.recording = recording
        self.cache = cache
        self.read_picture = read_picture
        check_prices_known(setup.limits, clients)
        has_price = [client.price is not None for client in clients]
        self.ledger = BudgetLedger(setup.limits, priced=any(has_price), shared=setup.budget)
        self.lengths = ReplyTokenLimits(setup, models, self.ledger.limit)
        self.sampling = self.lengths.sampling
        if not all(has_price):
            self.ledger.cost = None  # until a model with a known price has replied
        self._last_word: BudgetReservation | None = None
        """Reservation for the root call's final request."""
        self._last_word_limit: int | None = None
        """Maximum tokens of the final reply for which budget is reserved; None if no budget is
        reserved for it."""
        self._has_excess = False
        """True once a reply used more than was reserved."""
        self._repeated: set[tuple[str, int]] = set()
        """(call id, turn) of each turn of a repeated run whose recorded failed attempts have
        already been recorded and charged again."""

    async def ask(
        self,
        call: LiveCall,
        new: Sequence[Message],
        *,
        reused: int | None = None,
        schema: dict[str, Any] | None = None,
        tools: tuple[Tool, ...] = (),
        last_word: Stop | None = None,
        longer: int = 1,
        known: KnownPrefix | None = None,
        asked: Sampling | None = None,
    ) -> Reply:
        """Take the next turn of ``call``: send a request, and return the model's reply.

        The prompt consists of the call's first ``reused`` messages (None: all) followed by ``new``.

        ``known`` holds the token ids of the first messages of the prompt, if more of them are known
        than the call itself has stored. ``asked`` is the sampling that an external agent asks for,
        of which ``max_tokens``, ``stop`` and ``top_logprobs`` are used.

        ``last_word`` names the limit at which this is the final request, whose cost was held back.
        ``longer`` multiplies the reply's maximum length. Raises ModelError if the model gave no
        reply or a filtered one, and LimitReached if the run may not ask any more. A failure that a
        person can fix suspends the run.
        """
        recording, ending = self.recording, self.ending
        reused = len(call.messages) if reused is None else reused
        limit = self.max_reply_tokens(call, longer)
        if last_word:
            limit = min(limit, self._last_word_tokens(call))
            if call.parent is None and self._last_word_limit is not None:
                limit = min(limit, self._last_word_limit)
        if asked is not None:
            limit = min(limit, asked.max_tokens)
        messages = tuple(map(escape_message_surrogates, new))
        if recording is not None and last_word is None:
            messages = recording.apply_message_edits(call.id, call.turn, messages)
        is_direct = call.kind == "lm" and call.parent is None
        if is_direct and recording is None:
            limit = self._affordable_reply_tokens(call, messages, limit)
        request = Request(
            (*call.messages[:reused], *messages),
            self._sampling(call, limit, asked),
            schema,
            tools,
            affinity=call.id,
            known=known or call.history.known_prefix_ids(reused),
            model=call.client.name,
            read_picture=self.read_picture,
            # The short reply of a leaf is not shown while it arrives, and a stream costs CPU time.
            whole=call.kind == "leaf" and not self.lengths.reasoning_token_allowance(call.client),
        )
        turn = TurnRequester(self, call, request, reused, last_word)
        found = self._find_reply(turn)
        if found is not None:
            turn.record_request_start()  # as in the recorded run
            reply, reused_ids = found
        else:
            self._check_open(turn)
            try:
                async with ending.deadline_scope() if last_word else ending.cancel_when_run_ends():
                    reply = await self.models.pool.ask(
                        call.client,
                        turn.request,
                        turn,
                        on_send=turn.record_request_start,
                        on_piece=turn.forward_reply_piece,
                        on_retry=lambda text: self.recorder.note(call.id, text),
                        patience_s=self.setup.limits.retry_patience_s(last_word),
                    )
            except ModelError as error:
                if is_fixable_by_user(error) and ending.closing is None:
                    await ending.suspend_and_wait(error)
                raise
            except LimitReached as error:
                if error.is_shared:
                    await ending.suspend_and_wait(error)
                raise
            if call.parent is None:
                ending.record_reply_time(reply.seconds)
            reply, reused_ids = self._complete_reply(turn, reply)
        turn.record_reply(reply, reused_ids, found is not None)
        self.remove_in_flight(turn)
        if reply.finish == "content_filter":
            raise filtered_reply_error(call.client.name, reply)
        return reply

    def _sampling(self, call: LiveCall, max_tokens: int, asked: Sampling | None) -> Sampling:
        """Return the sampling options for a reply of ``call`` with at most ``max_tokens`` tokens.

        Stop strings requested by an external agent are added to those of the run.
        """
        sampling = self.lengths.sampling_of(call.client)
        if asked is not None:
            stop = tuple(dict.fromkeys([*sampling.stop, *asked.stop]))
            top_logprobs = asked.top_logprobs
            sampling = msgspec.structs.replace(sampling, stop=stop, top_logprobs=top_logprobs)
        if max_tokens != sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        return sampling

    def partial_replies(self) -> list[ArrivingReply]:
        """Return the parts of unfinished replies that have arrived so far."""
        return [
            join_pieces(turn.call.id, turn.call.turn, turn.arrived)
            for turn in self.under_way
            if turn.arrived
        ]

    def remove_in_flight(self, turn: TurnRequester) -> None:
        """Remove a turn from the requests in flight, after the outcome of its request was recorded.

        If the run is being suspended and this was the last such request, the run ends.
        """
        self.under_way.discard(turn)
        self.ending.finish_suspension_if_idle()

    def note_overrun(self, call: LiveCall, text: str) -> None:
        """Record that a reply used more of the budget than was reserved for it.

        Only the first such record is a warning, because some models exceed every reservation.
        """
        is_first, self._has_excess = not self._has_excess, True
        prefix = "warning: " if is_first else ""
        note = f"{prefix}{text}; later requests to it reserve as much"
        self.recorder.note(call.id, note, is_warning=is_first)

    def max_reply_tokens(self, call: LiveCall, longer: int = 1) -> int:
        """Return the maximum number of tokens in a reply of ``call``, including hidden reasoning.

        ``longer`` multiplies the part without reasoning.
        """
        full = longer * self.visible_reply_token_limit(call)[
            0
        ] + self.lengths.reasoning_token_allowance(call.client)
        return full if call.shrunk is None else min(full, call.shrunk[0])

    def visible_reply_token_limit(self, call: LiveCall) -> tuple[int, str]:
        """Return the maximum number of tokens in a reply of ``call``, not counting hidden
        reasoning.

        The second value names the setting that determines this maximum.
        """
        is_plain = call.kind in ("lm", "leaf") and call.parent is not None
        return self.lengths.visible_reply_token_limit(call.client, call.depth, is_plain)

    def _last_word_tokens(self, call: LiveCall) -> int:
        most = self.setup.limits.last_word_tokens
        own = self.setup.options_at_depth(call.depth).max_reply_tokens or most
        return min(most, own) + self.lengths.reasoning_token_allowance(call.client)

    def reserve_final_request(
        self, call: LiveCall, new: Sequence[Message], longer: int = 1
    ) -> Stop | None:
        """Hold back budget for the root call's final request before the root's next turn.

        ``new`` holds the messages of that turn. Return the limit that both requests together would
        exceed, or None.

        The prompt of the final request will also contain the reply and the observation of the next
        turn. If the budget is small, that reply is shortened and the observation is left out of the
        final prompt.
        """
        before, call.shrunk = call.shrunk, None
        output = self.setup.scaffold.max_output_chars
        exceeded = self._hold_final_budget(call, new, self.max_reply_tokens(call, longer), output)
        if exceeded is not None and longer > 1:
            call.shrunk = before
        if exceeded not in (Stop.MAX_TOKENS, Stop.MAX_COST) or longer > 1:
            return exceeded
        refusal = self.ledger.refusals[exceeded]
        usual = self.max_reply_tokens(call)
        for tokens in _shorter_replies(usual):
            if self._hold_final_budget(call, new, tokens, 0) is None:
                call.shrunk = (tokens, str(exceeded)) if tokens < usual else None
                return None
        # Before the first turn, the error states the least amount, since even that is too much.
        if call.messages:
            self.ledger.refusals[exceeded] = refusal
        return exceeded

    def _hold_final_budget(
        self, call: LiveCall, new: Sequence[Message], reply_tokens: int, output_tokens: int
    ) -> Stop | None:
        """Hold back budget for the root's final request after a next turn of maximum size.

        ``reply_tokens`` and ``output_tokens`` are the maximum sizes of that turn's reply and of its
        code's output. Return the limit that either request would exceed, or None.
        """
        asked = Request(tuple(new), model=call.client.name)
        prompt = call.history.input_tokens_upper_bound(len(call.messages), asked)
        # The 1000 also cover the message that asks for the final answer.
        most = Usage(
            prompt + reply_tokens + output_tokens + 1000,
            min(self._last_word_tokens(call), reply_tokens),
        )
        before = self._last_word
        self._last_word = final = self._reservation(call, most)
        turn = self._reservation(call, Usage(prompt, reply_tokens))
        exceeded = self.ledger.reserve_final_answer(final.amount)
        if exceeded is None:
            self._last_word_limit = most.output_tokens
            exceeded = self.ledger.limit_exceeded_by(turn.amount)
        if exceeded is not None:
            self._last_word = before
            self.ledger.record_turn_refusal(exceeded, turn.amount, final.amount)
        return exceeded

    def _reservation(self, call: LiveCall, most: Usage) -> BudgetReservation:
        return BudgetReservation(self.ledger, call.client.name, most, call.client.price)

    def _affordable_reply_tokens(
        self, call: LiveCall, prompt: Sequence[Message], limit: int
    ) -> int:
        """Return how many reply tokens the budget allows for ``prompt``, up to ``limit``.

        If even a short reply is too expensive, return ``limit``, so that the request fails with the
        usual error. Raises RequestRefusedError if the prompt is also much longer than the window of
        the model.
        """
        asked = Request(tuple(prompt), self.sampling, model=call.client.name)
        given = asked.max_input_tokens()
        for tokens in _shorter_replies(limit):
            reservation = self._reservation(call, Usage(given, tokens))
            if (stop := self.ledger.limit_exceeded_by(reservation.amount)) is None:
                return tokens
            call.shrunk = (max(tokens // 2, _LEAST_REPLY_TOKENS), str(stop))
        call.shrunk = None
        tokens, window = given // _BYTES_PER_TOKEN, call.client.window
        if tokens > window:
            error = RequestRefusedError(
                f"{call.client.name}: one plain call has a prompt of about {tokens:,} tokens, and "
                f"the window of the model holds {window:,}: let a session read the text "
                "(--mode free, direct=False)"
            )
            error.too_long = True
            raise error
        return limit

    def increase_final_reserve(self) -> None:
        """Increase the budget held back for the root call's final answer.

        Called after a reply used more than was reserved for it, because the final answer may do the
        same.
        """
        if (
            self.ledger.held.calls
            and self._last_word is not None
            and self._last_word.update_for_overrun()
        ):
            self.ledger.reserve_final_answer(self._last_word.amount)

    def _find_reply(self, turn: TurnRequester) -> tuple[Reply, int] | None:
        """Return the recorded or cached reply to a turn's request, if there is one.

        The second value is the number of its prompt token ids that are already stored. Return None
        if there is no such reply. Raises the recorded error if the recorded run received an error
        instead.
        """
        call, recording = turn.call, self.recording
        if recording is not None:
            if turn.last_word is not None and recording.is_unanswered(call.id, call.turn):
                # The run is closing: a final request replaces the recorded one, which was cut off.
                # Its attempts first: once its request is dropped, none counts as in flight.
                self._repeat_attempts(recording, turn)
                recording.drop_request(call.id, call.turn)
            turn.use_recorded_prompt(recording)
            recording.check_prompt_matches(call.id, call.turn, turn.digest)
            self._repeat_attempts(recording, turn)
            reply = recording.reply(call.id, call.turn, turn.digest)
            if reply is not None and recording.is_fork:  # the forked run has paid for it
                return _without_cost(reply), recording.num_prefix_ids_reused(call.id, call.turn)
            if reply is not None:
                turn.charge_recorded_reply(reply)
                return reply, recording.num_prefix_ids_reused(call.id, call.turn)
            # A fork can have edited code, which takes the place of a reply.
            code = recording.given.get((call.id, call.turn))
            if code is not None:
                return call.history.strip_stored_prompt_ids(self.setup.scaffold.code_reply(code))
        # Branches send equal requests to get different replies, so they bypass the cache.
        if self.cache is not None and not call.is_branch:
            reply = self.cache.find(turn.digest, call.client.name, turn.request)
            if reply is not None:
                return call.history.strip_stored_prompt_ids(_without_cost(reply))
        return None

    def _repeat_attempts(self, recording: RunEventIndex, turn: TurnRequester) -> None:
        """Record and charge a turn's failed or interrupted attempts again when a run is repeated.

        The provider may have billed them. This happens once per turn, even if the turn has several
        prompts because the first did not fit the window.
        """
        place = turn.call.id, turn.call.turn
        if place in self._repeated:
            return
        self._repeated.add(place)
        for attempt in recording.failed_attempts(*place):
            self.recorder.emit(attempt)
            self.ledger.charge(attempt.usage, attempt.cost, is_recorded=True)
        if recording.is_in_flight(*place):
            turn.charge_in_flight()

    def _check_open(self, turn: TurnRequester) -> None:
        """Raise LimitReached for any request except a final one if the run is about to end.

        For the final request of the root call, release the budget that was held back.
        """
        if self.ending.closing is not None and not turn.last_word:
            raise closing_error(self.ending.closing)
        if turn.last_word and turn.call.parent is None:
            self.ledger.held = BudgetAmount()

    def _complete_reply(self, turn: TurnRequester, reply: Reply) -> tuple[Reply, int]:
        """Prepare a newly arrived reply for recording, and add it to the reply cache.

        Return the reply without the token ids that are already stored, and the number of those ids.
        """
        reply = prepare_reply_for_record(reply, self.setup.scaffold.stop, turn.max_usage_and_cost())
        if self.cache is not None:
            self.cache.add(turn.digest, turn.call.client.name, turn.request, reply)
        return turn.call.history.strip_stored_prompt_ids(reply)


class TurnRequester:
    """Manages the budget and the records of one turn's model request.

    It reserves budget for each attempt, and records the attempts and the reply.
    """

    def __init__(
        self,
        requests: ModelRequestSender,
        call: LiveCall,
        request: Request,
        reused: int,
        last_word: Stop | None,
    ) -> None:
        """Prepare the request for the next turn of ``call``.

        The first ``reused`` messages of its prompt are already part of the conversation.
        ``last_word`` is the reason if this is the final request of the call.
        """
        self.call = call
        self.last_word = last_word
        self.request = request
        self._new = new = request.messages[reused:]
        model, schema, tools = request.model, request.schema, request.tools
        recording = requests.recording
        # A run that is continued with another model keeps the hashes of its calls.
        recorded = recording.model_of(call.id) if recording is not None else None
        self.digest = request_hash(recorded or model, self.request)
        self._requests = requests
        self._reused = reused
        most = Usage(
            call.history.input_tokens_upper_bound(
                reused, Request(new, schema=schema, tools=tools, model=model)
            ),
            request.sampling.max_tokens,
            # Recorded as it is for an attempt whose usage is unknown.
            calls=1,
            unknown_calls=1,
        )
        self._reservation = BudgetReservation(requests.ledger, model, most, call.client.price)
        self.arrived: list[ReplyPiece] = []
        """The part of the reply that has arrived in the attempt in progress."""
        self._excess = ""
        """A warning if the reply used more than was reserved, or an empty string."""

    def use_recorded_prompt(self, recording: RunEventIndex) -> None:
        """Use the recorded prompt if the new prompt differs from it only in the limits mentioned.

        If these limits have changed, system messages are not compared, because the rest of their
        text depends only on settings that were already compared.
        """
        recorded = recording.request(self.call.id, self.call.turn)
        if recorded is None or self._reused != recorded.reused:
            return
        here, there = (
            [
                observation_messages.strip_limit_text(message)
                for message in prompt
                if message.role != "system" or not recording.has_other_limits
            ]
            for prompt in (self._new, recorded.prompt)
        )
        if here == there:
            self._new, self.digest = recorded.prompt, recorded.prompt_hash

    def record_request_start(self) -> None:
        call, recorder = self.call, self._requests.recorder
        recording = self._requests.recording
        if recording is not None:  # a concurrent call may have diverged meanwhile
            recording.check_prompt_matches(call.id, call.turn, self.digest)
        recorder.emit(
            RequestStarted(
                at_s=recorder.elapsed_s(),
                call=call.id,
                turn=call.turn,
                reused=self._reused,
                prompt=self._new,
                prompt_hash=self.digest,
                last_word=self.last_word,
            )
        )

    def record_reply(self, reply: Reply, reused_ids: int, is_cached: bool) -> None:
        """Record ``reply`` as the model's reply in this turn, and finish the turn.

        ``reused_ids`` is the number of token ids at the start of the prompt that are already stored
        with earlier turns.
        """
        call, recorder = self.call, self._requests.recorder
        recorder.emit(
            ReplyReceived(
                at_s=recorder.elapsed_s(),
                call=call.id,
                turn=call.turn,
                reply=reply,
                cached=is_cached,
                reused_ids=reused_ids,
            )
        )
        if self._excess:
            self._requests.note_overrun(call, self._excess)
        call.finish_turn(self._reused, self._new, reply, reused_ids)

    def forward_reply_piece(self, piece: ReplyPiece) -> None:
        """Pass a newly arrived piece of the reply to live listeners.

        The reply is recorded only once it is complete or the attempt has failed.
        """
        if piece.text or piece.reasoning:
            run, call = self._requests.recorder.id, self.call
            is_first = not self.arrived
            self.arrived.append(piece)
            report_reply_text(run, call.id, self.call.turn, piece.text, piece.reasoning, is_first)

    # --- the ``RequestBudgetReservation`` of each attempt
    # ----------------------------------------------------

    async def reserve(self) -> None:
        self.arrived.clear()
        await self._reservation.reserve()
        ending = self._requests.ending
        if ending.suspension is not None:
            self._reservation.release()
            await ending.suspend_and_wait(ending.suspension)
        self._requests.under_way.add(self)

    def is_still_valid(self) -> bool:
        is_enough = self._reservation.confirm_or_release()
        if not is_enough:
            self._requests.remove_in_flight(self)
        return is_enough

    def settle(self, usage: Usage, cost: float | None) -> None:
        self._excess = self._reservation.settle(usage, cost, self._name)
        if self._excess:
            self._requests.increase_final_reserve()

    def release(self, error: str) -> None:
        self._reservation.release()
        self._record_failed_attempt(error, Usage(), None)

    def charge_full_reservation(self, error: str) -> None:
        usage, cost = self.max_usage_and_cost()
        self._reservation.settle(usage, cost, self._name)
        self._record_failed_attempt(error, usage, cost)

    def charge_recorded_reply(self, reply: Reply) -> None:
        """Charge the budget for a reply that was recorded before the run was interrupted."""
        ledger, usage = self._requests.ledger, reply.usage
        if not usage.unknown_calls and ledger.is_over_reservation(
            self._reservation.amount, usage, reply.cost
        ):
            self._reservation.record_excess(usage, reply.cost, self._name)
        ledger.charge(usage, reply.cost, is_recorded=True)

    def charge_in_flight(self) -> None:
        """Charge the maximum cost of a recorded attempt that was in flight when the run was
        interrupted.

        The provider may have billed it.
        """
        usage, cost = self.max_usage_and_cost()
        self._requests.ledger.charge(usage, cost)
        self._record_failed_attempt(SENT_AGAIN, usage, cost)

    def max_usage_and_cost(self) -> tuple[Usage, float | None]:
        """Return the maximum usage and cost of the request, which are reserved in the budget."""
        return self._reservation.usage, self._reservation.cost

    @property
    def _name(self) -> str:
        return f"call {self.call.id}, turn {self.call.turn}"

    def _record_failed_attempt(self, error: str, usage: Usage, cost: float | None) -> None:
        recorder = self._requests.recorder
        recorder.emit(
            RequestAttemptFailed(
                at_s=recorder.elapsed_s(),
                call=self.call.id,
                turn=self.call.turn,
                error=error,
                usage=usage,
                cost=cost,
                text=escape_surrogates("".join(piece.text for piece in self.arrived)),
            )
        )
        self._requests.remove_in_flight(self)


def _shorter_replies(longest: int) -> Iterator[int]:
    """Yield token limits for a reply on a small budget, halving ``longest`` until 512 is reached.

    A reply of fewer tokens is of no use, so ``longest`` is the only limit if it is smaller.
    """
    tokens, least = longest, min(longest, _LEAST_REPLY_TOKENS)
    while tokens > least:
        yield tokens
        tokens //= 2
    yield least


def _without_cost(reply: Reply) -> Reply:
    """Return a copy of ``reply`` without usage and cost.

    A reused reply is not paid for again.
    """
    cost = None if reply.cost is None else 0.0
    return msgspec.structs.replace(reply, usage=Usage(), cost=cost)


def request_hash(model: str, request: Request) -> str:
    """Return a hash of everything that determines the reply to a request.

    This is the model, prompt, sampling options, schema and tools.
    """
    import hashlib

    parts = (model, request.messages, request.sampling, request.schema, request.tools)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def truncated_reply_error(
    requests: ModelRequestSender, call: LiveCall, text: str
) -> ReplyTruncatedError:
    """Create the error for a reply of ``call`` that was truncated at its token limit.

    ``text`` is the part that arrived.
    """
    limit, (for_text, name) = (
        requests.max_reply_tokens(call),
        requests.visible_reply_token_limit(call),
    )
    if not text.strip() and limit > for_text:
        name = "max_reasoning_tokens"
    if call.shrunk is not None:
        name = call.shrunk[1]
    return truncation_error(call.client.name, limit, name, text)


def truncation_error(model: str, limit: int, setting: str, text: str) -> ReplyTruncatedError:
    """Create the error for a reply of ``model`` that was truncated at ``limit`` tokens.

    ``setting`` names the option that raises this limit, and ``text`` is the part that arrived.
    """
    return ReplyTruncatedError(
        f"{model}: the reply was cut at its limit of {limit} tokens; ask for less, or raise "
        f"{setting}",
        text,
    )


def prepare_reply_for_record(
    reply: Reply, stop: tuple[str, ...], most: tuple[Usage, float | None]
) -> Reply:
    """Repair a reply's text and complete its usage, so that the reply can be recorded.

    Replace characters that cannot be encoded, and restore a closing tag that the server removed as
    a stop string. If the server reported no usage, use the upper bounds in ``most``.
    """
    message = escape_message_surrogates(reply.message)
    if stop and reply.finish == "stop" and not message.tool_calls:
        message = msgspec.structs.replace(
            message, content=retool_protocol.restore_closing_tag(message.content, stop)
        )
    usage, cost = most if reply.usage.unknown_calls else (reply.usage, reply.cost)
    return msgspec.structs.replace(reply, message=message, usage=usage, cost=cost)


def filtered_reply_error(model: str, reply: Reply) -> ReplyFiltered:
    """Return the error for a reply that a content filter stopped or the model refused to give."""
    text, stopped_by = reply.message.content, reply.filter or "content_filter"
    if stopped_by == "refusal":
        quote = f": {text[:200]!r}" if text else ""
        refusal = ReplyFiltered(
            f"{model}: the model refused to answer (refusal){quote}; ask in another way", text
        )
        refusal.is_refusal = True
        return refusal
    return ReplyFiltered(
        f"{model}: a content filter stopped the reply ({stopped_by}); ask in another way, or ask "
        "another model",
        text,
    )


def check_prices_known(limits: Limits, clients: Sequence[Client]) -> None:
    """Raise ConfigError if a cost limit is set but some model has no known price.

    The limit could not be enforced. If only the default limit would apply, log a warning instead.
    """
    unpriced = [client.name for client in clients if client.price is None]
    if limits.max_cost is None:
        for name in unpriced:
            _warn_that_cost_is_unlimited(name)
    if limits.max_cost is not None and math.isfinite(limits.max_cost) and unpriced:
        raise ConfigError(
            f"a limit of ${format_plain_number(limits.max_cost, 6)} cannot be enforced: "
            f"{', '.join(unpriced)} "
            "has no known price; add it to a price file (RAMIFY_PRICES) or omit max_cost"
        )


@functools.lru_cache(maxsize=1024)  # one warning for each model in a process
def _warn_that_cost_is_unlimited(name: str) -> None:
    if name.partition(":")[0] in CLIENTS and not (is_self_hosted(name) or is_scripted_model(name)):
        _log.warning(
            "no_price",
            f"{name} has no known price, so the default limit of "
            f"${format_plain_number(DEFAULT_MAX_COST, 6)} does not apply to it: correct its name, "
            "add its price to a price file (RAMIFY_PRICES), or limit its tokens",
            model=name,
            shown=True,
        )
