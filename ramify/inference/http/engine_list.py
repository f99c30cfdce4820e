"""The list of usable engines, for a client that samples from them while another process updates
their weights. That process sends the list and is notified when an engine stops answering.

    an engine stops answering ── gone(url) ──▶ the updating process brings it back
                                                   │
               it is used again ◀── new list ──────┘   possibly with a new address

An engine is only usable again once a list that arrived after its loss names it. It then has the
newest weights, since it is not listed before.

Not here: how lists travel (see ``train/placement/rollout_workers.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ramify.errors import ConfigError


class EngineList:
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
