"""State that all calls of one question share, and the record of its events.

    RLM.start ──> RunHandle ──> RlmLoop (root) ──> ModelRequests.ask ──> recorded? ──> ClientPool
                                    │                    ^
                                    └── CellHost ────────┘  llm_query: ask  rlm_query: child RlmLoop

Each event passes through ``EventRecorder`` to the journal, the trajectory and all listeners before
it is acted on. A resumed run repeats its events. Those that its journal contains already are not
written again.

``RunState.suspend`` ends a run that a person must help: nothing more is sent, the replies on their
way are recorded, and then the run's task is cancelled.

``RunState.close_in`` ends work early, at the deadline or on the user's request: requests in flight
are cancelled and charged as possibly billed, running cells are interrupted, and only final requests
("last words") are still sent. Not here: requests and their budget (see ``model_requests.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from logging import DEBUG
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ramify.engine import observe
from ramify.engine.call import CallOutcome, LiveCall, context_ref, jsonable
from ramify.engine.model_requests import ModelRequests, closed
from ramify.engine.question import Listener, Question
from ramify.engine.resources import LoopResources, RlmSetup, RunModels
from ramify.errors import ConfigError, RamifyError, ReplyCut
from ramify.logging import RoomLogger
from ramify.sandbox.base import Session
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    CallStarted,
    NoteAdded,
    ReplyReceived,
    RunEnded,
    RunResumed,
    TrajectoryFold,
)
from ramify.types.message import Reply
from ramify.types.trajectory import Fork, Stop, Trajectory

if TYPE_CHECKING:
    from ramify.engine.scaffold import Scaffold
    from ramify.engine.tool_set import ToolSet
    from ramify.sandbox.base import SharedContext
    from ramify.store.call_cache import CallCache
    from ramify.store.journal import Journal
    from ramify.store.recorded_replies import RecordedReplies

_log = RoomLogger("engine")
_CUT = "cut by close_in"
_SUSPENDED = "suspended"
_LIMITS = (Stop.MAX_TURNS, Stop.MAX_CALLS, Stop.MAX_TOKENS, Stop.MAX_COST, Stop.DEADLINE)


def checked_listener(listener: Listener | None) -> tuple[Listener, ...]:
    """Return ``listener`` as a tuple of at most one. Raises ConfigError for a coroutine
    function."""
    if inspect.iscoroutinefunction(listener):
        raise ConfigError(
            "on_event is a coroutine function, which is never awaited: give a plain function, or "
            "use stream()"
        )
    return (listener,) if listener else ()


def tracing() -> tuple[Listener, ...]:
    """Return a listener that traces one run or conversation, if this process has set up
    OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from ramify.engine.spans import span_listeners

    return span_listeners()


