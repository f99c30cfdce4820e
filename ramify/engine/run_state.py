"""State that all calls of one question share, and their only way to a model.

    RLM.start ──> RunHandle ──> RlmLoop (root) ──> RunState.ask ──> recording? cache? ──> ClientPool
                                    │                  ^
                                    └── CellHost ──────┘   llm_query: ask   rlm_query: child RlmLoop

A call holds a slot of the limiter only while a request is in flight, never while it waits for its
children, so any depth makes progress. ``close_in`` ends work early, at the deadline or on the
user's request: requests in flight are cancelled and charged as possibly billed, running cells are
interrupted, and only final requests ("last words") are still sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Client, Request, Tool
from ramify.engine import observe
from ramify.engine.action import CODE_TOOL, FINAL_TOOL
from ramify.engine.call import CallOutcome, LiveCall, context_ref, jsonable
from ramify.engine.limits import Ledger, Limits, ResourceAmount, bound
from ramify.engine.models import RunModels
from ramify.engine.recorder import EventRecorder
from ramify.engine.resources import LoopResources
from ramify.engine.retool import closed
from ramify.engine.setup import RlmSetup
from ramify.engine.tool_set import ToolSet
from ramify.errors import ConfigError, LimitReached, ReplyCut, ReplyFiltered
from ramify.sandbox.base import Session
from ramify.sandbox.context import SharedContext
from ramify.types.event import (
    AttemptFailed,
    CallEnded,
    CallStarted,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    ToolAnswered,
)
from ramify.types.message import Message, Reply, Usage, sendable
from ramify.types.trajectory import Cell, Fork, Stop

_CUT = "cut by close_in"
NATIVE_TOOLS = (
    Tool(
        CODE_TOOL,
        "Run Python in the live session and see its output.",
        {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    ),
    Tool(
        FINAL_TOOL,
        "Give the final answer.",
        {"type": "object", "properties": {"answer": {}}, "required": ["answer"]},
    ),
)


class ReplySource(Protocol):
    """Source of replies that need no model: a recorded run (see ``store.recorded_replies``)."""

    def check(self, call: str, turn: int, prompt_hash: str) -> None: ...

    def reply(self, call: str, turn: int, prompt_hash: str) -> Reply | None: ...

    def reused_ids(self, call: str, turn: int) -> int: ...

    def attempts_at(self, call: str, turn: int) -> Sequence[AttemptFailed]: ...

    def in_flight(self, call: str, turn: int) -> bool: ...

    def last_word(self, call: str, turn: int) -> Stop | None: ...

    def cell(self, call: str, turn: int, cell: int) -> Cell | None: ...

    def was_skipped(self, call: str, turn: int, cell: int) -> bool: ...

    def tool(
        self, call: str, turn: int, cell: int, ordinal: int, arguments_hash: str
    ) -> ToolAnswered | None: ...


class ReplyCache(Protocol):
    """Replies by the hash of their request, across all runs."""

    def get(self, prompt_hash: str) -> Reply | None: ...

    def put(self, prompt_hash: str, reply: Reply) -> None: ...


class RunState:
    """State that the calls of one question share. Lives on one event loop."""

    def __init__(
        self,
        setup: RlmSetup,
        resources: LoopResources,
        models: RunModels,
        recorder: EventRecorder,
        *,
        tools: tuple[ToolSet, ToolSet],
        recording: ReplySource | None = None,
        cache: ReplyCache | None = None,
        on_session: Callable[[Session], Awaitable[None]] | None = None,
    ) -> None:
        """``tools`` are those of the root and of the children. ``on_session`` prepares each new
        session."""
        self.limits = limits = setup.limits
        self.scaffold = setup.scaffold
        self.blobs = setup.blobs
        self.cell_s = setup.sandbox.cell_s
        self.max_output_bytes = setup.sandbox.max_output_bytes
        self.models = models
        self.recorder = recorder
        self.recording = recording
        self.cache = cache
        self.on_session = on_session
        self._resources = resources
        self._tools = tools
        self.sampling = msgspec.structs.replace(
            setup.sampling,
            max_tokens=min(setup.sampling.max_tokens, limits.max_reply_tokens),
            stop=tuple(dict.fromkeys([*setup.sampling.stop, *self.scaffold.stop])),
        )
        _check_prices(limits, models)
        priced = [client.price is not None for client in models.all]
        self.ledger = Ledger(limits, priced=any(priced))
        if not all(priced):
            self.ledger.cost = None  # until a model with a known price has replied
        self.closing: Stop | None = None
        self._in_flight: set[asyncio.Task[Any]] = set()
        """Tasks that wait for a model, except those of final requests."""
        self._sessions: set[Session] = set()
        self._repeated: set[tuple[str, int]] = set()
        """(call, turn) of the recorded attempts that were repeated."""
        self._descriptions: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + limits.max_seconds
        self._alarm = self._loop.call_at(
            self._deadline - limits.last_word_s, self.close_in, Stop.DEADLINE
        )

    # --- ending early -----------------------------------------------------------------------------

    def close_in(self, stop: Stop) -> None:
        """End all work now, leaving the root time for its final answer."""
        if self.closing is not None:
            return
        self.closing = stop
        for task in self._in_flight:
            task.cancel(_CUT)
        for session in self._sessions:
            session.interrupt(str(stop))

    def finish(self) -> None:
        """Release the event-loop resources of the finished run."""
        self._alarm.cancel()

    # --- calls ------------------------------------------------------------------------------------

    def begin(self, call: LiveCall, fork: Fork | None = None) -> None:
        ref = context_ref(call.context)
        self.recorder.emit(
            CallStarted(
                at_s=self.recorder.now(),
                id=call.id,
                kind=call.kind,
                model=call.client.name,
                depth=call.depth,
                question=call.question,
                parent=call.parent,
                fork=fork,
                context=ref,
            )
        )

    def end(self, call: LiveCall, outcome: CallOutcome) -> None:
        self.recorder.emit(
            CallEnded(
                at_s=self.recorder.now(),
                id=call.id,
                stop=outcome.stop,
                answer=jsonable(outcome.answer),
                error=outcome.error,
            )
        )

    def note(self, call: LiveCall, text: str) -> None:
        self.recorder.emit(NoteAdded(at_s=self.recorder.now(), call=call.id, text=text))

    def description(self, context: SharedContext | None) -> str:
        """Return the description of ``context`` for a model, computed once, because children share
        large contexts."""
        if context is None:
            return observe.describe("")
        if context.digest not in self._descriptions:
            self._descriptions[context.digest] = observe.describe(context.value)
        return self._descriptions[context.digest]

    def first_message(self, call: LiveCall, about: str = "", *, is_next: bool = False) -> str:
        """Return the first message of ``call``. ``is_next`` means that it follows another question
        of a conversation."""
        if is_next and not self.scaffold.first:
            return f"The next question: {call.question}"
        value = "" if call.context is None else call.context.value
        description = "" if self.scaffold.first else self.description(call.context)
        return self.scaffold.first_message(call.question, value, description, about)

    async def keep_context(self, context: SharedContext) -> None:
        """Store a child's context with the run, before it is used."""
        if self.blobs is None:
            return
        if context.nbytes > 1 << 20:
            await asyncio.to_thread(self.blobs.put, context.buffer(), context.digest)
        else:
            self.blobs.put(context.buffer(), context.digest)

    def tools_at(self, depth: int) -> ToolSet:
        return self._tools[min(depth, 1)]

    async def open_session(self, call: LiveCall) -> Session:
        """Open a new session over the context of ``call``."""
        return await self._resources.sandbox().open(context=call.context, seed=call.id)

    def keep(self, session: Session) -> None:
        """Register ``session`` to be interrupted when the run closes."""
        self._sessions.add(session)

    def drop(self, session: Session) -> None:
        self._sessions.discard(session)

    def must_stop(self, call: LiveCall) -> Stop | None:
        """Return why ``call`` may not take another turn, or None. A repeated run stops where the
        recorded one stopped."""
        if self.recording is not None:
            recorded = self.recording.last_word(call.id, call.turn)
            if recorded is not None:
                return recorded
        num_turns = call.num_turns_before + call.turn
        return self.closing or (Stop.MAX_TURNS if num_turns >= self.limits.max_turns else None)

    def was_skipped(self, call: LiveCall, turn: int, cell: int) -> bool:
        """True if the run is repeated and the recorded run was closing at this point, so the cell
        was skipped."""
        return self.recording is not None and self.recording.was_skipped(call.id, turn, cell)

    # --- requests ---------------------------------------------------------------------------------

    async def ask(
        self,
        call: LiveCall,
        new: Sequence[Message],
        *,
        reused: int | None = None,
        schema: dict[str, Any] | None = None,
        tools: tuple[Tool, ...] = (),
        last_word: Stop | None = None,
    ) -> Reply:
        """Take the next turn of ``call``, whose prompt is its first ``reused`` messages (default:
        all) followed by ``new``.

        ``last_word`` names the limit at which this is the final request, whose cost was held back.
        Raises ModelError if the model gave no reply or a filtered one, and LimitReached if the run
        may not ask any more.
        """
        reused = len(call.messages) if reused is None else reused
        new = tuple(map(sendable, new))
        prompt = (*call.messages[:reused], *new)
        sampling = self.sampling
        if last_word:
            sampling = msgspec.structs.replace(
                sampling, max_tokens=min(sampling.max_tokens, self.limits.last_word_tokens)
            )
        request = Request(
            prompt, sampling, schema, tools, affinity=call.id, known=call.known_ids(reused)
        )
        digest = prompt_hash(call.client.name, request)

        def about_to_send() -> None:
            if self.recording is not None:  # a concurrent call may have diverged meanwhile
                self.recording.check(call.id, call.turn, digest)
            self.recorder.emit(
                RequestStarted(
                    at_s=self.recorder.now(),
                    call=call.id,
                    turn=call.turn,
                    reused=reused,
                    prompt=new,
                    prompt_hash=digest,
                    last_word=last_word,
                )
            )

        account = _CallBudget(
            self, call, call.max_input_tokens(request, reused), sampling.max_tokens
        )
        recorded = self._recorded(call, digest, account)
        if recorded is not None:
            about_to_send()  # as in the recorded run
            reply, reused_ids = recorded
        else:
            client = _AnnouncingClient(call.client, about_to_send)
            full_reply = await self._ask_live(call, client, request, account, last_word is not None)
            if self.cache is not None:
                self.cache.put(digest, full_reply)
            reply, reused_ids = call.without_path(full_reply)
        self.recorder.emit(
            ReplyReceived(
                at_s=self.recorder.now(),
                call=call.id,
                turn=call.turn,
                reply=reply,
                cached=recorded is not None,
                reused_ids=reused_ids,
            )
        )
        call.advance(reused, new, reply, reused_ids)
        if reply.finish == "content_filter":
            raise _filtered(call.client.name, reply)
        return reply

    def _recorded(
        self, call: LiveCall, digest: str, account: _CallBudget
    ) -> tuple[Reply, int] | None:
        """Return (reply, number of reused ids) from the recorded run or from the cache, or None.
        Raises the error that the recorded run met instead of a reply."""
        if self.recording is not None:
            self.recording.check(call.id, call.turn, digest)
            self._repeat_attempts(self.recording, call, account)
            reply = self.recording.reply(call.id, call.turn, digest)
            if reply is not None:
                self.ledger.charge(reply.usage, reply.cost)
                return reply, self.recording.reused_ids(call.id, call.turn)
        # Branches send equal requests to get different replies, so they bypass the cache.
        if self.cache is not None and not call.is_branch:
            reply = self.cache.get(digest)
            if reply is not None:
                free = msgspec.structs.replace(
                    reply, usage=Usage(), cost=None if reply.cost is None else 0.0
                )
                return call.without_path(free)
        return None

    def _repeat_attempts(
        self, recording: ReplySource, call: LiveCall, account: _CallBudget
    ) -> None:
        """Repeat the recorded attempts of this turn that failed or were in flight, because they may
        have been billed.

        This happens once per turn, even if the turn has several prompts because the first did not
        fit the window.
        """
        if (call.id, call.turn) in self._repeated:
            return
        self._repeated.add((call.id, call.turn))
        for attempt in recording.attempts_at(call.id, call.turn):
            self.recorder.emit(attempt)
            self.ledger.charge(attempt.usage, attempt.cost)
        if recording.in_flight(call.id, call.turn):
            account.charge_unknown("in flight when the run was cut off; sent again")

    async def _ask_live(
        self,
        call: LiveCall,
        client: _AnnouncingClient,
        request: Request,
        account: _CallBudget,
        last_word: bool,
    ) -> Reply:
        if self.closing is not None and not last_word:
            raise _closed(self.closing)
        if last_word and call.parent is None:
            self.ledger.held = ResourceAmount()
        work = self._resources.pool.ask(
            client, request, account, lambda text: self.note(call, text), self.limits.patience_s
        )
        reply = await (self._until_deadline(work) if last_word else self._until_closing(work))
        message = sendable(reply.message)
        if self.scaffold.stop and reply.finish == "stop" and not message.tool_calls:
            message = msgspec.structs.replace(
                message, content=closed(message.content, self.scaffold.stop)
            )
        reply = msgspec.structs.replace(reply, message=message)
        # Use the reserved upper bound everywhere if the server reported no usage.
        if reply.usage.unknown_calls:
            usage, cost = account.most()
            reply = msgspec.structs.replace(reply, usage=usage, cost=cost)
        return reply

    async def _until_deadline(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        try:
            async with asyncio.timeout_at(self._deadline) as scope:
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            raise _closed(Stop.DEADLINE) from None

    async def _until_closing(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Wait for ``work``, which ``close_in`` cancels. It sets no timer, because there may be
        thousands of these waits."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        self._in_flight.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self.closing is not None and task.uncancel() <= cancels:
                raise _closed(self.closing) from None
            raise
        finally:
            self._in_flight.discard(task)

    def hold_last_word(self, call: LiveCall, new: Sequence[Message]) -> Stop | None:
        """Reserve the cost of the root's final request after the turn that asks ``new``. Returns
        the limit that this exceeds, if any.

        The final prompt will also contain this turn's reply and its observation.
        """
        request = Request((*call.messages, *new), self.sampling)
        later = self.sampling.max_tokens + self.scaffold.max_output_chars + 1000
        tokens = call.max_input_tokens(request, len(call.messages)) + later
        return self.ledger.hold(bound(tokens, self.limits.last_word_tokens, call.client.price))


class _AnnouncingClient:
    """Client of one request that announces when it is about to send it for the first time. A
    request that still waits for a slot cannot have been billed, and the journal must not say that
    it may have been."""

    def __init__(self, client: Client, about_to_send: Callable[[], None]) -> None:
        self.name = client.name
        self.window = client.window
        self.price = client.price
        self._client = client
        self._about_to_send: Callable[[], None] | None = about_to_send

    async def complete(self, request: Request) -> Reply:
        if self._about_to_send is not None:
            self._about_to_send()
            self._about_to_send = None
        return await self._client.complete(request)

    async def close(self) -> None:
        """Do nothing: the pool closes the client."""


class _CallBudget:
    """Reserves the budget of one request of ``call`` and records the outcome of each attempt."""

    def __init__(
        self, run: RunState, call: LiveCall, max_input_tokens: int, max_output_tokens: int
    ) -> None:
        self._run = run
        self._call = call
        self._usage = Usage(max_input_tokens, max_output_tokens, calls=1, unknown_calls=1)
        self._amount = bound(max_input_tokens, max_output_tokens, call.client.price)

    async def reserve(self) -> None:
        await self._run.ledger.reserve(self._amount)

    def settle(self, usage: Usage, cost: float | None) -> None:
        if usage.unknown_calls:
            usage, cost = self.most()
        self._run.ledger.settle(self._amount, usage, cost)

    def release(self, error: str) -> None:
        self._run.ledger.free(self._amount)
        self._attempted(error, Usage(), None)

    def forfeit(self, error: str) -> None:
        usage, cost = self.most()
        self._run.ledger.settle(self._amount, usage, cost)
        self._attempted(error, usage, cost)

    def charge_unknown(self, error: str) -> None:
        """Charge the upper bound of an attempt that was not reserved here and may have been
        billed."""
        usage, cost = self.most()
        self._run.ledger.charge(usage, cost)
        self._attempted(error, usage, cost)

    def most(self) -> tuple[Usage, float | None]:
        """Return everything that was reserved, as an upper bound."""
        return self._usage, self._amount.cost if self._call.client.price is not None else None

    def _attempted(self, error: str, usage: Usage, cost: float | None) -> None:
        run, call = self._run, self._call
        run.recorder.emit(
            AttemptFailed(
                at_s=run.recorder.now(),
                call=call.id,
                turn=call.turn,
                error=error,
                usage=usage,
                cost=cost,
            )
        )


def prompt_hash(model: str, request: Request) -> str:
    """Hash of model, prompt, sampling, schema and tools. Requests with the same hash are the
    same."""
    parts = (model, request.messages, request.sampling, request.schema, request.tools)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def cut_reply(call: LiveCall, limit: int, text: str) -> ReplyCut:
    """Return the error for a reply of ``call`` that was truncated at its token limit after
    ``text``."""
    return ReplyCut(
        f"{call.client.name}: the reply was cut at its limit of {limit} tokens; ask for less, or "
        "raise max_reply_tokens",
        text,
    )


def _filtered(model: str, reply: Reply) -> ReplyFiltered:
    text, stopped_by = reply.message.content, reply.filter or "content_filter"
    if stopped_by == "refusal":
        quote = f": {text[:200]!r}" if text else ""
        return ReplyFiltered(
            f"{model}: the model refused to answer (refusal){quote}; ask in another way", text
        )
    return ReplyFiltered(
        f"{model}: a content filter stopped the reply ({stopped_by}); ask in another way, or ask "
        "another model",
        text,
    )


def _closed(stop: Stop) -> LimitReached:
    why = {Stop.DEADLINE: "the run's time is up", Stop.CANCELLED: "the run was asked to finish"}
    return LimitReached(why.get(stop, f"the run is closing ({stop})"), stop)


def _check_prices(limits: Limits, models: RunModels) -> None:
    """Raise ConfigError for a cost limit that cannot be enforced."""
    unpriced = [client.name for client in models.all if client.price is None]
    if limits.max_cost is not None and math.isfinite(limits.max_cost) and unpriced:
        raise ConfigError(
            f"a limit of ${limits.max_cost:g} cannot be enforced: {', '.join(unpriced)} has no "
            "known price; add it to a price file (RAMIFY_PRICES) or omit max_cost"
        )
