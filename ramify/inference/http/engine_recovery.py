"""Recovery of lost inference engines: bringing them back, and waiting for them.

    an engine is lost ── may it return? ── bring it back ── ready ── new weights ──▶ it answers
                             └ no: it was lost more than ``restarts`` times since it last took
                               a new version; the others continue without it

"Bring it back" means to start the engine again or to wait for it, and to check it. An engine that
is back has old weights, so it is not used before it gets the current ones: with the next update, or
from the callback ``on_return``.

A client that samples while another process updates the weights uses an ``AvailableEngineUrls``
instead. The other process sends the list of engines to it, and is notified when an engine stops
answering.

    an engine stops answering ── gone(url) ──▶ the updating process brings it back
                                                   │
               it is used again ◀── new list ──────┘   possibly with a new address

Such a client uses an engine again only when a list that arrived after the loss names the engine.
The engine then has the newest weights, since it is not listed before.

How an engine is started and checked is in ``http_engines.py`` and ``engine_process.py``, and how
lists are sent in ``train/placement/rollout_workers.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ramify.actors.restarts import ProcessRestartLimiter, cancel_all, retry_until_started
from ramify.errors import ConfigError
from ramify.inference.http.engine_client import EngineClient
from ramify.logging import ComponentLogger

_log = ComponentLogger("inference")


class EngineAvailabilityTracker:
    """Tracks which engines were lost and which have recovered.

    It belongs to one event loop.
    """

    def __init__(
        self,
        restarts: int,
        bring: Callable[[str], Awaitable[EngineClient]],
    ) -> None:
        """Create a tracker that has not recorded any losses of engines yet.

        ``restarts`` is how often one engine may be lost between two weight updates before it is
        given up. ``bring`` is called with the address of a lost engine. It returns the engine once
        it answers and passes all checks, and raises RamifyError if that fails.
        """
        self._bring = bring
        self.on_return: Callable[[], Awaitable[None]] | None = None
        """Called when lost engines have come back, to give them the newest weights. It handles its
        own errors."""
        self.ready: list[EngineClient] = []
        """Engines that have come back but do not have the current weights yet."""
        self.reasons: list[str] = []
        """Why engines were lost, oldest first."""
        self.num_lost = 0
        self.num_back = 0
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._restarts = ProcessRestartLimiter(restarts, _log, "engine")
        self._news = asyncio.Event()

    @property
    def returning_urls(self) -> set[str]:
        """The addresses of lost engines that are being recovered."""
        return set(self._coming)

    @property
    def is_any_expected(self) -> bool:
        return bool(self._coming or self.ready)

    @property
    def is_any_returning(self) -> bool:
        """True while at least one lost engine is being recovered."""
        return bool(self._coming)

    def handle_loss(self, url: str, why: str, rest: str, again: str, **fields: Any) -> None:
        """Log the loss of an engine, and start to recover the engine.

        An engine that was lost too often is not recovered. ``rest`` says in the log message which
        engines remain, and ``again`` says how this one comes back. ``fields`` are added to the log
        record.
        """
        self.num_lost += 1
        self.reasons.append(why)
        if self._restarts.decide_restart(url, f"{why}; {rest}", again, "", **fields):
            self.reconnect(url)

    def reset_losses_after_update(self) -> None:
        """Record that all live engines have loaded a new version of the weights.

        Earlier losses then no longer count.
        """
        self._restarts.reset_all_losses()

    def take_ready(self) -> list[EngineClient]:
        ready, self.ready = self.ready, []
        self.num_back += len(ready)
        return ready

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until the state of a lost engine changes: it is ready, in use again, or given up.

        Returns False if none of these happens within ``timeout_s`` seconds.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
            return True
        return False

    def notify(self) -> None:
        """Wake all tasks that wait in ``wait_for_change``."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        """Stop all attempts to bring lost engines back.

        A second call has no effect.
        """
        coming, self._coming = list(self._coming.values()), {}
        await cancel_all(coming)
        for server in self.take_ready():
            await server.close()

    def reconnect(self, url: str) -> None:
        """Start reconnecting to a lost engine, or connecting to a new one."""
        self._coming[url] = asyncio.ensure_future(self._restore_server(url))

    async def _restore_server(self, url: str) -> None:
        try:
            server = await retry_until_started(
                partial(self._bring, url), partial(self._record_failure, url)
            )
            if server is None:
                return
            self._restarts.record_restart(url)
            self._restarts.transfer_losses_to_replacement(url, server.url)
            self.ready.append(server)
        finally:
            self._coming.pop(url, None)
            self.notify()
        if self.on_return is not None:
            await self.on_return()

    def _record_failure(self, url: str, error: Exception) -> bool:
        self.reasons.append(f"{url} did not come back: {error}")
        return self._restarts.decide_restart(url, self.reasons[-1])


class AvailableEngineUrls:
    """The addresses of the engines that a sampling-only client may use at present.

    The process that updates the weights sends this list. It belongs to one event loop.
    """

    def __init__(self, gone: Callable[[str], None], wait_s: float) -> None:
        """Create a list of engine addresses that is empty at first.

        ``gone`` is called with the address of an engine that does not answer. ``wait_until_listed``
        waits up to ``wait_s`` seconds.
        """
        self._gone = gone
        self._wait_s = wait_s
        self._listed: frozenset[str] = frozenset()
        self._news = asyncio.Event()

    def set(self, urls: Sequence[str]) -> None:
        """Replace the list of available engines, and wake all callers that wait for one."""
        self._listed = frozenset(urls)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def remove(self, url: str) -> None:
        """Remove an engine that no longer answers from the list, and report its loss."""
        self._listed -= {url}
        self._gone(url)

    async def wait_until_listed(self, url: str) -> None:
        """Wait until the engine with this address is in the list.

        Raises ConfigError if that takes too long.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while url not in self._listed:
                    await self._news.wait()
        except TimeoutError:
            raise ConfigError(
                f"the run did not start using it again within {self._wait_s:g} s"
            ) from None
