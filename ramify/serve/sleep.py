"""Sleep routes of a served policy, which release its memory, in the formats of vLLM and SGLang.

    vLLM     POST /sleep?level=0     keep all memory, but answer no request until it is woken
                  /sleep?level=1     free the KV cache; weights on a GPU move to main memory
                  /sleep?level=2     free the KV cache and drop the weights: requests wait until an
                                     update has sent all of them
                  /sleep?tags=kv_cache&mode=abort|wait|keep
                                     only the named parts; weights are dropped
             POST /wake_up           wake everything; or /wake_up?tags=weights, then a weight
                                     update, then /wake_up?tags=kv_cache
             GET  /is_sleeping       true until everything is awake
    SGLang   POST /release_memory_occupation   {"tags": ["kv_cache", "weights"]}; drops weights
                  /resume_memory_occupation

Requests wait until the engine is ready again, and fail after ten minutes. ``GET /health`` still
answers meanwhile. Not here: pausing and updating weights (see weight_routes.py).
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
"""vLLM's tag for a server that answers no request. It is set during every sleep; at level 0 it is
the only one."""
WAIT_S = 600.0
"""Seconds that a request waits for a sleeping engine."""
_NAMED = 3
"""Number of missing tensors that an error names."""


class PolicySleep:
    """Sleep state of one server: which parts are asleep, and the requests that wait for them."""

    def __init__(
        self,
        client: LocalClient,
        stop: Callable[[str], Awaitable[object]],
        resume_sampling: Callable[[], None],
        is_updating: Callable[[], bool],
        wait_s: float = WAIT_S,
    ) -> None:
        """``stop`` stops sampling in one of vLLM's modes. ``resume_sampling`` resumes it, unless
        something else forbids it. ``wait_s`` is how long a request waits.
        """
        self._client = client
        self._stop = stop
        self._resume_sampling = resume_sampling
        self._is_updating = is_updating
        self._wait_s = wait_s
        self._asleep: set[str] = set()
        self._changing = asyncio.Lock()
        self._ready = asyncio.Event()
        self._ready.set()

    @property
    def asleep(self) -> list[str]:
        """Tags (vLLM's) of the parts that are asleep."""
        return sorted(self._asleep)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered: nothing is asleep and no weights are missing."""
        return not self._asleep and not self._client.missing

    def notify_waiters(self) -> None:
        """Wake the waiting requests, if the engine is ready."""
        if self.is_ready:
            self._ready.set()

    async def wait(self) -> None:
        """Wait until the engine is ready. Raises ServerFailed after ``wait_s`` seconds."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._ready.wait()
        except TimeoutError:
            raise ServerFailed(
                f"the engine was not ready for {self._wait_s:g} s: "
                f"{self.reason() or 'a weight update has only just completed'}"
            ) from None

    def reason(self) -> str:
        """Reason why the engine is not ready, or empty."""
        if self._asleep:
            return f"the server sleeps ({', '.join(self.asleep)}): POST /wake_up"
        missing = self._client.missing
        if missing:
            return (
                f"the server dropped its weights while it slept, and {len(missing)} tensors have "
                f"not been sent since ({', '.join(missing[:_NAMED])}…): send all weights"
            )
        return ""

    # --- routes

    async def sleep(self, http: web.Request, _: Body) -> Body:
        level, tags = int(http.query.get("level", "1")), http.query.getall("tags", [])
        if level not in (0, 1, 2):
            raise ValueError(f"level={level}: give 0, 1 or 2")
        parts = _check_tags(tags) if tags else TAGS if level else ()
        await self._fall_asleep(
            parts, http.query.get("mode", "abort"), keep=not tags and level == 1
        )
        return {"status": "asleep"}

    async def release(self, _: web.Request, body: Body) -> Body:
        await self._fall_asleep(_check_tags(body.get("tags") or TAGS), "abort", keep=False)
        return {"status": "asleep"}

    async def wake(self, http: web.Request, _: Body) -> Body:
        tags = http.query.getall("tags", [])
        return await self._wake_up(_check_tags(tags) if tags else TAGS)

    async def resume(self, _: web.Request, body: Body) -> Body:
        return await self._wake_up(_check_tags(body.get("tags") or TAGS))

    async def tell_sleeping(self, _: web.Request, __: Body) -> Body:
        return {"is_sleeping": bool(self._asleep)}

    async def _fall_asleep(self, tags: Collection[str], mode: str, *, keep: bool) -> None:
        async with self._changing:
            if self._is_updating():
                raise RuntimeError(
                    "a weight update is in progress: finish it before the server sleeps"
                )
            before = set(self._asleep)
            self._ready.clear()
            self._asleep.add(_SCHEDULING)
            try:
                await self._stop(mode)
                await self._client.sleep([tag for tag in tags if tag not in before], keep=keep)
            except BaseException:
                self._asleep = before
                self._resume_sampling()
                raise
            self._asleep |= set(tags)

    async def _wake_up(self, tags: Collection[str]) -> Body:
        async with self._changing:
            await self._client.wake([tag for tag in tags if tag in self._asleep])
            self._asleep -= set(tags)
            if not self._asleep & set(TAGS):
                self._asleep.clear()
            self._resume_sampling()
        return {"status": "awake"}


def _check_tags(tags: Collection[str]) -> Collection[str]:
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags={str(tags)[:80]}: give some of {', '.join(TAGS)}")
    return tags
