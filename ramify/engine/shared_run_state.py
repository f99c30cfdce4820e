"""Define the state that all model calls of a run share: budget, models, tools, contexts and
prompts.

    RLM.start ──> RunHandle ──> RlmCall (root) ──> ModelRequestSender.ask ──> recorded?
                                    │                         ^               └──> a client pool
                                    └── CellHostCallHandler ──┘  llm_query: ask  rlm_query: child

The beginning and the result of a run are handled by ``run_handle.py``, the choice of the call that
answers it by ``ways_to_answer.py``, a call and its history by ``live_call.py``, the end of the run
by ``run_ending.py``, requests and their budget by ``model_requests.py``, and the record of events
by ``event_recorder.py``.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.event_recorder import EventRecorder, context_ref
from ramify.engine.live_call import LiveCall
from ramify.engine.live_reply_writer import LiveReplyWriter
from ramify.engine.model_requests import ModelRequestSender, TurnRequester
from ramify.engine.prompt_facts import facts_of
from ramify.engine.prompt_text import ContextFacts, context_facts
from ramify.engine.question import PAGE_PICTURE, Question
from ramify.engine.resources import EventLoopResources, ModelsByDepth, RlmSetup
from ramify.engine.run_ending import RunStopper
from ramify.engine.run_pictures import RunPictures
from ramify.errors import ReplyTruncatedError
from ramify.logging import ComponentLogger
from ramify.sandbox.base import Session, expect_module
from ramify.store.durable_files import BlobStore
from ramify.terminal_sanitizer import replace_unprintable
from ramify.types.event import CallEnded, CallStarted, ReplyReceived, RunResumed
from ramify.types.trajectory import CallForkOrigin, NewAgentCallReason, Stop

if TYPE_CHECKING:
    from ramify.engine.prompt_scaffold import Scaffold
    from ramify.engine.reply_cache_lookup import ReusableReplies
    from ramify.engine.tool_set import ToolSet
    from ramify.sandbox.base import SharedContextValue
    from ramify.store.base import RunBlobs
    from ramify.store.recorded_replies import RunEventIndex

_log = ComponentLogger("engine")
_REFUSED_CHARS = 200
"""Maximum characters quoted from the reason why the last answer was not accepted."""
_LIMITS = (Stop.MAX_TURNS, Stop.MAX_CALLS, Stop.MAX_TOKENS, Stop.MAX_COST, Stop.DEADLINE)


def store_context(blobs: RunBlobs, context: SharedContextValue) -> None:
    """Store a context in the blob store of its run, under the digest of the context.

    If it is stored in files, it is written in pieces, so that memory never holds a second copy.
    """
    if isinstance(blobs, BlobStore):
        blobs.put_pieces(context.pieces(), context.nbytes, context.digest)
    else:
        blobs.put(context.buffer(), context.digest)


class SharedRunState:
    """The state that all calls of a run share: its budget, models, tools, contexts and prompts.

    An instance belongs to one event loop.
    """

    def __init__(
        self,
        setup: RlmSetup,
        resources: EventLoopResources,
        models: ModelsByDepth,
        recorder: EventRecorder,
        question: Question,
        *,
        recording: RunEventIndex | None = None,
        cache: ReusableReplies | None = None,
    ) -> None:
        self.setup = setup
        self.models = models
        self.recorder = recorder
        self.recording = recording
        self.prepare_session = question.on_session
        """Function that prepares each new session before its first cell; None if nothing has to be
        prepared."""
        self.pictures = RunPictures(setup.blobs, question.pictures)
        self._context_has_pictures = bool(question.pictures)
        under_way: set[TurnRequester] = set()
        self.ending = RunStopper(setup.limits, recorder, under_way)
        self.requests = ModelRequestSender(
            setup,
            models,
            recorder,
            self.ending,
            under_way,
            recording,
            cache,
            self.pictures.read,
        )
        self._resources = resources
        num = max(2, len(setup.depths))
        self._tools = [setup.tools_at(depth, question.tools) for depth in range(num)]
        """Tools of the sessions at each depth; the last entry also applies to all greater
        depths."""
        self._contexts: dict[tuple[str, bool], ContextFacts] = {}
        self._system_prompts: dict[tuple[int, ContextFacts], str] = {}
        live_text = recorder.live_reply_file()
        self._arriving = (
            LiveReplyWriter(self.requests.partial_replies, live_text) if live_text else None
        )
        self.ending.schedule_early_end()

    def release_loop_resources(self) -> None:
        """Release the resources that the finished run holds on its event loop."""
        self.ending.cancel_timer()
        if self._arriving is not None:
            self._arriving.close()

    @property
    def cell_timeout_s(self) -> float:
        return self.setup.sandbox.cell_s

    @property
    def scaffold(self) -> Scaffold:
        return self.setup.scaffold

    def continue_past_recorded_limit(self, call: LiveCall) -> None:
        """Let ``call`` continue past a recorded limit that the resumed run has raised.

        Recorded events after that turn remain charged but are otherwise ignored.
        """
        for gone in self.recording.pop_dropped_turns(call.id, call.turn) if self.recording else ():
            for event in gone.events:
                self.recorder.emit(event, is_written=True)
                if isinstance(event, ReplyReceived):
                    self.requests.ledger.charge(
                        event.reply.usage, event.reply.cost, is_recorded=True
                    )
            resumed = RunResumed(
                at_s=self.recorder.elapsed_s(),
                limits=msgspec.to_builtins(self.setup.limits),
                forgets={call.id: call.turn},
            )
            self.recorder.emit(resumed, is_written=gone.is_recorded)

    def stop_reason(self, call: LiveCall) -> Stop | None:
        """Return why ``call`` must stop before another regular turn, or None if it may continue.

        A repeated run stops at the turn at which the recorded run stopped.
        """
        if self.recording is not None:
            recorded = self.recording.request(call.id, call.turn)
            if recorded is not None:
                return recorded.last_word
        num_turns = call.num_turns_before + call.turn
        max_turns = self.setup.max_turns(call.depth)
        return self.ending.closing or (Stop.MAX_TURNS if num_turns >= max_turns else None)

    def was_cell_skipped_at_end(self, call: LiveCall, turn: int, cell: int) -> bool:
        """Return True if the recorded run skipped this cell because that run was about to end.

        A repeated run must then skip it too.
        """
        return self.recording is not None and self.recording.was_cell_skipped_at_end(
            call.id, turn, cell
        )

    def usage_by_limit(self) -> list[tuple[str, float, float]]:
        """Return the name, usage and maximum of each limit that all calls of the run share.

        Time counts in seconds.
        """
        most = self.setup.limits.max_seconds
        spent = most - self.ending.seconds_left()
        return [*self.requests.ledger.usage_by_limit(), ("seconds", spent, most)]

    def remaining_budget(self, call: LiveCall) -> dict[str, int | float]:
        """Return how much ``call`` may still use of each limit, by the limit's name.

        The amount kept for the root call's final reply is not included.
        """
        ledger, limits = self.requests.ledger, self.setup.limits
        left = ledger.limit.minus(ledger.spent).minus(ledger.held)
        seconds = self.ending.seconds_left() - self.ending.last_word_s
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

    def begin_call(
        self,
        call: LiveCall,
        fork: CallForkOrigin | None = None,
        cause: NewAgentCallReason | None = None,
    ) -> None:
        self.recorder.emit(
            CallStarted(
                at_s=self.recorder.elapsed_s(),
                id=call.id,
                kind=call.kind,
                model=call.client.name,
                depth=call.depth,
                question=call.question,
                parent=call.parent,
                fork=fork,
                context=context_ref(call.context),
                cause=cause,
            )
        )

    def end_call(self, call: LiveCall, outcome: CallOutcome) -> None:
        self._report_limit(call, outcome.stop)
        is_suspended = self.ending.suspension is not None and outcome.stop is Stop.CANCELLED
        self.recorder.emit(
            CallEnded(
                at_s=self.recorder.elapsed_s(),
                id=call.id,
                stop=Stop.SUSPENDED if is_suspended else outcome.stop,
                answer=to_jsonable(outcome.answer),
                error=outcome.error,
                reason=self.explain_call_stop(
                    outcome, call.num_turns_before + call.turn, call.depth
                ),
            )
        )

    def explain_call_stop(self, outcome: CallOutcome, num_turns: int, depth: int = 0) -> str:
        """Explain in one sentence why a call ended, quoting the numbers of any limit that it
        reached.

        Empty if the call ended with a final answer.
        """
        limits, stop, ending = self.setup.limits, outcome.stop, self.ending
        if stop is Stop.FINAL:
            return ""
        if ending.suspension is not None and stop in (Stop.SUSPENDED, Stop.CANCELLED):
            return str(ending.suspension)
        if stop is Stop.ERROR or isinstance(outcome.failure, ReplyTruncatedError):
            return outcome.error or str(outcome.failure or "")
        if stop is Stop.MAX_TURNS:
            most = self.setup.max_turns(depth)
            more = ", and one more for a final reply" if num_turns > most else ""
            used = f"{min(num_turns, most)} of {most} turns were used{more}"
            return (
                f"{used}: raise "
                f"max_turns{_describe_refused_answer(outcome) or _cell_error(outcome)}"
            )
        if stop is Stop.DEADLINE:
            kept = f", and the last {ending.last_word_s:.3g} s are kept for the final reply"
            return (
                f"{self.recorder.elapsed_s():.3g} s of {limits.max_seconds:g} s had "
                f"passed{kept}: raise "
                "max_seconds"
            )
        if stop is Stop.NO_CODE:
            most = self.setup.scaffold_at(depth).max_idle
            last = (
                "so the run has no answer"
                if outcome.answer is None
                else "so the best answer so far was taken"
            )
            if outcome.refused_answer:
                return f"{most} replies in a row had neither code nor a valid answer, {last}" + (
                    _describe_refused_answer(outcome)
                )
            return f"{most} replies in a row had neither code nor FINAL(…), {last}"
        if stop is Stop.CANCELLED and ending.closing is Stop.CANCELLED:
            return "it was asked to finish before it had a final answer"
        return self.requests.ledger.refusals.get(stop) or outcome.error or ""

    def _report_limit(self, call: LiveCall, stop: Stop) -> None:
        """Log a warning if a call ends at a limit that has not been reported yet.

        Each limit is reported once, because most limits are shared and end all calls together.
        """
        limit = (stop, call.id if stop is Stop.MAX_TURNS else "")
        reported = self.requests.ledger.reported
        if stop not in _LIMITS or limit in reported:
            return
        reported.add(limit)
        spent: dict[str, Any] = {
            name: num for name, num, _ in self.requests.ledger.usage_by_limit()
        }
        text = f"call {call.id} ends at the limit {stop}"
        _log.warning("limit", text, limit=str(stop), call=call.id, **spent)

    def note(self, call: LiveCall, text: str) -> None:
        self.recorder.note(call.id, text)

    def first_message_of(self, call: LiveCall, about: str = "", *, is_next: bool = False) -> str:
        """Return the first message of ``call``, which presents its question and its context.

        ``is_next`` is True if the call continues a conversation after an earlier question.
        """
        scaffold = self.setup.scaffold_at(call.depth)
        if is_next and not scaffold.first:
            return f"The next question: {call.question}"
        value = "" if call.context is None else call.context.value
        facts = ContextFacts() if scaffold.first else self.context_facts(call)
        return scaffold.first_message(call.question, value, facts, about)

    def context_facts(self, call: LiveCall) -> ContextFacts:
        """Return the facts about the context of ``call`` that its prompt states, such as its size.

        Results are cached per context, because child calls often share a large one.
        """
        context = call.context
        if context is None:
            return ContextFacts()
        tools = self.tools_at(call.depth).functions.keys()
        key = context.digest, "sql" in tools
        if key not in self._contexts:
            num_bytes = context.nbytes + sum(map(len, context.files))
            packages = self.setup.sandbox.packages
            self._contexts[key] = context_facts(
                context.value, context.chars, num_bytes, tools, packages
            )
        return self._contexts[key]

    def system_prompt(self, call: LiveCall) -> str:
        """Return the system message of ``call``.

        Calls at the same depth with similar contexts share one cached message.
        """
        place = call.depth, self.context_facts(call)
        if place not in self._system_prompts:
            self._system_prompts[place] = self._new_system_prompt(call)
        return self._system_prompts[place]

    def _new_system_prompt(self, call: LiveCall) -> str:
        facts = facts_of(
            self.setup,
            self.models,
            self.requests.ledger.limit,
            self.requests.lengths.reply_limits,
            self._resources.sandbox().caps,
            self.tools_at(call.depth),
            self.context_facts(call),
            call.depth,
            has_pictures=self._has_pictures(call.depth),
        )
        return self.setup.scaffold_at(call.depth).system_prompt(facts)

    def _has_pictures(self, depth: int) -> bool:
        """Return True if sessions at ``depth`` can show pictures to a model.

        The result depends only on what is known before the run starts, because a repeated run must
        get the same prompts.
        """
        has_tool = PAGE_PICTURE in self.tools_at(depth).functions
        sees = any(self.models.can_read_pictures(client) is not False for client in self.models.all)
        return sees and (self._context_has_pictures or has_tool)

    # --- sessions ---------------------------------------------------------------------------------

    def tools_at(self, depth: int) -> ToolSet:
        return self._tools[min(depth, len(self._tools) - 1)]

    async def store_child_context(self, context: SharedContextValue) -> None:
        """Store a child call's context with the run.

        Call this before the child uses the context.
        """
        blobs = self.setup.blobs
        if blobs is None:
            return
        if context.nbytes > 1 << 20:
            await asyncio.to_thread(store_context, blobs, context)
        else:
            store_context(blobs, context)

    async def open_session(self, call: LiveCall) -> Session:
        """Open a new Python session that contains the context of ``call``."""
        return await self._resources.sandbox().open(context=call.context, seed=call.id)

    def expect_module(self, module: str, source: str) -> None:
        """Tell the sandbox that its next sessions will probably install a module."""
        expect_module(self._resources.sandbox(), module, source)


def _cell_error(outcome: CallOutcome) -> str:
    """Return the suffix of an error message that names the exception of a call's last cell.

    The suffix is given if that cell raised an exception and the call has no answer. Empty
    otherwise.
    """
    if outcome.answer is not None or not outcome.cell_error:
        return ""
    return f"; its last cell raised {replace_unprintable(outcome.cell_error)[:_REFUSED_CHARS]}"


def _describe_refused_answer(outcome: CallOutcome) -> str:
    """Return the suffix of an error message that states why a call's last answer was rejected.

    Empty if it tried none.
    """
    if outcome.answer is not None or not outcome.refused_answer:
        return ""
    return (
        f"; its last attempt to answer: "
        f"{replace_unprintable(outcome.refused_answer)[:_REFUSED_CHARS]}"
    )
