"""Record the events of a run.

Each event is written to the journal (a file), added to the trajectory in memory, and passed to the
listeners.

    event ──> EventRecorder ──> journal, then trajectory, then listeners ──> the run proceeds

A resumed run repeats its events; those that are already in its journal are not written again. The
meaning of each event is defined in ``types/event.py``, and the journal's file format in ``store/``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from logging import DEBUG
from typing import TYPE_CHECKING

from ramify.errors import ConfigError, EventLoopBlockedError, RamifyError, StoreError
from ramify.logging import ComponentLogger
from ramify.sandbox.base import SharedContextValue
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    Listener,
    NoteAdded,
    RequestAttemptFailed,
    RunEnded,
    RunResumed,
    TrajectoryBuilder,
)
from ramify.types.trajectory import Call, ContextRef, Stop, Trajectory

if TYPE_CHECKING:
    from ramify.store.base import RunJournal
    from ramify.store.live_replies import LiveReplyFileWriter

_log = ComponentLogger("engine")


def as_listeners(listener: Listener | None) -> tuple[Listener, ...]:
    """Return a tuple with ``listener``, or an empty tuple if it is None.

    Raises ConfigError for a coroutine function, because it would never be awaited.
    """
    if inspect.iscoroutinefunction(listener):
        raise ConfigError(
            "on_event is a coroutine function, which is never awaited: give a plain function, or "
            "use stream()"
        )
    return (listener,) if listener else ()


def tracing() -> tuple[Listener, ...]:
    """Return the listeners that send OpenTelemetry spans for one run or conversation.

    The tuple is empty if this process has not set up OpenTelemetry.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from ramify.engine.opentelemetry_spans import tracing_listeners

    return tracing_listeners()


