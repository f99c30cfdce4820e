"""Where every event of a run goes, before it is acted on: journal, trajectory and whoever listens.

A resumed run goes through its events again; those that its journal already has are not written
twice.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ramify.errors import ConfigError
from ramify.types.event import AnyEvent, NoteAdded, RunEnded, TrajectoryFold
from ramify.types.trajectory import Trajectory

Listener = Callable[[AnyEvent], None]


class EventWriter(Protocol):
    """What the recorder needs of ``store.Journal``."""

    def append(self, event: AnyEvent) -> None: ...


def checked_listener(listener: Listener | None) -> tuple[Listener, ...]:
    """``listener`` as the only one, or none. Raises ConfigError for one that would have to be
    awaited."""
    if inspect.iscoroutinefunction(listener):
        raise ConfigError(
            "on_event is a coroutine function, which nothing awaits: give a plain function, or use "
            "stream()"
        )
    return (listener,) if listener else ()


class EventRecorder:
    """Events in, in order; one per run, or per conversation."""

    def __init__(
        self,
        journal: EventWriter | None = None,
        listeners: tuple[Listener, ...] = (),
        *,
        held: Callable[[AnyEvent], bool] | None = None,
        since_s: float = 0.0,
    ) -> None:
        """``held`` says which events the journal of a resumed run has already; ``since_s`` is where
        its clock stood."""
        self._journal = journal
        self._listeners = list(listeners)
        self._held = held
        self._notes: list[AnyEvent] = []
        """Notes of a resumed run that are not written yet."""
        self._fold = TrajectoryFold()
        self._began = time.perf_counter() - since_s

    @property
    def trajectory(self) -> Trajectory:
        return self._fold.trajectory

    def now(self) -> float:
        """Seconds since the run began."""
        return round(time.perf_counter() - self._began, 6)

    def emit(self, event: AnyEvent) -> None:
        if self._journal is not None:
            self._write(self._journal, event)
        self._fold.apply(event)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 -- a listener is the user's; it must not end a paid run
                self._listeners.remove(listener)
                warnings.warn(
                    f"an event listener failed and is not called again: {error!r}", stacklevel=2
                )

    def _write(self, journal: EventWriter, event: AnyEvent) -> None:
        """A resumed run that does nothing new leaves its journal as it was: a note alone waits for
        the next event."""
        if self._held is not None:
            if self._held(event):
                return
            self._notes.append(event)
            if isinstance(event, NoteAdded):
                return
            notes, self._notes = self._notes, []
            for each in notes:
                journal.append(each)
            return
        journal.append(event)

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every event from now on."""
        self._listeners.append(listener)

    def ignore(self, listener: Listener) -> None:
        """Stop telling ``listener``; nothing if it is not told any more."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Every event from now on, until the run ends."""
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
