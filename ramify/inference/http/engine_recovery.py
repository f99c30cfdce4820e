"""Engines that were lost: whether they come back, and how callers wait for one.

    an engine is lost ── may it return? ── bring it back ── ready ── new weights ──▶ it answers
                             └ no: it was lost more than ``restarts`` times since it last took
                               a new version; the others continue without it

"Bring it back" starts the engine again or waits for it, and checks it. An engine that is back has
old weights, so it is not used before it gets the current ones: with the next update, or from the
callback ``on_return``.

A client that samples while another process updates the weights has an ``AvailableEngineUrls``
instead. That process sends the list and is notified when an engine stops answering.

    an engine stops answering ── gone(url) ──▶ the updating process brings it back
                                                   │
               it is used again ◀── new list ──────┘   possibly with a new address

An engine is only usable again once a list that arrived after its loss names it. It then has the
newest weights, since it is not listed before.

Not here: how an engine is started and checked (see ``http_engines.py`` and ``engine_process.py``),
and how lists travel (see ``train/placement/rollout_workers.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ramify.actors.restarts import ProcessRestartLimiter, cancel_all, until_started
from ramify.errors import ConfigError
from ramify.inference.http.engine_client import EngineClient
from ramify.logging import ComponentLogger

_log = ComponentLogger("inference")


class EngineMembership:
    """Tracks lost and returning engines. Belongs to one event loop."""

    def __init__(
        self,
        restarts: int,
        bring: Callable[[str], Awaitable[EngineClient]],
    ) -> None:
        """``restarts`` is how often one engine may be lost without having taken a new version in
        between. ``bring`` returns the engine at an address once it answers and passes the checks.
        It raises RamifyError if that does not happen in time."""
        self._bring = bring
        self.on_return: Callable[[], Awaitable[None]] | None = None
        """Gives the newest weights to ready engines; it handles its own errors."""
        self.ready: list[EngineClient] = []
        """Engines that are back but do not have the current weights."""
        self.reasons: list[str] = []
        """Why each lost engine was lost, in order."""
        self.num_lost = 0
        self.num_back = 0
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._restarts = ProcessRestartLimiter(restarts, _log, "engine")
        self._news = asyncio.Event()

    @property
    def expected(self) -> set[str]:
        """Addresses of the engines that are expected back."""
        return set(self._coming)

    @property
    def is_any_expected(self) -> bool:
        return bool(self._coming or self.ready)

    @property
    def is_any_coming(self) -> bool:
        """Whether an engine is being brought back."""
        return bool(self._coming)

    def record_loss(self, url: str, why: str, rest: str, again: str, **fields: Any) -> None:
        """Log the loss of an engine, and expect it back unless it has been lost too often. ``rest``
        says which engines remain, and ``again`` how the engine comes back. ``fields`` are added to
        the log record."""
        self.num_lost += 1
        self.reasons.append(why)
        if self._restarts.failed(url, f"{why}; {rest}", again, "", **fields):
            self.expect(url)

    def record_update(self) -> None:
        """Record that all live engines have taken a new version: earlier losses no longer count."""
        self._restarts.all_succeeded()

    def take_ready(self) -> list[EngineClient]:
        ready, self.ready = self.ready, []
        self.num_back += len(ready)
        return ready

    async def news(self, timeout_s: float) -> bool:
        """Return True once an engine is ready, answers, or is given up; False after
        ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
            return True
        return False

    def notify(self) -> None:
        """Wake all callers that wait for news."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        """Stop waiting for engines. Idempotent."""
        coming, self._coming = list(self._coming.values()), {}
        await cancel_all(coming)
        for server in self.take_ready():
            await server.close()

    def expect(self, url: str) -> None:
        """Start to wait for an engine, also for one that was never asked."""
        self._coming[url] = asyncio.ensure_future(self._return(url))

    async def _return(self, url: str) -> None:
        try:
            server = await until_started(partial(self._bring, url), partial(self._failed, url))
            if server is None:
                return
            self._restarts.started(url)
            self._restarts.moved(url, server.url)
            self.ready.append(server)
        finally:
            self._coming.pop(url, None)
            self.notify()
        if self.on_return is not None:
            await self.on_return()

    def _failed(self, url: str, error: Exception) -> bool:
        self.reasons.append(f"{url} did not come back: {error}")
        return self._restarts.failed(url, self.reasons[-1])


class AvailableEngineUrls:
    """Addresses of the engines that may be asked. Belongs to one event loop."""

    def __init__(self, gone: Callable[[str], None], wait_s: float) -> None:
        """``gone`` is called with the address of an engine that does not answer; ``wait_for`` then
        waits ``wait_s`` seconds for that engine."""
        self._gone = gone
        self._wait_s = wait_s
        self._listed: frozenset[str] = frozenset()
        self._news = asyncio.Event()

    def set(self, urls: Sequence[str]) -> None:
        """Replace the list by ``urls``."""
        self._listed = frozenset(urls)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def remove(self, url: str) -> None:
        """Remove an engine that does not answer, and report it."""
        self._listed -= {url}
        self._gone(url)

    async def wait_for(self, url: str) -> None:
        """Return once ``url`` is listed. Raises ConfigError if it is not listed in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                while url not in self._listed:
                    await self._news.wait()
        except TimeoutError:
            raise ConfigError(
                f"the run did not list it as usable again within {self._wait_s:g} s"
            ) from None
