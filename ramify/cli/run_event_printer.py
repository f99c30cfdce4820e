"""Print the steps of a run as lines, for displays without the live view of ``live_run_view.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ramify.cli.progress_display import ProgressDisplay
from ramify.cli.terminal_text import (
    StderrMessageWriter,
    format_count,
    format_dollars,
    format_duration,
    shorten_to_line,
)
from ramify.clients.rate_limited_requests import RETRYING
from ramify.engine.run_handle import RunHandle
from ramify.logging import current_console
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
)

_AS_STEPS = ("retry", "limit", "session_died")
"""Log events that are not printed, because a step of the run reports the same thing."""


class RunEventPrinter:
    """Prints the events of a run while it is in progress.

    With ``--progress json`` each step is a JSON object, and with ``--verbose`` it is a line.
    Otherwise only outages are reported.
    """

    def __init__(self, notes: StderrMessageWriter, screen: ProgressDisplay) -> None:
        self._notes = notes
        self._screen = screen
        self._failed: RequestAttemptFailed | None = None
        """The previous event, if it is a failed attempt that has not been printed yet because the
        next event may repeat its error."""
        self._num_retries = 0
        """Number of retries since the last reply."""
        console = current_console()
        if notes.verbose and screen.form != "json" and console is not None:
            console.hidden.update(_AS_STEPS)

    def apply(self, event: AnyEvent) -> None:
        if self._screen.form == "json":
            if line := describe_event(event):
                call = (
                    event.id
                    if isinstance(event, CallStarted | CallEnded)
                    else getattr(event, "call", "")
                )
                self._screen.write_json_event(
                    "step", kind=event.__struct_config__.tag, call=call, text=line
                )
        elif self._notes.verbose:
            self._say_step(event)
        elif self._screen.form != "live":
            self._say_waiting(event)

    def _say_waiting(self, event: AnyEvent) -> None:
        """Tell the user, once per outage, that the run is waiting for the model's server.

        The message appears at the second failure.
        """
        if isinstance(event, ReplyReceived):
            self._num_retries = 0
        elif isinstance(event, NoteAdded) and RETRYING in event.text:
            self._num_retries += 1
            if self._num_retries == 2:
                self._notes.say(f"waiting: {event.text}; --patience sets for how long")

    def _say_step(self, event: AnyEvent) -> None:
        """Print one line that describes an event of the run.

        Warnings are skipped, because they have already been printed. A failed attempt is skipped if
        the note that follows repeats its error.
        """
        failed, self._failed = self._failed, None
        note = event if isinstance(event, NoteAdded) else None
        if failed is not None and not (note and note.text.startswith(failed.error)):
            self._notes.say(f"{failed.at_s:7.2f} s  {describe_event(failed)}")
        if isinstance(event, RequestAttemptFailed):
            self._failed = event
        elif not (note and note.is_warning) and (line := describe_event(event)):
            self._notes.say(f"{event.at_s:7.2f} s  {line}")

    @contextlib.contextmanager
    def watch_run(self, running: RunHandle) -> Iterator[None]:
        yield


def describe_event(event: AnyEvent) -> str:
    """Describe an event of a run in one line.

    Returns an empty string for an event that tells the user nothing new.
    """
    match event:
        case CallStarted():
            return (
                f"call {event.id} ({event.kind}, {event.model}): {shorten_to_line(event.question)}"
            )
        case ReplyReceived(reply=reply):
            cost = f", {format_dollars(reply.cost)}" if reply.cost else ""
            origin = ", from the record" if event.cached else ""
            tokens = format_count(reply.usage.total_tokens)
            return f"call {event.call}, turn {event.turn + 1}: reply, {tokens} tokens{cost}{origin}"
        case CellRan(result=cell):
            error = cell.error.strip().splitlines()[0 if cell.died else -1] if cell.error else None
            output = shorten_to_line(error or cell.value or cell.stdout) or "(no output)"
            return (
                f"call {event.call}, turn {event.turn + 1}: ran "
                f"{format_duration(cell.seconds)}: {output}"
            )
        case RequestAttemptFailed():
            return f"call {event.call}, turn {event.turn + 1}: {event.error}"
        case NoteAdded():
            return f"call {event.call}: {event.text}"
        case CallEnded():
            return f"call {event.id} ended: {event.stop}" + (
                f": {event.error}" if event.error else ""
            )
        case _:
            return ""
