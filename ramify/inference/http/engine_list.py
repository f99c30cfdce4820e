"""Which engines may be asked, for who does not give them their weights: whoever does says so, and
is told who went.

    an engine goes ── gone(url) ──▶ who gives the weights brings it back ── list, with its new address ──▶ asked again

Only a list that comes after an engine went says that it is back: with the newest weights, since
nobody lists it before. Leaves out how lists travel (``train/placement/rollout_workers.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ramify.errors import ConfigError


class EngineList:
    """Belongs to one event loop."""

    def __init__(self, gone: Callable[[str], None], wait_s: float) -> None:
        """``gone`` is told the address of one that does not answer, which is then waited for so
        long."""
        self._gone, self._wait_s = gone, wait_s
        self._listed: frozenset[str] = frozenset()
        self._news = asyncio.Event()

    def told(self, urls: Sequence[str]) -> None:
        """The list of now."""
        self._listed = frozenset(urls)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def went(self, url: str) -> None:
        self._listed -= {url}
        self._gone(url)

    async def back(self, url: str) -> None:
        """Return once ``url`` is listed. Raises ConfigError where it is not in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                while url not in self._listed:
                    await self._news.wait()
        except TimeoutError:
            raise ConfigError(
                f"nobody said within {self._wait_s:g} s that it may be asked again"
            ) from None
