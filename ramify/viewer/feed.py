"""Runs and trainings that somebody looks at: each is read by one task, however many pages follow
it.

    file grows ── looked at every 20 ms while a page follows ──> refresh ──> one message to each page's queue

A page that comes late, or comes back, says which version it has and is sent what it missed. Decides
how often files are looked at and what is kept in memory; leaves out HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ramify.viewer.picture import changes
from ramify.viewer.run_kinds import LocatedRun
from ramify.viewer.training import TrainingCurves
from ramify.viewer.watched_run import WatchedRun

INTERVAL_S = 0.02
"""Between looks at a file that is written and followed."""
IDLE_INTERVAL_S = 0.25
"""The same, where nobody writes it."""
_LOOKS_PER_ROLL_CALL = 25
"""After so many looks without growth it is asked whether the writer lives."""
_SMALL_BYTES = 1 << 18
"""More than this is read in a thread, so that other pages need not wait."""
MAX_OPEN = 12
"""Runs that are kept in memory."""

T = TypeVar("T", bound=WatchedRun | TrainingCurves)


class FileFeed(Generic[T]):
    """One file that is looked at, and the pages that follow it."""

    def __init__(self, watched: T) -> None:
        self.watched: T = watched
        self.lock = asyncio.Lock()
        """Held while it is read on, or read in a thread."""
        self._queues: set[asyncio.Queue[Any]] = set()
        self._task: asyncio.Task[None] | None = None

    async def fresh(self) -> T:
        """It, with all that its file has."""
        async with self.lock:
            self._tell(await asyncio.to_thread(self.watched.refresh))
        return self.watched

    async def inspect(self, look: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
        """What ``look`` finds in it, in a thread, while nothing changes."""
        async with self.lock:
            return await asyncio.to_thread(look, self.watched)

    async def follow(self, version: int) -> AsyncGenerator[dict[str, Any], None]:
        """What a page that has ``version`` missed, then every change; ends when the server does."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues.add(queue)
        try:
            missed = await self._missed(version)
            if missed is not None:
                yield missed
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._look())
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

    async def _missed(self, version: int) -> dict[str, Any] | None:
        async with self.lock:
            run = self.watched
            if isinstance(run, TrainingCurves):
                return run.data() if run.version != version else None
            missed = [node.index for node in run.tree.order if node.version > version]
            return changes(run, missed) if missed or run.version != version else None

    async def _look(self) -> None:
        """As long as there are pages: often while somebody writes, and then now and again, since a
        run may be scored long after its end, or gone on with."""
        looks = 0
        while True:
            is_live = isinstance(self.watched, TrainingCurves) or self.watched.is_alive
            is_roll_call = looks % _LOOKS_PER_ROLL_CALL == 0
            looks += 1
            if self.watched.size_changed() or (is_roll_call and is_live):
                async with self.lock:
                    big = _unread(self.watched) > _SMALL_BYTES
                    changed: set[int] | bool = (
                        await asyncio.to_thread(self.watched.refresh)
                        if big
                        else self.watched.refresh()
                    )
                    self._tell(changed)
            await asyncio.sleep(INTERVAL_S if is_live else IDLE_INTERVAL_S)

    def _tell(self, changed: set[int] | bool) -> None:
        if not self._queues:
            return
        run = self.watched
        if isinstance(run, TrainingCurves):
            message = run.data() if changed else None
        else:
            told = (run.generation, run.version, run.is_alive, run.problem, run.damage, run.torn)
            message = (
                changes(run, changed if isinstance(changed, set) else ())
                if told != self._told
                else None
            )
            self._told = told
        for queue in self._queues if message is not None else ():
            queue.put_nowait(message)

    _told: tuple[object, ...] = ()
    """What the pages' head was made of when they were last sent it."""


class FileFeeds:
    """The feeds of a server; the least lately used are given up, unless a page follows them."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, FileFeed[WatchedRun]] = OrderedDict()
        self._trainings: dict[Path, FileFeed[TrainingCurves]] = {}

    def run(self, found: LocatedRun) -> FileFeed[WatchedRun]:
        known = self._runs.get(found.key)
        if known is None or known.watched.path != found.path or known.watched.is_stale():
            self._runs[found.key] = FileFeed(WatchedRun(found))
        self._runs.move_to_end(found.key)
        idle = [key for key, feed in self._runs.items() if not feed._queues]
        for key in idle[: max(0, len(self._runs) - MAX_OPEN)]:
            del self._runs[key]
        return self._runs[found.key]

    def training(self, folder: Path) -> FileFeed[TrainingCurves]:
        if folder not in self._trainings:
            self._trainings[folder] = FileFeed(TrainingCurves(folder))
        return self._trainings[folder]

    async def close(self) -> None:
        for run in self._runs.values():
            await run.close()
        for training in self._trainings.values():
            await training.close()


def _unread(watched: WatchedRun | TrainingCurves) -> int:
    try:
        return watched.path.stat().st_size - watched.offset
    except OSError:
        return 0
