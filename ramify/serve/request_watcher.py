"""Follows the run of one request: its progress as text, in order, and its result.

    events of the run ──apply──> pending text ──texts──> streaming response

The run never waits for a slow reader, and no text is lost: text that arrived meanwhile is delivered
in one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ramify.engine.run_handle import Result, RunHandle
from ramify.serve.progress_text import RunProgress
from ramify.types.event import AnyEvent


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