class EventRecorder:
    """Receives events in order; there is one per run or conversation."""

    def __init__(
        self,
        id: str,
        journal: Journal | None = None,
        listeners: tuple[Listener, ...] = (),
        *,
        held: Callable[[AnyEvent], bool] | None = None,
        since_s: float = 0.0,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        """``id`` is that of the run. ``held`` returns True for events that the journal of a resumed
        run already contains. ``since_s`` is the time on its clock at which it resumes. ``on_close``
        is called when nothing more will be recorded."""
        self.id = id
        self._on_close = on_close
        self._journal = journal
        self._listeners = list(listeners)
        self._held = held
        self._unwritten: list[AnyEvent] | None = None if held is None else []
        """New events of a resumed run that has done nothing worth writing yet."""
        self._root: str | None = None
        """Id of the root call in progress."""
        self._warnings: list[str] = []
        """Warnings from before the root call began."""
        self._fold = TrajectoryFold()
        self._began = time.perf_counter() - since_s
        self.on_trouble: Callable[[RamifyError], object] | None = None
        """Called if the disk is full and the journal uses the space that was kept free."""

    @property
    def is_stored(self) -> bool:
        return self._journal is not None

    @property
    def trajectory(self) -> Trajectory:
        return self._fold.trajectory

    def now(self) -> float:
        """Seconds since the run started."""
        return round(time.perf_counter() - self._began, 6)

    def emit(self, event: AnyEvent, *, is_written: bool = False) -> None:
        """Record ``event``. ``is_written``: the journal has it, although a resume does not repeat
        it."""
        if self._journal is not None and not is_written:
            self._write(self._journal, event)
            if self._journal.trouble is not None and self.on_trouble is not None:
                self.on_trouble(self._journal.trouble)
        self._fold.apply(event)
        if _log.wants(DEBUG):
            _log.debug(str(event.__struct_config__.tag), _place(event), at_s=event.at_s)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 -- a user's listener must not end a paid run
                self._listeners.remove(listener)
                _log.warn(
                    f"an event listener failed and is not called again: {error!r}", stacklevel=2
                )

        if isinstance(event, CallStarted) and event.parent is None:
            self._root = event.id
            warnings, self._warnings = self._warnings, []
            for text in warnings:
                self.warn(text)
        elif isinstance(event, RunEnded):
            self._root = None

    def warn(self, text: str) -> None:
        """Record a warning about the run, as a note on its root call once that has begun."""
        if self._root is None:
            self._warnings.append(text)
        else:
            note = f"warning: {text}"
            self.emit(NoteAdded(at_s=self.now(), call=self._root, text=note, is_warning=True))

    def _write(self, journal: Journal, event: AnyEvent) -> None:
        """Write ``event`` unless the journal contains it. A resumed run that asks nothing new and
        gives no answer leaves its journal unchanged."""
        if self._held is not None and self._held(event):
            return
        if self._unwritten is not None:
            self._unwritten.append(event)
            if _is_minor(event):
                return
            earlier, self._unwritten = self._unwritten[:-1], None
            for minor in earlier:
                journal.append(minor)
        journal.append(event)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` for every event from now on."""
        self._listeners.append(listener)

    def ignore(self, listener: Listener) -> None:
        """Stop calling ``listener``. Does nothing if it is not registered."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def close(self) -> None:
        """Release the journal: nothing more will be recorded."""
        if self._on_close is not None:
            self._on_close()

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield every event from now on, until the run ends."""
        queue: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.listen(queue.put_nowait)
        try:
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, RunEnded):
                    return
        finally:
            self.ignore(queue.put_nowait)


def _is_minor(event: AnyEvent) -> bool:
    """Whether ``event`` says nothing that a further resume needs."""
    match event:
        case NoteAdded() | CallStarted() | CallEnded() | RunResumed():
            return True
        case AttemptFailed():
            return not event.usage.calls
        case RunEnded():
            is_unfinished = event.stop in (Stop.ERROR, Stop.SUSPENDED, Stop.CANCELLED)
            return is_unfinished and event.answer is None
        case _:
            return False


def _place(event: AnyEvent) -> str:
    """``call 0, turn 2, cell 1``, as far as the event has them; no text of the run."""
    id = getattr(event, "call", getattr(event, "id", ""))
    parts = [f"call {id}" if id else ""]
    parts += [f"{name} {getattr(event, name)}" for name in ("turn", "cell") if hasattr(event, name)]
    return ", ".join(filter(None, parts)) or "the run"


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
        cache: CallCache | None = None,
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
        self._main = asyncio.current_task()
        recorder.on_trouble = self.suspend
        self._resources = resources
        self._tools = setup.tools.plus(question.tools), setup.child_tools.plus(question.tools)
        """Tools of the root, and of the children."""
        self._in_flight: set[asyncio.Task[Any]] = set()
        """Tasks that wait for a model, except those of final requests."""
        self._sessions: set[Session] = set()
        self._descriptions: dict[str, str] = {}
        loop, limits = asyncio.get_running_loop(), setup.limits
        self._deadline = loop.time() + limits.max_seconds
        self._alarm = loop.call_at(
            self._deadline - limits.last_word_s, self.close_in, Stop.DEADLINE
        )

    @property
    def cell_s(self) -> float:
        return self.setup.sandbox.cell_s

    @property
    def scaffold(self) -> Scaffold:
        return self.setup.scaffold

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
        self._main = None

    def suspend(self, error: RamifyError) -> None:
        """Send nothing more, and cancel the run once the replies on their way are recorded."""
        self.suspension = self.suspension or error
        self.suspend_if_quiet()

    def suspend_if_quiet(self) -> None:
        if self.suspension is not None and not self.requests.under_way:
            # Later, because a task that cancels itself as it ends would end cancelled.
            asyncio.get_running_loop().call_soon(self._cancel_main)

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

    @contextlib.contextmanager
    def until_closing(self) -> Iterator[None]:
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

    async def until_deadline(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Wait for ``work``, a final request, until the deadline; raises LimitReached then."""
        try:
            async with asyncio.timeout_at(self._deadline) as scope:
                return await work
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
        max_turns = self.setup.limits.max_turns
        return self.closing or (Stop.MAX_TURNS if num_turns >= max_turns else None)

    def was_skipped(self, call: LiveCall, turn: int, cell: int) -> bool:
        """True if the run is repeated and the recorded run was closing at this point, so the cell
        was skipped."""
        return self.recording is not None and self.recording.was_skipped(call.id, turn, cell)

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
                reason=self.reason(outcome, call.num_turns_before + call.turn),
            )
        )

    def reason(self, outcome: CallOutcome, num_turns: int) -> str:
        """Return one sentence on why a call with ``num_turns`` turns ended, with the numbers of
        the limit that ended it; empty for a final answer."""
        limits, stop = self.setup.limits, outcome.stop
        if stop is Stop.FINAL:
            return ""
        if self.suspension is not None and stop in (Stop.SUSPENDED, Stop.CANCELLED):
            return str(self.suspension)
        if stop is Stop.ERROR or isinstance(outcome.failure, ReplyCut):
            return outcome.error or ""
        if stop is Stop.MAX_TURNS:
            used = min(num_turns, limits.max_turns)  # without the request for a final reply
            return f"{used} of {limits.max_turns} turns were used: raise max_turns"
        if stop is Stop.DEADLINE:
            kept = f", and the last {limits.last_word_s:g} s are kept for the final reply"
            return (
                f"{self.recorder.now():.3g} s of {limits.max_seconds:g} s had passed{kept}: raise "
                "max_seconds"
            )
        if stop is Stop.NO_CODE:
            return (
                f"{self.scaffold.max_idle} replies in a row had neither code nor FINAL(…), so the "
                "last one was taken as the answer"
            )
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

    def first_message(self, call: LiveCall, about: str = "", *, is_next: bool = False) -> str:
        """Return the first message of ``call``. ``is_next`` means that it follows another question
        of a conversation."""
        if is_next and not self.scaffold.first:
            return f"The next question: {call.question}"
        value = "" if call.context is None else call.context.value
        description = "" if self.scaffold.first else self._description(call.context)
        return self.scaffold.first_message(call.question, value, description, about)

    def _description(self, context: SharedContext | None) -> str:
        """Return the description of ``context`` for a model, computed once, because children share
        large contexts."""
        if context is None:
            return observe.describe("")
        if context.digest not in self._descriptions:
            self._descriptions[context.digest] = observe.describe(context.value)
        return self._descriptions[context.digest]

    def system_prompt(self, depth: int) -> str:
        limits = self.setup.limits
        return self.scaffold.system_prompt(
            depth=depth,
            children=depth < limits.max_depth,
            tools=self.tools_at(depth).describe(),
            limits=f"You have {limits.max_turns} turns; each of your messages is one.",
        )

    # --- sessions ---------------------------------------------------------------------------------

    def tools_at(self, depth: int) -> ToolSet:
        return self._tools[min(depth, 1)]

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
