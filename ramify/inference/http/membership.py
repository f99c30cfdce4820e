"""Engines that went away: whether they come back, and what those who need one wait for.

    an engine goes ── expected? ── bring it (start it again, or wait for it; check it) ── ready ── new weights ──▶ it answers
                          └ no: it was gone ``restarts`` times since it last took a new version: others go on without it

An engine that is back has old weights, so nobody asks it before it was given those of now: by the
next update, or by whoever is told that it is there (``came``). Leaves out how one is started and
checked (``http_engines.py``, ``engine_process.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ramify.errors import RamifyError
from ramify.inference.http.engine_server import EngineServer


class EngineMembership:
    """Belongs to one event loop."""

    def __init__(
        self,
        restarts: int,
        bring: Callable[[str], Awaitable[EngineServer]],
        say: Callable[[str], None],
    ) -> None:
        """``restarts``: how often one engine may go without having taken a new version in between.
        ``bring`` returns the engine of an address once it answers and fits; raises RamifyError
        where it does not in time."""
        self._restarts, self._bring, self._say = restarts, bring, say
        self.came: Callable[[], Awaitable[None]] | None = None
        """Gives the newest weights to what is ready; it deals with its own errors."""
        self.ready: list[EngineServer] = []
        """Back, and without the weights of now."""
        self.why: list[str] = []
        """Why each that went did."""
        self.num_lost = self.num_back = 0
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._tries: dict[str, int] = {}
        self._news = asyncio.Event()

    @property
    def expected(self) -> set[str]:
        """Addresses of those that are to come."""
        return set(self._coming)

    @property
    def is_any_expected(self) -> bool:
        return bool(self._coming or self.ready)

    @property
    def is_any_coming(self) -> bool:
        """Whether one is being brought back."""
        return bool(self._coming)

    def left(self, url: str, why: str) -> bool:
        """An engine is gone; whether it is expected back."""
        self.num_lost += 1
        self.why.append(why)
        if not self._may_try(url):
            return False
        self.expect(url)
        return True

    def took(self) -> None:
        """All that answer have taken a new version: what went before counts no more."""
        self._tries.clear()

    def take_ready(self) -> list[EngineServer]:
        ready, self.ready = self.ready, []
        self.num_back += len(ready)
        return ready

    async def news(self, timeout_s: float) -> bool:
        """Return once an engine is ready, answers, or is given up; False where nothing of it
        happens in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
            return True
        return False

    def tell(self) -> None:
        """Wake all who wait for news."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        """Expect nobody any more. Idempotent."""
        coming, self._coming = list(self._coming.values()), {}
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.wait(coming)
        for server in self.take_ready():
            await server.close()

    def _may_try(self, url: str) -> bool:
        self._tries[url] = self._tries.get(url, 0) + 1
        return self._tries[url] <= self._restarts

    def expect(self, url: str) -> None:
        """An engine that was never asked is to come."""
        self._coming[url] = asyncio.ensure_future(self._return(url))

    async def _return(self, url: str) -> None:
        try:
            server = await self._until_back(url)
            self._tries[server.url] = self._tries.get(url, 0)  # it may have moved
            self.ready.append(server)
        except RamifyError:
            return
        finally:
            self._coming.pop(url, None)
            self.tell()
        if self.came is not None:
            await self.came()

    async def _until_back(self, url: str) -> EngineServer:
        while True:
            try:
                return await self._bring(url)
            except RamifyError as error:
                self.why.append(f"{url} did not come back: {error}")
                is_last = not self._may_try(url)
                self._say(f"{self.why[-1]}; it is {'given up' if is_last else 'tried again'}")
                if is_last:
                    raise
