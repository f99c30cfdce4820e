"""Follows the run of one request: its progress as text, in order, and its result.

    events of the run ──apply──> pending text ──texts──> streaming response

The run never waits for a slow reader, and no text is lost: text that arrived meanwhile is delivered
in one piece. Error messages of providers are hidden: only the operator sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ramify.engine.run_handle import Result, RunHandle
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


class RequestWatcher:
    """Watcher of one request's run: pass ``apply`` as its listener, then the run to ``begin``."""

    def __init__(self) -> None:
        self._progress = RunProgress()
        self._pending: list[str] = []
        self._wake = asyncio.Event()
        self._end: asyncio.Future[Result] | None = None
        self.running: RunHandle | None = None

    def begin(self, running: RunHandle) -> None:
        self.running = running
        self._end = asyncio.ensure_future(running.result())
        self._end.add_done_callback(lambda _: self._wake.set())

    def apply(self, event: AnyEvent) -> None:
        if text := self._progress.text_of(event):
            self._pending.append(text)
        self._wake.set()

    async def texts(self, patience_s: float) -> AsyncGenerator[str, None]:
        """Yield the progress as it arrives, until the run ends.

        Nothing is yielded before the first reply of a model, so that a request that fails at once
        can still be answered with an error status. After ``patience_s`` seconds without progress,
        an empty text is yielded.
        """
        assert self._end is not None
        is_waiting = True
        while not self._end.done():
            try:
                async with asyncio.timeout(patience_s):
                    await self._wake.wait()
            except TimeoutError:
                is_waiting = False
                yield self._take_pending()
                continue
            self._wake.clear()
            is_waiting = is_waiting and not self._progress.has_reply
            if self._pending and not is_waiting:
                yield self._take_pending()
        if self._pending and self._progress.has_reply:
            yield self._take_pending()

    async def result(self) -> Result:
        """Wait for the result. Cancelling this call cancels the run."""
        assert self._end is not None
        return await self._end

    async def stop(self) -> None:
        """Cancel the run if it is still in progress, and wait until it has ended."""
        if self._end is not None:
            self._end.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.wait({self._end})

    def _take_pending(self) -> str:
        text = "".join(self._pending)
        self._pending.clear()
        return text
