"""What is said while a run goes on, where no live view is drawn: nothing, or with ``--verbose`` a line for each step."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from ramify.cli.notes import Notes
from ramify.cli.text import count, dollars, one_line, seconds
from ramify.engine.running import Running
from ramify.types.event import AnyEvent, Attempted, CallEnded, CallStarted, CellRan, Noted, Replied


class Watcher(Protocol):
    """Sees a run's events as they happen."""

    def apply(self, event: AnyEvent) -> None: ...

    def watching(self, running: Running) -> contextlib.AbstractAsyncContextManager[None]:
        """While the run goes on."""
        ...


class Lines:
    """A line for each step, for those who asked for more."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def apply(self, event: AnyEvent) -> None:
        if self._notes.verbose and (line := line_of(event)):
            self._notes.say(f"{event.at_s:7.2f} s  {line}")

    @contextlib.asynccontextmanager
    async def watching(self, running: Running) -> AsyncIterator[None]:
        yield


def line_of(event: AnyEvent) -> str:
    """``event`` for a person; empty for what says nothing new."""
    match event:
        case CallStarted():
            return f"call {event.id} ({event.kind}, {event.model}): {one_line(event.question)}"
        case Replied(reply=reply):
            cost = f", {dollars(reply.cost)}" if reply.cost else ""
            paid = ", from the record" if event.cached else ""
            return (
                f"call {event.call}, turn {event.turn + 1}: reply, {count(reply.usage.total_tokens)} tokens{cost}{paid}"
            )
        case CellRan(result=cell):
            error = cell.error.strip().splitlines()[0 if cell.died else -1] if cell.error else None
            end = one_line(error or cell.value or cell.stdout)
            return f"call {event.call}, turn {event.turn + 1}: ran {seconds(cell.seconds)}: {end or '(no output)'}"
        case Attempted():
            return f"call {event.call}, turn {event.turn + 1}: {event.error}"
        case Noted():
            return f"call {event.call}: {event.text}"
        case CallEnded():
            return f"call {event.id} ended: {event.stop}" + (f": {event.error}" if event.error else "")
        case _:
            return ""
