"""State of one question: what all its calls share, and each call in progress.

    RLM.start ──> RunHandle ──> RlmLoop (root) ──> ModelRequests.ask ──> recorded? ──> ClientPool
                                    │                    ^
                                    └── CellHost ────────┘  llm_query: ask  rlm_query: child RlmLoop

``RunState.suspend`` ends a run that a person must help: nothing more is sent, the replies on their
way are recorded, and then the run's task is cancelled.

``RunState.close_in`` ends work early, at the deadline or on the user's request: requests in flight
are cancelled and charged as possibly billed, running cells are interrupted, and only final requests
("last words") are still sent. Not here: requests and their budget (see ``model_requests.py``), and
the record of events (see ``event_recorder.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ramify.clients.base import Client, KnownPrefix, Request, max_tokens_of
from ramify.engine.arriving_replies import ArrivingReplies
from ramify.engine.event_recorder import CallOutcome, EventRecorder, context_ref, jsonable
from ramify.engine.model_requests import ModelRequests, closed
from ramify.engine.prompt_facts import facts_of
from ramify.engine.prompt_text import ContextFacts, context_facts
from ramify.engine.question import Question
from ramify.engine.resources import LoopResources, RlmSetup, RunModels
from ramify.engine.threads import waiting_at
from ramify.errors import LoopBlocked, RamifyError, ReplyCut
from ramify.logging import RoomLogger
from ramify.sandbox.base import Session
from ramify.types.event import CallEnded, CallStarted, NoteAdded, ReplyReceived, RunResumed
from ramify.types.message import Message, Reply, encodable
from ramify.types.trajectory import CallKind, Fork, Parent, Stop

if TYPE_CHECKING:
    from ramify.engine.reply_reuse import ReusableReplies
    from ramify.engine.scaffold import Scaffold
    from ramify.engine.tool_set import ToolSet
    from ramify.sandbox.base import SharedContext
    from ramify.store.recorded_replies import RecordedReplies

_log = RoomLogger("engine")
_CUT = "cut by close_in"
_SUSPENDED = "suspended"
_LEAST_LAST_WORD_S = 5.0
"""Seconds that are kept for the final reply of a model that answers at once."""
_REPLIES_KEPT = 2.0
"""How many times the slowest reply so far is kept for the final one."""
_LIMITS = (Stop.MAX_TURNS, Stop.MAX_CALLS, Stop.MAX_TOKENS, Stop.MAX_COST, Stop.DEADLINE)


class RunState:
    """State that the calls of one question share. Lives on one event loop."""

    def __init__(
        self,
        setup: RlmSetup,
        resources: LoopResources,
        models: RunModels,
        recorder: EventRecorder,
        question: Question,
        *,
        recording: RecordedReplies | None = None,
        cache: ReusableReplies | None = None,
    ) -> None:
        self.setup = setup
        self.models = models
        self.recorder = recorder
        self.recording = recording
        self.prepare_session = question.on_session
        """Prepares each new session, if the question has such a function."""
        self.requests = ModelRequests(self, resources.pool, cache)
        self.closing: Stop | None = None
        """Why the run is ending early, if it is."""
        self.suspension: RamifyError | None = None
        """Why the run is being suspended, if it is."""
        self._has_excess = False
        """Whether a reply used more than was reserved."""
        self._main = asyncio.current_task()
        recorder.on_trouble = self.suspend
        self._resources = resources
        num = max(2, len(setup.depths))
        self._tools = [setup.tools_at(depth, question.tools) for depth in range(num)]
        """Tools by depth; the last ones also serve all deeper sessions."""
        self._in_flight: set[asyncio.Task[Any]] = set()
        """Tasks that wait for a model, except those of final requests."""
        self._sessions: set[Session] = set()
        self._contexts: dict[tuple[str, bool], ContextFacts] = {}
        self._system_prompts: dict[tuple[int, ContextFacts], str] = {}
        loop, limits = asyncio.get_running_loop(), setup.limits
        self._loop = loop
        self._deadline = loop.time() + limits.max_seconds
        self._last_word_s = limits.last_word_s
        self._slowest_s = 0.0
        """Longest time that a reply of the root's model took."""
        self._alarm = loop.call_at(self._deadline - self._last_word_s, self.close_in, Stop.DEADLINE)
        live_text = recorder.live_text()
        self._arriving = ArrivingReplies(self.requests.arriving, live_text) if live_text else None

    @property
    def cell_s(self) -> float:
        return self.setup.sandbox.cell_s

    @property
    def scaffold(self) -> Scaffold:
        return self.setup.scaffold

    def measure_reply(self, call: LiveCall, seconds: float) -> None:
        """Reserve as much time for the root's final reply as its model has needed. Before the first
        reply, a tenth of the run's time is reserved."""
        if call.parent is not None or seconds <= self._slowest_s:
            return
        self._slowest_s = seconds
        limits = self.setup.limits
        least = min(limits.last_word_s, _LEAST_LAST_WORD_S)
        last_word_s = min(max(least, _REPLIES_KEPT * seconds), limits.max_seconds / 2)
        if last_word_s == self._last_word_s:
            return
        self._last_word_s = last_word_s
        if self.closing is None and self._main is not None:
            self._alarm.cancel()
            when = self._deadline - self._last_word_s
            self._alarm = asyncio.get_running_loop().call_at(when, self.close_in, Stop.DEADLINE)

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
        if self._arriving is not None:
            self._arriving.close()
        self._main = None

    def suspend(self, error: RamifyError) -> None:
        """Send nothing more, and cancel the run once the replies on their way are recorded."""
        self.suspension = self.suspension or error
        self.suspend_if_quiet()

    def suspend_if_quiet(self) -> None:
        if self.suspension is not None and not self.requests.under_way:
            # Later, because a task that cancels itself as it ends would end cancelled.
            asyncio.get_running_loop().call_soon(self._cancel_main)

    def overdue(self, error: RamifyError | None = None) -> None:
        """End the run, whose event loop was blocked (``error``), or which did not end by itself
        past its deadline."""
        main, stall_s = self._main, self.setup.limits.stall_s
        if main is not None and error is None:
            error = LoopBlocked(
                f"the run did not end within {stall_s:g} s of its deadline; it waits at "
                f"{waiting_at(main)}",
                self.recorder.id if self.recorder.is_stored else "",
            )
        self.suspension = self.suspension or error
        self._cancel_main()

    def _cancel_main(self) -> None:
        main, self._main = self._main, None
        if main is not None:
            main.cancel(_SUSPENDED)

    def pass_limit(self, call: LiveCall) -> None:
        """Continue past the limit that ended the recorded run at this turn of ``call``. What
        followed is charged, but no longer counts."""
        for gone in self.recording.forgotten(call.id, call.turn) if self.recording else ():
            for event in gone.events:
                self.recorder.emit(event, is_written=True)
                if isinstance(event, ReplyReceived):
                    self.requests.ledger.charge(event.reply.usage, event.reply.cost)
            resumed = RunResumed(
                at_s=self.recorder.now(),
                limits=msgspec.to_builtins(self.setup.limits),
                forgets={call.id: call.turn},
            )
            self.recorder.emit(resumed, is_written=gone.is_recorded)

    async def suspended(self, error: RamifyError) -> NoReturn:
        """``suspend``, and wait until this task is cancelled, so that no cell sees the failure."""
        self.suspend(error)
        await asyncio.Future()
        raise AssertionError

    @contextlib.asynccontextmanager
    async def until_closing(self) -> AsyncIterator[None]:
        """Let ``close_in`` cancel what this task awaits in the block; raises LimitReached then. It
        sets no timer, because there may be thousands of these waits."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        self._in_flight.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.closing is not None and task.uncancel() <= cancels:
                raise closed(self.closing) from None
            raise
        finally:
            self._in_flight.discard(task)

    @contextlib.asynccontextmanager
    async def until_deadline(self) -> AsyncIterator[None]:
        """Cancel what the block awaits, a final request, at the deadline; raises LimitReached
        then."""
        try:
            async with asyncio.timeout_at(self._deadline) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise closed(Stop.DEADLINE) from None

    def must_stop(self, call: LiveCall) -> Stop | None:
        """Return why ``call`` may not take another turn, or None. A repeated run stops where the
        recorded one stopped."""
        if self.recording is not None:
            recorded = self.recording.request(call.id, call.turn)
            if recorded is not None:
                return recorded.last_word
        num_turns = call.num_turns_before + call.turn
        max_turns = self.setup.max_turns(call.depth)
        return self.closing or (Stop.MAX_TURNS if num_turns >= max_turns else None)

    def was_skipped(self, call: LiveCall, turn: int, cell: int) -> bool:
        """True if the run is repeated and the recorded run was closing at this point, so the cell
        was skipped."""
        return self.recording is not None and self.recording.was_skipped(call.id, turn, cell)

    def standing(self) -> list[tuple[str, float, float]]:
        """Return (name, spent, limit) for each limit that all calls share."""
        most = self.setup.limits.max_seconds
        left = self._deadline - self._loop.time()
        return [*self.requests.ledger.state(), ("seconds", most - left, most)]

    def budget(self, call: LiveCall) -> dict[str, int | float]:
        """Return the rest of each limit for ``call``, without the part that is kept for the root's
        final reply."""
        ledger, limits = self.requests.ledger, self.setup.limits
        left = ledger.limit.minus(ledger.spent).minus(ledger.held)
        seconds = self._deadline - self._last_word_s - self._loop.time()
        num_turns = call.num_turns_before + call.turn
        return {
            "turns": max(0, self.setup.max_turns(call.depth) - num_turns),
            "calls": max(0, ledger.calls_left()),
            "tokens": max(0, left.tokens),
            **({"dollars": max(0.0, round(left.cost, 4))} if math.isfinite(left.cost) else {}),
            "seconds": max(0.0, round(seconds, 1)),
            "depth": max(0, limits.max_depth - call.depth),
        }

    # --- calls ------------------------------------------------------------------------------------

    def begin(self, call: LiveCall, fork: Fork | None = None) -> None:
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
                context=context_ref(call.context),
            )
        )

    def end(self, call: LiveCall, outcome: CallOutcome) -> None:
        self._report_limit(call, outcome.stop)
        is_suspended = self.suspension is not None and outcome.stop is Stop.CANCELLED
        self.recorder.emit(
            CallEnded(
                at_s=self.recorder.now(),
                id=call.id,
                stop=Stop.SUSPENDED if is_suspended else outcome.stop,
                answer=jsonable(outcome.answer),
                error=outcome.error,
                reason=self.reason(outcome, call.num_turns_before + call.turn, call.depth),
            )
        )

    def reason(self, outcome: CallOutcome, num_turns: int, depth: int = 0) -> str:
        """Return one sentence on why a call with ``num_turns`` turns ended, with the numbers of
        the limit that ended it; empty for a final answer."""
        limits, stop = self.setup.limits, outcome.stop
        if stop is Stop.FINAL:
            return ""
        if self.suspension is not None and stop in (Stop.SUSPENDED, Stop.CANCELLED):
            return str(self.suspension)
        if stop is Stop.ERROR or isinstance(outcome.failure, ReplyCut):
            return outcome.error or str(outcome.failure or "")
        if stop is Stop.MAX_TURNS:
            most = self.setup.max_turns(depth)
            used = min(num_turns, most)  # without the request for a final reply
            return f"{used} of {most} turns were used: raise max_turns"
        if stop is Stop.DEADLINE:
            kept = f", and the last {self._last_word_s:.3g} s are kept for the final reply"
            return (
                f"{self.recorder.now():.3g} s of {limits.max_seconds:g} s had passed{kept}: raise "
                "max_seconds"
            )
        if stop is Stop.NO_CODE:
            most = self.setup.scaffold_at(depth).max_idle
            last = (
                "so the run has no answer"
                if outcome.answer is None
                else "so the best answer so far was taken"
            )
            return f"{most} replies in a row had neither code nor FINAL(…), {last}"
        if stop is Stop.CANCELLED and self.closing is Stop.CANCELLED:
            return "it was asked to finish before it had a final answer"
        return self.requests.ledger.refusals.get(stop) or outcome.error or ""

    def _report_limit(self, call: LiveCall, stop: Stop) -> None:
        """Log a limit once: each call has its own turns, and all calls share the other limits."""
        limit = (stop, call.id if stop is Stop.MAX_TURNS else "")
        reported = self.requests.ledger.reported
        if stop not in _LIMITS or limit in reported:
            return
        reported.add(limit)
        spent: dict[str, Any] = {name: num for name, num, _ in self.requests.ledger.state()}
        text = f"call {call.id} ends at the limit {stop}"
        _log.warning("limit", text, limit=str(stop), call=call.id, **spent)

    def note(self, call: LiveCall, text: str) -> None:
        self.recorder.emit(NoteAdded(at_s=self.recorder.now(), call=call.id, text=text))

    def warn_of_excess(self, call: LiveCall, text: str) -> None:
        """Record that a reply used more than was reserved. Only the first time is a warning,
        because a model may do this at every reply."""
        is_first, self._has_excess = not self._has_excess, True
        prefix = "warning: " if is_first else ""
        note = f"{prefix}{text}; later requests to it reserve as much"
        self.recorder.emit(
            NoteAdded(at_s=self.recorder.now(), call=call.id, text=note, is_warning=is_first)
        )

    def first_message(self, call: LiveCall, about: str = "", *, is_next: bool = False) -> str:
        """Return the first message of ``call``. ``is_next`` means that it follows another question
        of a conversation."""
        scaffold = self.setup.scaffold_at(call.depth)
        if is_next and not scaffold.first:
            return f"The next question: {call.question}"
        value = "" if call.context is None else call.context.value
        facts = ContextFacts() if scaffold.first else self.context_facts(call)
        return scaffold.first_message(call.question, value, facts, about)

    def context_facts(self, call: LiveCall) -> ContextFacts:
        """Return the facts about the context of ``call``, gathered once, because children share
        large contexts."""
        context = call.context
        if context is None:
            return ContextFacts()
        tools = self.tools_at(call.depth).functions.keys()
        key = context.digest, "sql" in tools
        if key not in self._contexts:
            self._contexts[key] = context_facts(context.value, context.chars, context.nbytes, tools)
        return self._contexts[key]

    def system_prompt(self, call: LiveCall) -> str:
        """Return the system message of ``call``, written once for all calls of its depth whose
        contexts look the same."""
        place = call.depth, self.context_facts(call)
        if place not in self._system_prompts:
            self._system_prompts[place] = self._new_system_prompt(call)
        return self._system_prompts[place]

    def _new_system_prompt(self, call: LiveCall) -> str:
        facts = facts_of(
            self.setup,
            self.models,
            self.requests.ledger.limit,
            self.requests.reply_limits,
            self._resources.sandbox().caps,
            self.tools_at(call.depth),
            self.context_facts(call),
            call.depth,
        )
        return self.setup.scaffold_at(call.depth).system_prompt(facts)

    # --- sessions ---------------------------------------------------------------------------------

    def tools_at(self, depth: int) -> ToolSet:
        return self._tools[min(depth, len(self._tools) - 1)]

    async def keep_context(self, context: SharedContext) -> None:
        """Store a child's context with the run, before it is used."""
        blobs = self.setup.blobs
        if blobs is None:
            return
        if context.nbytes > 1 << 20:
            await asyncio.to_thread(blobs.put, context.buffer(), context.digest)
        else:
            blobs.put(context.buffer(), context.digest)

    async def open_session(self, call: LiveCall) -> Session:
        """Open a new session over the context of ``call``."""
        return await self._resources.sandbox().open(context=call.context, seed=call.id)

    def keep(self, session: Session) -> None:
        """Register ``session`` to be interrupted when the run closes."""
        self._sessions.add(session)

    def drop(self, session: Session) -> None:
        self._sessions.discard(session)


