"""Progress of a run as text for the client: the root's messages, its code, and its sub-calls.

This file decides which parts of a run the client sees while it is in progress. Error messages of
providers are hidden: only the operator sees them.
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
"""Maximum characters of one message of the root."""
_LINE_CHARS = 200


class RunProgress:
    """Progress of one run: takes events, returns text."""

    def __init__(self) -> None:
        self.has_reply = False
        """Whether a model has answered, which shows that the request is valid."""
        self._roots: set[str] = set()
        """Ids of the sessions at depth 0: the root and its branches."""

    def text_of(self, event: AnyEvent) -> str:
        """Return the progress text of ``event`` with its newline; empty if there is none."""
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
                content = event.reply.message.content.strip()
                return (
                    f"turn {event.turn + 1}\n{_cut(content)}\n"
                    if content and event.call in self._roots
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
