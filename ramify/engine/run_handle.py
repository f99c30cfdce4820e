"""A run from outside: start it, watch it, end it early, get its result.

The order of things: journal opened, context stored, RunStarted written, the question answered
(directly, or by the RLM loop), RunEnded written, everything closed. Whatever happens in between,
the journal ends with what is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Client
from ramify.engine import observe
from ramify.engine.branch import BranchSearch
from ramify.engine.call import CallOutcome, LiveCall, context_ref, jsonable
from ramify.engine.citations import Citation, CitedAnswer
from ramify.engine.models import RunModels
from ramify.engine.plain import ask_plain
from ramify.engine.question import Question
from ramify.engine.recorder import EventRecorder
from ramify.engine.resources import LoopResources
from ramify.engine.rlm_loop import RlmLoop
from ramify.engine.run_state import ReplyCache, ReplySource, RunState
from ramify.engine.setup import RlmSetup
from ramify.errors import ConfigError, RamifyError, SandboxError
from ramify.sandbox.context import SharedContext
from ramify.types.event import AnyEvent, RunEnded, RunStarted
from ramify.types.message import Usage
from ramify.types.trajectory import Fork, Stop, Trajectory


class Result(msgspec.Struct, frozen=True):
    """What a question came to."""

    response: str
    """The answer as text; empty if there is none."""
    answer: Any
    """The answer as a value, of the type asked for; None if there is none."""
    stop: Stop
    usage: Usage
    """Of the whole tree."""
    cost: float | None
    """Dollars of the whole tree; None where no model has a price."""
    trajectory: Trajectory
    citations: tuple[Citation, ...] = ()
    error: str | None = None
    failure: BaseException | None = None
    """What was raised, where that ended the run."""

    @property
    def run_id(self) -> str:
        return self.trajectory.id


class RunJournal(Protocol):
    """What a run needs of ``store.Journal``."""

    @property
    def id(self) -> str: ...

    def append(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


class ConversationState:
    """What goes on from question to question in a conversation: the session, its history and the
    record."""

    def __init__(self, recorder: EventRecorder, context: SharedContext | None = None) -> None:
        self.recorder = recorder
        self.context = context
        self.loop: RlmLoop | None = None
        self.num_questions = 0

    async def close(self) -> None:
        if self.loop is not None:
            await self.loop.close()


class RunHandle:
    """One run in progress. Made by ``RLM.start`` on a running event loop."""

    def __init__(
        self,
        setup: RlmSetup,
        question: Question,
        use: contextlib.AbstractAsyncContextManager[LoopResources],
        *,
        id: str,
        recorder: EventRecorder,
        thread: ConversationState | None = None,
        recording: ReplySource | None = None,
        cache: ReplyCache | None = None,
        search: BranchSearch | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.id = id
        self.recorder = recorder
        self._setup, self._question, self._use, self._thread = setup, question, use, thread
        self._recording, self._cache, self._search, self._close = recording, cache, search, close
        self._run: RunState | None = None
        self._answered_by = ""
        self._wanted: Stop | None = None
        self._task = asyncio.get_running_loop().create_task(self._drive())

    # --- for whoever waits
    # -------------------------------------------------------------------------------------

    async def result(self) -> Result:
        """Wait for the end. Never raises for what a model or a limit did: ``stop`` and ``error``
        say it.

        Cancelling this wait cancels the run."""
        return await self._task

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Every event from now on, until the run ends; its error is raised by ``result``."""
        async for event in self.recorder.events():
            yield event

    def wrap_up(self) -> None:
        """Stop the work and answer with what there is."""
        self._wanted = Stop.CANCELLED
        if self._run is not None:
            self._run.close_in(Stop.CANCELLED)

    def cancel(self) -> None:
        """End at once, without an answer."""
        self._task.cancel()

    def state(self) -> list[tuple[str, float, float]]:
        """(name, spent, limit) for each limit of the run, for a budget bar."""
        return self._run.ledger.state() if self._run is not None else []

    # --- the run itself
    # ----------------------------------------------------------------------------------------

    async def _drive(self) -> Result:
        outcome = CallOutcome(Stop.ERROR, error="the run did not start")
        run: RunState | None = None
        try:
            async with self._use as resources:
                context = await self._context(resources)
                models = self._setup.connect(resources)
                if not self._is_direct(models):
                    # where there is none, nothing is asked and nothing recorded
                    resources.sandbox()
                self._run = run = self._make_run(
                    resources, models
                )  # refuses limits that cannot be kept
                self._started(context)
                if self._wanted is not None:
                    run.close_in(self._wanted)
                outcome = await self._answer(run, models, context)
        except asyncio.CancelledError:
            outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
            raise
        except RamifyError as error:
            outcome = CallOutcome(Stop.ERROR, error=str(error), failure=error)
            if run is None:
                raise
        except BaseException as error:
            outcome = CallOutcome(Stop.ERROR, error=repr(error), failure=error)
            raise
        finally:
            self._ended(outcome, run)
        return self._result(outcome, run)

    async def _context(self, resources: LoopResources) -> SharedContext | None:
        """The context, encoded once; large ones away from the event loop. Stored by content if
        there is a store."""
        if self._thread is not None and self._thread.context is not None:
            return self._thread.context
        value, blobs = self._question.context, self._setup.blobs
        if value is None:
            return None

        def prepare() -> SharedContext:
            try:
                context = SharedContext(value)
            except SandboxError as error:  # of what the caller gave
                raise ConfigError(f"the context cannot be given to a session: {error}") from None
            if blobs is not None:
                blobs.put(context.buffer(), context.digest)
            return context

        large = observe.chars_of(value) > 1 << 20
        if large:
            resources.prepare()
        context = await asyncio.to_thread(prepare) if large else prepare()
        if self._thread is not None:
            self._thread.context = context
        return context

    def _started(self, context: SharedContext | None) -> None:
        schema = self._question.kind.schema if self._question.kind else None
        config = {
            **self._setup.config,
            "answer_schema": schema,
            "cite": self._question.cite,
            "about": self._question.about,
        }
        self.recorder.emit(
            RunStarted(
                at_s=self.recorder.now(),
                id=self.id,
                question=self._question.text,
                started_at=time.time(),
                task=str(config.get("task", "")),
                context=context_ref(context),
                config=config,
            )
        )

    def _make_run(self, resources: LoopResources, models: RunModels) -> RunState:
        setup = self._setup
        tools = setup.tools.plus(self._question.tools), setup.child_tools.plus(self._question.tools)
        return RunState(
            setup,
            resources,
            models,
            self.recorder,
            tools=tools,
            recording=self._recording,
            cache=self._cache,
            on_session=self._question.on_session,
        )

    async def _answer(
        self, run: RunState, models: RunModels, context: SharedContext | None
    ) -> CallOutcome:
        try:
            answer = self._answer_directly if self._is_direct(models) else self._answer_by_loop
            return await answer(run, models.rlm(0), context)
        finally:
            run.finish()

    def _is_direct(self, models: RunModels) -> bool:
        """Whether one plain call will do."""
        if self._thread is not None or self._search is not None:
            return False
        has_tools = bool(self._setup.tools.functions or self._setup.tools.values)
        return self._question.is_direct(self._setup.scaffold, models.rlm(0).window, has_tools)

    async def _answer_directly(
        self, run: RunState, client: Client, context: SharedContext | None
    ) -> CallOutcome:
        asked = self._question
        call = LiveCall("0", "lm", client, 0, asked.text, context=context)
        prompt = observe.plain_prompt(asked.text, asked.context)
        system = run.scaffold.direct_system if asked.context is not None else None
        prompt = f"{prompt}\n\n{asked.about}" if asked.about else prompt
        run.begin(call)
        outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
        try:
            outcome = await ask_plain(run, call, prompt, asked.kind, system=system)
        finally:
            run.end(call, outcome)
        return outcome

    async def _answer_by_loop(
        self, run: RunState, client: Client, context: SharedContext | None
    ) -> CallOutcome:
        thread = self._thread
        before = thread.loop if thread is not None else None
        call = LiveCall(
            str(thread.num_questions) if thread else "0",
            "rlm",
            client,
            0,
            self._question.text,
            context=context,
        )
        loop = RlmLoop(run, call, before, self._search)
        fork = None
        if before is not None and before.call.messages:
            call.go_on_from(before.call)
            fork = Fork(before.call.id, before.call.turn - 1)
        message = run.first_message(call, self._question.about, is_next=before is not None)
        if thread is not None:
            thread.loop, thread.num_questions = loop, thread.num_questions + 1
        run.begin(call, fork)
        outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
        try:
            outcome = await loop.answer(message, self._question.kind)
        except RamifyError as error:
            outcome = CallOutcome(Stop.ERROR, error=str(error), failure=error)
        finally:
            if thread is None:
                await loop.chosen.close()
            else:
                thread.loop = loop.chosen
            run.end(call, loop.own or outcome)
        self._answered_by = loop.chosen.call.id if loop.own else ""
        return outcome

    def _ended(self, outcome: CallOutcome, run: RunState | None) -> None:
        try:
            if self.recorder.trajectory.id:
                self.recorder.emit(
                    RunEnded(
                        at_s=self.recorder.now(),
                        stop=outcome.stop,
                        answer=jsonable(outcome.answer),
                        error=outcome.error,
                        usage=run.ledger.usage if run else Usage(),
                        cost=run.ledger.cost if run else None,
                        answered_by=self._answered_by,
                    )
                )
        finally:
            if run is not None:
                run.finish()
            self._close()

    def _result(self, outcome: CallOutcome, run: RunState) -> Result:
        answer, citations = outcome.answer, ()
        if isinstance(answer, CitedAnswer):
            answer, citations = answer.answer, answer.citations
        return Result(
            as_text(answer),
            answer,
            outcome.stop,
            run.ledger.usage,
            run.ledger.cost,
            self.recorder.trajectory,
            citations,
            outcome.error,
            outcome.failure,
        )


def as_text(answer: Any) -> str:
    """An answer as text: text as it is, everything else as JSON."""
    if answer is None:
        return ""
    if isinstance(answer, str):
        return answer
    plain = jsonable(answer)
    try:
        return msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:  # half a surrogate pair in it, which only an escape can show
        return json.dumps(plain, separators=(",", ":"))


def checked(result: Result) -> Result:
    """``result``, or the error that left it without an answer."""
    if result.stop is Stop.ERROR and result.answer is None:
        raise (
            result.failure
            if isinstance(result.failure, RamifyError)
            else RamifyError(result.error or "no answer")
        )
    return result
