"""Push changes in a run or training folder to the pages that show it.

Each file is polled by one task, regardless of how many pages follow it.

    file grows ── polled every 12 ms while a page follows ──> refresh ──> message to each page
    replies being streamed ── read about every 0.1 s ──> {"arriving": […]} to each page

A page that connects late, or reconnects, names the version that it has and receives the changes
since then. This module decides how often files are polled and what stays in memory. view_server.py
handles HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ramify.store.live_replies import LiveReplyFileReader
from ramify.viewer.run_lookup import LocatedRun
from ramify.viewer.run_overview import overview_update
from ramify.viewer.training_and_evaluation_pages import TrainingCurves
from ramify.viewer.watched_run import WatchedRun

INTERVAL_S = 0.012
"""Seconds between polls of a file that is being written."""
IDLE_INTERVAL_S = 0.25
"""Seconds between polls of a file that no process is writing."""
_POLLS_PER_WRITER_CHECK = 40
"""Number of polls between checks that the writer of a file is still alive."""
_POLLS_PER_LIVE_READ = 8
"""Number of polls between reads of the replies that are arriving."""
_SMALL_BYTES = 1 << 18
"""Maximum bytes to read in the event loop. More is read in a thread, so that other pages do not
wait."""
MAX_OPEN = 12
"""Maximum number of runs to keep in memory. If there are more, the least recently opened ones that
no page follows are dropped."""

T = TypeVar("T", bound=WatchedRun | TrainingCurves)
R = TypeVar("R")


class FileChangeFeed(Generic[T]):
    """Polls one file for changes and sends them to the pages that follow it."""

    def __init__(self, watched: T) -> None:
        self.watched: T = watched
        self.lock = asyncio.Lock()
        """Held while the file is being read, or while a thread uses ``watched``."""
        self._queues: set[asyncio.Queue[Any]] = set()
        self._task: asyncio.Task[None] | None = None
        self._arriving: dict[str, Any] | None = None
        """The last message about arriving replies, for pages that connect later."""

    async def refresh_watched(self) -> T:
        """Read all new content of the followed file, and return the updated ``watched`` object."""
        async with self.lock:
            self._notify(await asyncio.to_thread(self.watched.refresh))
        return self.watched

    async def call_locked(self, look: Callable[[T], R]) -> R:
        """Call ``look`` on the watched object in a thread while holding its lock, and return the
        result.

        The object cannot change during the call.
        """
        async with self.lock:
            return await asyncio.to_thread(look, self.watched)

    async def follow(self, version: int) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the changes since ``version`` and then every new change, until the server stops."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues.add(queue)
        try:
            missed = await self._missed_changes(version)
            if missed is not None:
                yield missed
            if self._arriving is not None:
                yield self._arriving
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._poll())
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)
            if not self._queues and self._task is not None:
                self._task.cancel()

    async def close(self) -> None:
        for queue in self._queues:
            queue.put_nowait(None)
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _missed_changes(self, version: int) -> dict[str, Any] | None:
        async with self.lock:
            run = self.watched
            if isinstance(run, TrainingCurves):
                return run.changes(version) if run.version != version else None
            missed = [node.index for node in run.tree.order if node.version > version]
            return overview_update(run, missed) if missed or run.version != version else None

    async def _poll(self) -> None:
        """Poll the file for changes while any page follows it.

        Polls are frequent while the file has a writer. Without one they are rare but continue,
        because a run may be scored long after its end, or resumed.
        """
        path = self.watched.journal_path if isinstance(self.watched, WatchedRun) else None
        live_text = LiveReplyFileReader(path) if path is not None else None
        try:
            await self._poll_with(live_text)
        finally:
            self._arriving = None
            if live_text is not None:
                live_text.close()

    async def _poll_with(self, live_text: LiveReplyFileReader | None) -> None:
        polls = 0
        while True:
            is_live = isinstance(self.watched, TrainingCurves) or self.watched.is_alive
            checks_writer = polls % _POLLS_PER_WRITER_CHECK == 0
            polls += 1
            if self.watched.size_changed() or (checks_writer and is_live):
                async with self.lock:
                    big = self.watched.num_unread_bytes() > _SMALL_BYTES
                    changed: set[int] | bool = (
                        await asyncio.to_thread(self.watched.refresh)
                        if big
                        else self.watched.refresh()
                    )
                    self._notify(changed)
            if live_text is not None and polls % _POLLS_PER_LIVE_READ == 0:
                self._read_arriving(live_text, is_live)
            await asyncio.sleep(INTERVAL_S if is_live else IDLE_INTERVAL_S)

    def _read_arriving(self, live_text: LiveReplyFileReader, is_live: bool) -> None:
        if not is_live:
            live_text.close()
            self._arriving = None
        elif (replies := live_text.read()) is not None:
            self._arriving = {"arriving": replies}
            for queue in self._queues:
                queue.put_nowait(self._arriving)

    def _notify(self, changed: set[int] | bool) -> None:
        run, before = self.watched, self._sent_version
        self._sent_version = run.version
        if not self._queues:
            return
        if isinstance(run, TrainingCurves):
            # A follower received all changes before this version when it began to follow.
            message = run.changes(before) if changed else None
        else:
            head = (run.generation, run.version, run.is_alive, run.problem, run.damage, run.torn)
            message = (
                overview_update(run, changed if isinstance(changed, set) else ())
                if head != self._sent_head
                else None
            )
            self._sent_head = head
        for queue in self._queues if message is not None else ():
            queue.put_nowait(message)

    _sent_head: tuple[object, ...] = ()
    """The inputs of the overview that was last sent to the pages."""
    _sent_version = -1
    """Version of ``watched`` that all pages have received."""


class FileChangeFeeds:
    """All file change feeds of a server, one for each file.

    The least recently used feeds are dropped, unless a page follows them.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, FileChangeFeed[WatchedRun]] = OrderedDict()
        self._trainings: dict[Path, FileChangeFeed[TrainingCurves]] = {}

    def feed_for_run(self, located: LocatedRun) -> FileChangeFeed[WatchedRun]:
        feed = self._runs.get(located.key)
        if feed is None or feed.watched.source != located.run or feed.watched.is_replaced():
            self._runs[located.key] = FileChangeFeed(WatchedRun(located))
        self._runs.move_to_end(located.key)
        idle = [key for key, feed in self._runs.items() if not feed._queues]
        for key in idle[: max(0, len(self._runs) - MAX_OPEN)]:
            del self._runs[key]
        return self._runs[located.key]

    def training_feed(self, folder: Path) -> FileChangeFeed[TrainingCurves]:
        if folder not in self._trainings:
            self._trainings[folder] = FileChangeFeed(TrainingCurves(folder))
        return self._trainings[folder]

    async def close(self) -> None:
        for run in self._runs.values():
            await run.close()
        for training in self._trainings.values():
            await training.close()
