"""A served policy that gives its memory back, as vLLM and SGLang do, and who waits meanwhile.

    vLLM     POST /sleep?level=1     keys and values; weights go to main memory, where they are on a GPU
                  /sleep?level=2     weights are dropped, too: until an update has brought all of them nobody is answered
                  /sleep?level=0     nothing: it answers nobody until it is woken
                  /sleep?tags=kv_cache&mode=abort|wait|keep      these alone; weights are dropped
             POST /wake_up           all, or /wake_up?tags=weights, then an update, then /wake_up?tags=kv_cache
             GET  /is_sleeping       until all is awake
    SGLang   POST /release_memory_occupation      {"tags": ["kv_cache", "weights"]}; weights are dropped
                  /resume_memory_occupation

Requests wait until all is there again, and are refused after ten minutes; whoever asks how the
server is, is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aiohttp import web

from ramify.errors import ServerFailed
from ramify.inference.base import TAGS
from ramify.inference.local.local_client import LocalClient

Body = dict[str, Any]
_SCHEDULING = "scheduling"
"""Sleeps with everything that does, and alone at level 0, as vLLM names it."""
WAIT_S = 600.0
_NAMED = 3
"""Of the tensors that are missing an error names."""


class PolicySleep:
    """What sleeps of one server."""

    def __init__(
        self,
        client: LocalClient,
        stop: Callable[[str], Awaitable[object]],
        go_on: Callable[[], None],
        is_updating: Callable[[], bool],
        wait_s: float = WAIT_S,
    ) -> None:
        """``stop`` has nothing sampled any more, by vLLM's mode; ``go_on`` the opposite, where
        nothing else forbids it. ``wait_s``: how long a request waits."""
        self._client, self._stop, self._go_on, self._is_updating = client, stop, go_on, is_updating
        self._wait_s = wait_s
        self._asleep: set[str] = set()
        self._changing = asyncio.Lock()
        self._is_there = asyncio.Event()
        self._is_there.set()

    @property
    def asleep(self) -> list[str]:
        """What sleeps, by vLLM's tags."""
        return sorted(self._asleep)

    @property
    def is_there(self) -> bool:
        """Whether all that an answer needs is there."""
        return not self._asleep and not self._client.missing

    def told(self) -> None:
        """Let those go on who wait, where all is there."""
        if self.is_there:
            self._is_there.set()

    async def wait(self) -> None:
        """Return once all is there. Raises ServerFailed where that takes too long."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._is_there.wait()
        except TimeoutError:
            raise ServerFailed(
                f"nobody was answered for {self._wait_s:g} s: "
                f"{self.why() or 'an update brought its weights just now'}"
            ) from None

    def why(self) -> str:
        """Why nobody is answered; empty where all is there."""
        if self._asleep:
            return f"the server sleeps ({', '.join(self.asleep)}): POST /wake_up"
        missing = self._client.missing
        if missing:
            return (
                f"the server gave its weights back while it slept, and {len(missing)} have not "
                "been brought since, as "
                f"{', '.join(missing[:_NAMED])}: send all of them"
            )
        return ""

    # --- routes
    # --------------------------------------------------------------------------------------------------

    async def sleep(self, http: web.Request, _: Body) -> Body:
        level, tags = int(http.query.get("level", "1")), http.query.getall("tags", [])
        if level not in (0, 1, 2):
            raise ValueError(f"level={level}: give 0, 1 or 2")
        wanted = _known(tags) if tags else TAGS if level else ()
        await self._fall_asleep(
            wanted, http.query.get("mode", "abort"), keep=not tags and level == 1
        )
        return {"status": "asleep"}

    async def release(self, _: web.Request, body: Body) -> Body:
        await self._fall_asleep(_known(body.get("tags") or TAGS), "abort", keep=False)
        return {"status": "asleep"}

    async def wake(self, http: web.Request, _: Body) -> Body:
        tags = http.query.getall("tags", [])
        return await self._wake_up(_known(tags) if tags else TAGS)

    async def resume(self, _: web.Request, body: Body) -> Body:
        return await self._wake_up(_known(body.get("tags") or TAGS))

    async def tell(self, _: web.Request, __: Body) -> Body:
        return {"is_sleeping": bool(self._asleep)}

    async def _fall_asleep(self, tags: Collection[str], mode: str, *, keep: bool) -> None:
        async with self._changing:
            if self._is_updating():
                raise RuntimeError(
                    "its weights are being updated: finish that first, then let it sleep"
                )
            before = set(self._asleep)
            self._is_there.clear()
            self._asleep.add(_SCHEDULING)
            try:
                await self._stop(mode)
                await self._client.sleep([tag for tag in tags if tag not in before], keep=keep)
            except BaseException:
                self._asleep = before
                self._go_on()
                raise
            self._asleep |= set(tags)

    async def _wake_up(self, tags: Collection[str]) -> Body:
        async with self._changing:
            await self._client.wake([tag for tag in tags if tag in self._asleep])
            self._asleep -= set(tags)
            if not self._asleep & set(TAGS):
                self._asleep.clear()
            self._go_on()
        return {"status": "awake"}


def _known(tags: Collection[str]) -> Collection[str]:
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags={str(tags)[:80]}: give some of {', '.join(TAGS)}")
    return tags
