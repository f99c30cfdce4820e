"""Provide a handle for starting, watching and ending a run, and for getting its result.

A run opens its journal, stores the context, records RunStarted, answers the question (see
``ways_to_answer.py``), records RunEnded and closes everything, in this order. Whatever happens in
between, the journal ends with what is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.engine import event_loop_thread, observation_messages
from ramify.engine.answer_mode_choice import (
    AnswerModeChoice,
    AnswerModeChoiceCall,
    apply_choice,
    choose_initial_mode,
    make_mode_chosen_event,
)
from ramify.engine.answer_serialization import pack_typed_answer, to_jsonable
from ramify.engine.call_outcome import CallOutcome, failed_outcome
from ramify.engine.event_loop_thread import RunStallWatch
from ramify.engine.event_recorder import EventRecorder, context_ref
from ramify.engine.out_of_scope_warning import scope_warning
from ramify.engine.prompt_facts import check_instructions_fit
from ramify.engine.question import ALWAYS, Question
from ramify.engine.resources import EventLoopResources, RefCountedLoopResources, RlmSetup
from ramify.engine.run_result import Result, as_text
from ramify.engine.shared_run_state import SharedRunState, store_context
from ramify.engine.tool_set import optional_tool_names
from ramify.engine.typed_answers import CitedAnswer
from ramify.engine.ways_to_answer import (
    UserConversationState,
    WayToAnswer,
    answer,
    check_pictures,
    check_strategy,
    way_to_answer,
)
from ramify.errors import (
    ConfigError,
    EventLoopBlockedError,
    RamifyError,
    ReplayDiverged,
    SandboxError,
    StoreError,
)
from ramify.logging import (
    ComponentLogger,
    calling_line,
    run_log_context,
    take_held_warnings,
    warnings_at_line,
)
from ramify.sandbox.base import SharedContextValue, is_file_backed
from ramify.types.event import AnyEvent, RunEnded, RunStarted
from ramify.types.message import Usage
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.reply_cache_lookup import ReusableReplies
    from ramify.store.recorded_replies import RunEventIndex


_log = ComponentLogger("sources")
_engine_log = ComponentLogger("engine")
_CLOSE_S = 5.0
"""Maximum time to close the journal of a run whose event loop is blocked."""


class RunHandle:
    """A handle to a run in progress.

    ``RLM.start`` creates it on a running event loop.
    """

    def __init__(
        self,
        setup: RlmSetup,
        question: Question,
        shared: RefCountedLoopResources,
        recorder: EventRecorder,
        *,
        conversation: UserConversationState | None = None,
        recording: RunEventIndex | None = None,
        cache: ReusableReplies | None = None,
        earlier: Sequence[Question] | None = None,
    ) -> None:
        """Start a run in the background.

        To repeat a recorded conversation, pass its earlier questions as ``earlier``. They are
        repeated first, and the conversation ends with this run.
        """
        self.recorder = recorder
        self._setup = setup
        self._question = question
        self._shared = shared
        self._conversation = conversation
        self._recording = recording
        self._cache = cache
        self._earlier = earlier
        self._run: SharedRunState | None = None
        self._requested_stop: Stop | None = None
        self._is_recorded = False
        """True once the journal has the start of this question. A question that is rejected earlier
        has no end either: in a conversation, that would hide the answer before."""
        self._thread = threading.get_ident()
        self._on_blocked = event_loop_thread.on_blocked.get()
        with (
            run_log_context(self.id, self._warn),
            warnings_at_line(calling_line()),
        ):  # the task inherits both
            self._task = asyncio.get_running_loop().create_task(self._drive())

    # --- for the caller ---------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.recorder.id

    @property
    def max_seconds(self) -> float:
        """Time limit of the run, in seconds from its start."""
        return self._setup.limits.max_seconds

    async def result(self) -> Result:
        """Wait until the run ends, and return its result.

        A failed model or a limit does not raise: see ``Result.stop`` and ``Result.error``.

        Cancelling this wait cancels the run. ``await running``, with the handle itself, does the
        same as this method.
        """
        return await self._task

    def __await__(self) -> Generator[Any, None, Result]:
        return self._task.__await__()

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield every event of the run from now until it ends.

        Errors of the run are raised only by ``result``.
        """
        async for event in self.recorder.follow_events():
            yield event

    def wrap_up(self) -> None:
        """Ask the run to finish early and answer with what it knows so far."""
        self._requested_stop = Stop.CANCELLED
        if self._run is not None:
            self._run.ending.end_work_early(Stop.CANCELLED)

    def cancel(self) -> None:
        """End the run at once, without an answer."""
        self._task.cancel()

    def usage_by_limit(self) -> list[tuple[str, float, float]]:
        """Return the name, usage and maximum of each limit of the run, for a progress bar."""
        return self._run.requests.ledger.usage_by_limit() if self._run is not None else []

    # --- the run itself ---------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        """Record a warning about the run.

        May be called from any thread.
        """
        loop = self._task.get_loop()
        if threading.get_ident() == self._thread:
            self.recorder.warn(text)
        else:
            loop.call_soon_threadsafe(self.recorder.warn, text)

    async def _drive(self) -> Result:
        for text in take_held_warnings():
            self._warn(text)
        for text in self._question.warnings:
            _log.warning("warning", text)
        outcome = CallOutcome(Stop.ERROR, error="the run did not start")
        run: SharedRunState | None = None
        watch: RunStallWatch | None = None
        try:
            async with self._shared.use() as resources:
                await self._repeat_earlier()
                models = await self._setup.connect_models(resources)
                check_pictures(self._question, models)
                self._check_scope()
                choice = await choose_initial_mode(
                    self._setup,
                    self._question,
                    models,
                    is_conversation=self._conversation is not None,
                )
                asked = choice if isinstance(choice, AnswerModeChoiceCall) else None
                if isinstance(choice, AnswerModeChoice):
                    self._question = apply_choice(self._question, choice)
                check_strategy(self._setup, self._question, self._conversation)
                context = await self._context(resources)
                check_instructions_fit(self._setup, models)
                way = way_to_answer(self._setup, self._question, models, self._conversation, asked)
                if way in ("session", "asked"):
                    # Without a sandbox, nothing is asked and nothing is recorded.
                    resources.sandbox()
                # Limits that cannot be enforced are rejected here, before the first event.
                self._run = run = SharedRunState(
                    self._setup,
                    resources,
                    models,
                    self.recorder,
                    self._question,
                    recording=self._recording,
                    cache=self._cache,
                )
                limits = self._setup.limits
                watch = RunStallWatch(
                    limits.max_seconds,
                    limits.stall_s,
                    self._end_blocked,
                    run.ending.cancel_overdue_run,
                )
                if self._question.pictures:
                    await asyncio.to_thread(run.pictures.store_all)
                self._record_start(context, way)
                if isinstance(choice, AnswerModeChoice):
                    self.recorder.emit(make_mode_chosen_event(choice, self.recorder.elapsed_s()))
                if self._requested_stop is not None:
                    run.ending.end_work_early(self._requested_stop)
                outcome = await answer(
                    run, way, self._question, context, resources, self._conversation, asked
                )
        except asyncio.CancelledError:
            outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
            # A suspension cancels once. If more is left, the caller has cancelled the run, too.
            if run is None or run.ending.suspension is None or self._task.uncancel():
                raise
            outcome = failed_outcome(run.ending.suspension, self.recorder.is_stored)
        except RamifyError as error:
            outcome = failed_outcome(error, self.recorder.is_stored)
            if run is None:
                raise
        except BaseException as error:
            outcome = CallOutcome(Stop.ERROR, error=repr(error), failure=error)
            raise
        finally:
            if self._earlier is not None and self._conversation is not None:
                await self._conversation.close()
            if watch is not None:
                watch.end()
            outcome = self._finish_run(outcome, run)
            # This object is part of reference cycles, so a large context would stay until the next
            # collection of all objects, which may be many runs away.
            self._question = msgspec.structs.replace(self._question, context=None)
        return self._result(outcome, run)

    def _check_scope(self) -> None:
        """Warn if the run's question is of a kind for which the model was not trained."""
        question, setup = self._question, self._setup
        if self._conversation is None and (
            warning := scope_warning(setup.model[0], question.text, question.context, setup.config)
        ):
            _engine_log.issue_python_warning(warning, stacklevel=2)

    async def _repeat_earlier(self) -> None:
        for question in self._earlier or ():
            conversation, recording = self._conversation, self._recording
            result = await RunHandle(
                self._setup,
                question,
                self._shared,
                self.recorder,
                conversation=conversation,
                recording=recording,
            )
            is_over = result.stop is Stop.SUSPENDED or isinstance(result.failure, ReplayDiverged)
            if is_over and isinstance(result.failure, RamifyError):
                raise result.failure

    def _end_blocked(self, place: str) -> None:
        """End a run whose event loop is blocked or that cannot be cancelled.

        This is called on another thread than that of the event loop. The journal is closed so that
        the run can be resumed, and the waiting caller gets an error. ``place`` is the line at which
        the loop is blocked, or empty.
        """
        run, limits = self._run, self._setup.limits
        assert run is not None
        why = (
            f"the run's event loop has been blocked for {limits.stall_s:g} s past its deadline "
            f"(max_seconds={limits.max_seconds:g}), at {place}: code on the loop must not block"
        )
        id = self.id if self.recorder.is_stored else ""
        error = EventLoopBlockedError(why if place else str(run.ending.suspension), id)
        run.ending.suspension = error
        end = self._end_of(failed_outcome(error, self.recorder.is_stored), run)
        end = msgspec.structs.replace(end, has_open_requests=True)
        # In a thread, because the disk may be what blocks the loop.
        ending = threading.Thread(target=self.recorder.seal, args=(end, error), daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._task.get_loop().call_soon_threadsafe(run.ending.cancel_overdue_run, error)
        if (release := self._on_blocked) is not None:
            release(error)
        else:
            _engine_log.error("blocked", f"run {self.id}: {error}", shown=True)

    async def _context(self, resources: EventLoopResources) -> SharedContextValue | None:
        """Return the encoded context of the question, or None if it has no context.

        It is encoded once, in a thread if it is large. If there is a store, the context is stored.
        """
        context = await self._encode_context(resources)
        if context is not None and self._question.on_context is not None:
            self._question.on_context(context)
        return context

    async def _encode_context(self, resources: EventLoopResources) -> SharedContextValue | None:
        if self._conversation is not None and self._conversation.context is not None:
            return self._conversation.context
        value, blobs = self._question.context, self._setup.blobs
        if value is None:
            return None

        maps_files = not is_file_backed(value) or resources.sandbox().caps.shares_context

        def prepare() -> SharedContextValue:
            try:
                context = SharedContextValue(value)
                context = context if maps_files else context.in_memory_copy()
            except SandboxError as error:  # about the caller's value
                raise ConfigError(f"the context cannot be given to a session: {error}") from None
            if large:
                _ = context.digest  # takes a second per gigabyte, which would block the loop
            if blobs is not None:
                store_context(blobs, context)
            return context

        large = observation_messages.count_context_chars(value) > 1 << 20
        if large and self._question.strategy is None and self._question.direct != ALWAYS:
            resources.prestart_sandbox()
        context = await asyncio.to_thread(prepare) if large else prepare()
        if self._conversation is not None:
            self._conversation.context = context
        return context

    def _record_start(self, context: SharedContextValue | None, way: WayToAnswer) -> None:
        schema = self._question.kind.schema if self._question.kind else None
        before, pictures = self._question.before, self._question.pictures
        retry_empty = self._question.retry_empty
        is_special = bool(pictures) or self._question.needs_session
        optional = optional_tool_names(self._question.tools)
        config = {
            **self._setup.config,
            **({"conversation": True} if self._conversation is not None else {}),
            **({"conducted": True} if self._question.conduct is not None else {}),
            "answer_schema": schema,
            "cite": self._question.cite,
            "about": self._question.about,
            **({"read": dict(self._question.read)} if self._question.read else {}),
            **({"sources": dict(self._question.sources)} if self._question.sources else {}),
            **({"before": msgspec.to_builtins(before)} if before else {}),
            **({"context_tools": optional} if optional else {}),
            # The models' vision or the sources decided this, which a repeated run may not have.
            **({"direct": False} if is_special and way == "session" else {}),
            **({"retry_empty": False} if way == "plain call" and not retry_empty else {}),
        }
        self.recorder.emit(
            RunStarted(
                at_s=self.recorder.elapsed_s(),
                id=self.id,
                question=self._question.text,
                started_at=time.time(),
                task=str(config.get("task", "")),
                context=context_ref(context, pictures),
                config=config,
            )
        )
        self._is_recorded = True

    def _finish_run(self, outcome: CallOutcome, run: SharedRunState | None) -> CallOutcome:
        """Record the end of the run, and release its resources.

        Returns the outcome of the run. If the end cannot be written to the journal, the outcome
        becomes a failure.
        """
        try:
            if self._is_recorded:
                self.recorder.emit(self._end_of(outcome, run))
        except (StoreError, EventLoopBlockedError) as error:  # its journal ends as if killed
            return failed_outcome(error, self.recorder.is_stored)
        finally:
            if run is not None:
                run.release_loop_resources()
            if self._conversation is None or self._earlier is not None:
                self.recorder.close()
        return outcome

    def _end_of(self, outcome: CallOutcome, run: SharedRunState | None) -> RunEnded:
        return RunEnded(
            at_s=self.recorder.elapsed_s(),
            stop=outcome.stop,
            answer=to_jsonable(outcome.answer),
            error=outcome.error,
            usage=run.requests.ledger.usage if run else Usage(),
            cost=run.requests.ledger.cost if run else None,
            answered_by=outcome.answered_by,
            reason=self._reason(outcome, run),
            typed_answer=pack_typed_answer(outcome.answer),
            partial=outcome.partial,
        )

    def _reason(self, outcome: CallOutcome, run: SharedRunState | None) -> str:
        """Return the reason why the run ended, as stated by the call that answered.

        If the run failed outside calls, that failure is the reason.
        """
        chosen = outcome.answered_by
        roots = [call for call in self.recorder.trajectory.calls if call.parent is None]
        calls = [call for call in roots if not chosen or call.id == chosen]
        if calls and calls[-1].stop == outcome.stop:
            return calls[-1].reason
        return run.explain_call_stop(outcome, 0) if run else outcome.error or ""

    def _result(self, outcome: CallOutcome, run: SharedRunState) -> Result:
        answer, citations = outcome.answer, ()
        if isinstance(answer, CitedAnswer):
            answer, citations = answer.answer, answer.citations
        return Result(
            as_text(answer),
            answer,
            outcome.stop,
            run.requests.ledger.usage,
            run.requests.ledger.cost,
            self.recorder.trajectory,
            citations,
            outcome.error,
            outcome.failure,
            outcome.partial,
        )
