"""A run's events -> lines of progress for whoever waits: what the root thinks and runs, what its
sub-calls come to.

Decides what of a run its caller sees while it goes on. What a provider said in an error stays with
the operator.
"""

from __future__ import annotations

from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
)
from ramify.types.message import encodable

_MOST_CHARS = 2000
"""Of one message of the root."""
_LINE_CHARS = 200


class RunProgress:
    """The progress of one run: events in, text out."""

    def __init__(self) -> None:
        self.has_reply = False
        """Whether a model has answered, so that the request was a good one."""
        self._roots: set[str] = set()
        """Sessions at depth 0: the root and its branches."""

    def text_of(self, event: AnyEvent) -> str:
        """What is to be told of ``event``, with its line's end; empty for nothing."""
        return encodable(self._text(event))

    def _text(self, event: AnyEvent) -> str:
        match event:
            case CallStarted(depth=0):
                if event.kind == "rlm":
                    self._roots.add(event.id)
                return ""
            case CallStarted():
                return f"call {event.id} ({event.kind}): {_line(event.question)}\n"
            case ReplyReceived():
                self.has_reply = True
                said = event.reply.message.content.strip()
                return (
                    f"turn {event.turn + 1}\n{_cut(said)}\n"
                    if said and event.call in self._roots
                    else ""
                )
            case CellRan(result=cell):
                end = (
                    cell.error.strip().splitlines()[0 if cell.died else -1]
                    if cell.error
                    else cell.value or cell.stdout
                )
                return (
                    f"call {event.call} ran {cell.seconds:.1f} s: {_line(end) or '(no output)'}\n"
                )
            case AttemptFailed():
                return f"call {event.call}: a request failed\n"
            case NoteAdded():
                return (
                    f"call {event.call}: {_line(event.text)}\n"
                    if "trying again" not in event.text
                    else ""
                )
            case CallEnded() if event.id not in self._roots and "." in event.id:
                return f"call {event.id} ended: {event.stop}\n"
            case _:
                return ""


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} […]"


def _line(text: str) -> str:
    line = " ".join(text[: 4 * _LINE_CHARS].split())
    return line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…"