class LiveCall:
    """A call in progress: its conversation so far and what is known about its length in tokens."""

    def __init__(
        self,
        id: str,
        kind: CallKind,
        client: Client,
        depth: int,
        question: str,
        *,
        parent: Parent | None = None,
        context: SharedContext | None = None,
        before: Sequence[Message] = (),
        keeps_ids: bool = True,
    ) -> None:
        """With ``keeps_ids=False``, replies are recorded without token ids."""
        self.id = id
        self.kind = kind
        self.client = client
        self.depth = depth
        self.question = encodable(question)
        self.parent = parent
        self.context = context
        self.before = tuple(before)
        """Messages of the caller before the question."""
        self._keeps_ids = keeps_ids
        self.messages: list[Message] = []
        """Prompt and reply of every turn so far."""
        self.turn = 0
        """Index of the next turn."""
        self.num_turns_before = 0
        """For a branch: turns of the original call before the branch point."""
        self.shrunk: tuple[int, str] | None = None
        """(tokens of the next reply, the limit that does not allow more), in a small budget."""
        self.num_children = 0
        self.num_forks = 0
        self.surprisals: list[float | None] = []
        """Mean of -log-probability per sampled token (nats) of each reply so far; None for a reply
        without log-probabilities."""
        self._counted: tuple[int, int] | None = None
        """(number of messages, their tokens as counted by the server) up to the last reply."""
        self._max_tokens = [0]
        """Number of messages -> upper bound on their tokens, as far as it is known."""
        self._ids: tuple[int, ...] = ()
        """Token path: ids of the whole conversation so far, as the model received and sampled them.
        Empty if the last reply came without ids."""
        self._replies: list[tuple[int, int]] = []
        """(number of messages, number of ids) up to and including each reply of the path."""

    @property
    def is_branch(self) -> bool:
        return ":" in self.id

    def next_child(self) -> str:
        """Return the id of the next child. Ids follow the order of creation, which a replay
        repeats; the order of completion is not reproducible."""
        self.num_children += 1
        return f"{self.id}.{self.num_children - 1}"

    def peek_child(self) -> str:
        """Return what ``next_child`` would."""
        return f"{self.id}.{self.num_children}"

    def forked(self) -> LiveCall:
        """Return a new call that continues this one from here, as another branch of it."""
        self.num_forks += 1
        call = LiveCall(
            f"{self.id}:{self.num_forks}",
            "rlm",
            self.client,
            self.depth,
            self.question,
            context=self.context,
        )
        call.continue_from(self)
        call.num_turns_before = self.num_turns_before + self.turn
        return call

    def max_input_tokens(self, reused: int, new: Request) -> int:
        """Upper bound on the prompt of a request that has the first ``reused`` messages before
        those of ``new``: the server's own count for the messages it has seen, and bytes for the
        others."""
        num_new = new.max_input_tokens()
        by_bytes = self._max_tokens_of_first(reused) + num_new
        if self._counted is None or self._counted[0] != reused:
            return by_bytes
        # 4 per message: a template may place its role markers around a reply differently from how
        # the server counted them.
        return min(by_bytes, self._counted[1] + 4 * reused + num_new)

    def _max_tokens_of_first(self, num: int) -> int:
        """Upper bound on the tokens of the first ``num`` messages, each of which is read once."""
        bounds = self._max_tokens
        for message in self.messages[len(bounds) - 1 : num]:
            bounds.append(bounds[-1] + max_tokens_of(message))
        return bounds[num]

    def continue_from(self, call: LiveCall) -> None:
        """Start with the conversation of ``call``, as the next question in the same session
        does."""
        self.messages = list(call.messages)
        self.surprisals = list(call.surprisals)
        self._counted = call._counted
        self._max_tokens = list(call._max_tokens)
        self._ids = call._ids
        self._replies = list(call._replies)

    def known_tokens(self) -> int:
        """Tokens of the conversation so far as counted by the server; 0 if it did not report
        them."""
        return self._counted[1] if self._counted else 0

    def known_ids(self, reused: int) -> KnownPrefix | None:
        """Ids of the longest prefix of the first ``reused`` messages that ends with a reply."""
        for num_messages, num_ids in reversed(self._replies):
            if num_messages <= reused:
                return KnownPrefix(num_messages, self._ids[:num_ids])
        return None

    def without_path(self, reply: Reply) -> tuple[Reply, int]:
        """Return (``reply`` with only the new prompt ids, number of ids of the path that its prompt
        reuses)."""
        if not self._keeps_ids:
            names = ("prompt_ids", "token_ids", "logprobs", "versions", "kept", "routes")
            return msgspec.structs.replace(reply, **dict.fromkeys(names)), 0
        if reply.prompt_ids is None:
            return reply, 0
        reused_ids = _num_common(self._ids, reply.prompt_ids)
        return msgspec.structs.replace(reply, prompt_ids=reply.prompt_ids[reused_ids:]), reused_ids

    def advance(self, reused: int, new: Sequence[Message], reply: Reply, reused_ids: int) -> None:
        """Finish a turn. Its prompt was the first ``reused`` messages followed by ``new``;
        ``reply`` comes from ``without_path``."""
        self.messages = [*self.messages[:reused], *new, reply.message]
        del self._max_tokens[reused + 1 :]
        self.turn += 1
        logprobs = reply.logprobs
        self.surprisals.append(-sum(logprobs) / len(logprobs) if logprobs else None)
        self._counted = (
            None
            if reply.usage.unknown_calls or not reply.usage.calls
            else (len(self.messages), reply.usage.total_tokens)
        )
        if reply.prompt_ids is None or reply.token_ids is None:
            self._ids, self._replies = (), []
            return
        self._ids = (*self._ids[:reused_ids], *reply.prompt_ids, *reply.token_ids)
        remaining = [
            (messages, ids)
            for messages, ids in self._replies
            if messages <= reused and ids <= reused_ids
        ]
        self._replies = [*remaining, (len(self.messages), len(self._ids))]


def _num_common(path: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Length of the common prefix of both."""
    if prompt[: len(path)] == path:
        return len(path)
    differ = (index for index, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b)
    return next(differ, min(len(path), len(prompt)))  # a question that is asked again is a prefix
