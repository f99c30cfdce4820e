"""Recorder of a run's events: passes each one to the journal, the trajectory and all listeners
before it is acted on.

A resumed run repeats its events. Those that its journal already contains are not written again.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from logging import DEBUG
from typing import Protocol

from ramify.errors import ConfigError
from ramify.logging import RoomLogger
from ramify.types.event import AnyEvent, CallStarted, NoteAdded, RunEnded, TrajectoryFold
from ramify.types.trajectory import Trajectory

_log = RoomLogger("engine")
Listener = Callable[[AnyEvent], None]


class EventWriter(Protocol):
    """The part of ``store.Journal`` that the recorder uses."""

    def append(self, event: AnyEvent) -> None: ...


def checked_listener(listener: Listener | None) -> tuple[Listener, ...]:
    """Return ``listener`` as a tuple of at most one. Raises ConfigError for a coroutine
    function."""
    if inspect.iscoroutinefunction(listener):
        raise ConfigError(
            "on_event is a coroutine function, which is never awaited: give a plain function, or "
            "use stream()"
        )
    return (listener,) if listener else ()


class EventRecorder:
    """Receives events in order; there is one per run or conversation."""

    def __init__(
        self,
        journal: EventWriter | None = None,
        listeners: tuple[Listener, ...] = (),
        *,
        held: Callable[[AnyEvent], bool] | None = None,
        since_s: float = 0.0,
    ) -> None:
        """``held`` returns True for events that the journal of a resumed run already contains.
        ``since_s`` is the time on its clock at which it resumes."""
        self._journal = journal
        self._listeners = list(listeners)
        self._held = held
        self._notes: list[AnyEvent] = []
        """Notes of a resumed run that have not been written yet."""
        self._root: str | None = None
        """Id of the root call in progress."""
        self._warnings: list[str] = []
        """Warnings from before the root call began."""
        self._fold = TrajectoryFold()
        self._began = time.perf_counter() - since_s

    @property
    def trajectory(self) -> Trajectory:
        return self._fold.trajectory

    def now(self) -> float:
        """Seconds since the run started."""
        return round(time.perf_counter() - self._began, 6)

    def emit(self, event: AnyEvent) -> None:
        if self._journal is not None:
            self._write(self._journal, event)
        self._fold.apply(event)
        if _log.wants(DEBUG):
            _log.debug(str(event.__struct_config__.tag), _place(event), at_s=event.at_s)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 -- a user's listener must not end a paid run
                self._listeners.remove(listener)
                _log.warn(
                    f"an event listener failed and is not called again: {error!r}",
                    UserWarning,
                    stacklevel=2,
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

    def _write(self, journal: EventWriter, event: AnyEvent) -> None:
        """Write ``event`` unless the journal contains it. In a resumed run, a note is only written
        together with the next new event, so a run that does nothing new leaves its journal
        unchanged."""
        if self._held is not None:
            if self._held(event):
                return
            self._notes.append(event)
            if isinstance(event, NoteAdded):
                return
            notes, self._notes = self._notes, []
            for note in notes:
                journal.append(note)
            return
        journal.append(event)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` for every event from now on."""
        self._listeners.append(listener)

    def ignore(self, listener: Listener) -> None:
        """Stop calling ``listener``. Does nothing if it is not registered."""
        if listener in self._listeners:
            self._listeners.remove(listener)

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


def _place(event: AnyEvent) -> str:
    """``call 0, turn 2, cell 1``, as far as the event has them; no text of the run."""
    id = getattr(event, "call", getattr(event, "id", ""))
    parts = [f"call {id}" if id else ""]
    parts += [f"{name} {getattr(event, name)}" for name in ("turn", "cell") if hasattr(event, name)]
    return ", ".join(filter(None, parts)) or "the run"
