"""One run that somebody waits for: its progress as text, in order, and its end.

events of the run ──apply──> pending text ──texts──> whoever streams     nothing waits for a slow reader, nothing is lost:
                                                      what came meanwhile comes in one piece
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ramify.engine.run_handle import Result, RunHandle
from ramify.serve.progress_text import RunProgress
from ramify.types.event import AnyEvent


class RequestWatcher:
    """The run of one request. ``apply`` is its listener; ``begin`` says which run it is."""

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
        """The progress as it comes, until the run ends. Nothing before a model has answered, so
        that a request that fails at once can still be told so by its status; after ``patience_s``
        without news, an empty text."""
        assert self._end is not None
        is_waiting = True
        while not self._end.done():
            try:
                async with asyncio.timeout(patience_s):
                    await self._wake.wait()
            except TimeoutError:
                is_waiting = False
                yield self._taken()
                continue
            self._wake.clear()
            is_waiting = is_waiting and not self._progress.has_reply
            if self._pending and not is_waiting:
                yield self._taken()
        if self._pending and self._progress.has_reply:
            yield self._taken()

    async def result(self) -> Result:
        """Wait for the end. Cancelling this wait cancels the run."""
        assert self._end is not None
        return await self._end

    async def stop(self) -> None:
        """Cancel what still goes on, and wait until it is over."""
        if self._end is not None:
            self._end.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.wait({self._end})

    def _taken(self) -> str:
        text = "".join(self._pending)
        self._pending.clear()
        return text