class EventRecorder:
    """Records the events of one run or conversation in order.

    Each event is written to the journal (a file), added to the trajectory (the record in memory),
    and passed to the listeners.
    """

    def __init__(
        self,
        id: str,
        journal: RunJournal | None = None,
        listeners: tuple[Listener, ...] = (),
        *,
        held: Callable[[AnyEvent], bool] | None = None,
        since_s: float = 0.0,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        """Create the recorder of the run with the given ``id``.

        To resume a run, pass ``held`` and ``since_s``. ``held`` returns True for an event that the
        journal already contains. ``since_s`` is the time in seconds on the run's clock at which the
        run resumes. ``on_close`` is called when nothing more will be recorded.
        """
        self.id = id
        self._on_close = on_close
        self._journal = journal
        self._listeners = list(listeners)
        self._held = held
        self._unwritten: list[AnyEvent] | None = None if held is None else []
        """New events of a resumed run that has done nothing worth writing yet."""
        self._root: str | None = None
        """Id of the root call in progress."""
        self._sealed: EventLoopBlockedError | None = None
        self._warnings: list[str] = []
        """Warnings from before the root call began."""
        self._fold = TrajectoryBuilder()
        self._began = time.perf_counter() - since_s
        self.on_trouble: Callable[[RamifyError], object] | None = None
        """Called if the disk is full and the journal uses the space that was kept free."""

    @property
    def is_stored(self) -> bool:
        return self._journal is not None

    def live_reply_file(self) -> LiveReplyFileWriter | None:
        """Return the writer of the live reply file, or None if the run is not stored.

        The file shows replies while they arrive.
        """
        return None if self._journal is None else self._journal.live_text()

    @property
    def trajectory(self) -> Trajectory:
        return self._fold.trajectory

    def elapsed_s(self) -> float:
        """Return the seconds since the run started."""
        return round(time.perf_counter() - self._began, 6)

    def emit(self, event: AnyEvent, *, is_written: bool = False) -> None:
        """Record ``event``: write it to the journal, add it to the trajectory, and call the
        listeners.

        Pass ``is_written=True`` if the journal already has the event.
        """
        if self._sealed is not None:
            raise self._sealed
        if self._journal is not None and not is_written:
            self._write(self._journal, event)
            if self._journal.trouble is not None and self.on_trouble is not None:
                self.on_trouble(self._journal.trouble)
        self._fold.apply(event)
        if _log.is_enabled_for(DEBUG):
            _log.debug(str(event.__struct_config__.tag), _describe_place(event), at_s=event.at_s)
        for listener in tuple(self._listeners):
            call: Callable[[AnyEvent], object] = listener
            try:
                if inspect.iscoroutine(waiting := call(event)):
                    waiting.close()
                    raise TypeError("it is async: give a plain function")
            except Exception as error:  # noqa: BLE001 -- a user's listener must not end a paid run
                self._listeners.remove(listener)
                _log.issue_python_warning(
                    f"an event listener failed and is not called again: {error!r}", stacklevel=2
                )

        if isinstance(event, CallStarted) and event.parent is None:
            self._root = event.id
            warnings, self._warnings = self._warnings, []
            for text in warnings:
                self.warn(text)
        elif isinstance(event, RunEnded):
            self._root = None

    @property
    def needs_events(self) -> bool:
        """True if a resumed run must emit its recorded events again, one by one.

        This is the case if a listener, the log or the journal needs them.
        """
        journal = self._journal
        if self._listeners or self._sealed is not None or _log.is_enabled_for(DEBUG):
            return True
        return journal is not None and (self._held is None or journal.trouble is not None)

    def add_journaled_call(self, call: Call) -> None:
        """Add a complete call from the journal to the trajectory without emitting its events.

        Allowed only if ``needs_events`` is False.
        """
        self._fold.add_ended_call(call)

    def warn(self, text: str) -> None:
        """Record a warning about the run as a note on its root call.

        If the root call has not begun yet, the warning is held until it does.
        """
        if self._root is None:
            self._warnings.append(text)
        else:
            self.note(self._root, f"warning: {text}", is_warning=True)

    def note(self, call: str, text: str, *, is_warning: bool = False) -> None:
        """Record a note on the call whose id is ``call``."""
        self.emit(NoteAdded(at_s=self.elapsed_s(), call=call, text=text, is_warning=is_warning))

    def _write(self, journal: RunJournal, event: AnyEvent) -> None:
        """Write ``event`` to the journal unless the journal already contains it.

        The journal of a resumed run stays unchanged until the run asks something new or gives an
        answer.
        """
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

    def seal(self, end: RunEnded, error: EventLoopBlockedError) -> None:
        """Write the final event and release the journal of a run whose event loop is blocked.

        The final event is ``end``. Another thread calls this. If the run tries to record more,
        ``error`` is raised.
        """
        self._sealed = error
        with contextlib.suppress(StoreError):  # its journal ends as if killed
            if self._journal is not None:
                self._write(self._journal, end)
            self.close()

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with every event that is recorded from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop passing recorded events to ``listener``.

        Does nothing if the listener is not registered.
        """
        if listener in self._listeners:
            self._listeners.remove(listener)

    def close(self) -> None:
        """Release the journal, because nothing more will be recorded."""
        if self._on_close is not None:
            self._on_close()

    async def follow_events(self) -> AsyncIterator[AnyEvent]:
        """Yield every event from now on, until the run ends."""
        queue: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.add_listener(queue.put_nowait)
        try:
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, RunEnded):
                    return
        finally:
            self.remove_listener(queue.put_nowait)


def _is_minor(event: AnyEvent) -> bool:
    """Return True if ``event`` is not needed to resume the run later.

    If a resumed run records only such events, its journal stays unchanged.
    """
    match event:
        case NoteAdded() | CallStarted() | CallEnded() | RunResumed():
            return True
        case RequestAttemptFailed():
            return not event.usage.calls
        case RunEnded():
            is_unfinished = event.stop in (Stop.ERROR, Stop.SUSPENDED, Stop.CANCELLED)
            return is_unfinished and event.answer is None
        case _:
            return False


def _describe_place(event: AnyEvent) -> str:
    """Describe where in the run an event occurred, for log messages: ``call 0, turn 2, cell 1``.

    Numbers that the event does not have are left out.
    """
    id = getattr(event, "call", getattr(event, "id", ""))
    parts = [f"call {id}" if id else ""]
    parts += [f"{name} {getattr(event, name)}" for name in ("turn", "cell") if hasattr(event, name)]
    return ", ".join(filter(None, parts)) or "the run"


def context_ref(
    context: SharedContextValue | None, pictures: Iterable[str] = ()
) -> ContextRef | None:
    """Return the reference by which a call's record identifies the context of the call.

    It contains the context's digest, size, kind and files, and the digests of its pictures.
    """
    if context is None:
        return None
    files = tuple(file.reference for file in context.files)
    return ContextRef(context.digest, context.chars, context.kind, tuple(pictures), files)
