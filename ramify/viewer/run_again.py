"""Start new runs from the page of a stored run.

A new run continues the stored one from one of its turns, after an edit.

    page ──> estimate: what it may cost, or why it is refused ──> start ──> address of the new run

Such runs spend money, so a page that every user of this machine may open cannot start them
(view_server.py). They run on a separate event loop, so that the server's pages stay fast. They end
with the server, but can be resumed from their journals. An estimate needs no API key. If the
environment lacks a key, the page sends it with the start. It stays in memory until the run ends and
is stored nowhere. engine/run_fork.py decides where a fork begins and what it repeats. The command
turns a run's settings into an ``RLM``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from ramify.clients.providers import MissingApiKeyError
from ramify.engine import event_loop_thread
from ramify.engine.limits import Limits
from ramify.engine.rerun import recorded_limits
from ramify.engine.rlm import RLM
from ramify.engine.run_fork import ForkPoint, RunForkOptions
from ramify.engine.run_handle import RunHandle
from ramify.errors import ConfigError, StoreError
from ramify.store.base import RunStore
from ramify.store.folder_store import Store
from ramify.store.recorded_replies import RunEventIndex
from ramify.types.event import AnyEvent, RunStarted
from ramify.viewer.run_lookup import LocatedRun
from ramify.viewer.run_overview import struct_fields

MAX_RUNNING = 4
"""Maximum number of runs started from the pages of one server that may be in progress at once."""
T = TypeVar("T")
_UNUSED_KEY = "no-key-is-needed-for-an-estimate"


Rebuild = Callable[[RunStarted, RunStore, Mapping[str, str]], RLM]
"""A function that builds the RLM of a stored run. Its last argument has API keys by model name.
Models without an entry take their keys from the environment."""


class RerunFromTurnRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to run a stored run again from one of its turns."""

    key: str
    """Address of the stored run."""
    call: str
    turn: int
    """Index of the turn, from 0."""
    code: str | None = None
    """Edited code to run in place of the turn's reply."""
    prompt: list[str] | None = None
    """Edited texts of the messages that the turn adds to the prompt."""
    max_cost: float | None = None
    """Maximum cost of the new run in dollars. None for the limit of the stored run."""
    keys: dict[str, str] = {}
    """API keys by model name, for models without a key in the environment."""

    def __repr__(self) -> str:
        return f"RerunFromTurnRequest({self.key!r}, {self.call!r}, {self.turn})"  # without keys


class RerunStarter:
    """Starts the reruns that a page requests.

    The methods may be awaited on any event loop.
    """

    def __init__(self, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._rlms: dict[str, RLM] = {}
        """RLM of each stored run, by the run's address, without keys from pages."""
        self._lacking: dict[str, dict[str, str]] = {}
        """Models without an API key, by the address of the stored run. Each has the environment
        variable that should hold the key."""
        self._opened = AsyncExitStack()
        self._running: dict[RunHandle, asyncio.Task[str]] = {}

    async def turn_to_edit(self, located: LocatedRun, call: str, turn: int) -> dict[str, Any]:
        """Return a turn's messages and code for editing, with the estimated cost of running it
        again."""

        def look() -> tuple[ForkPoint, Limits]:
            events = list(_store_of(located).events(located.run.id))
            return ForkPoint(events, turn, call=call), recorded_limits(RunEventIndex(events))

        point, limits = await asyncio.to_thread(look)
        wanted = RerunFromTurnRequest(located.key, call, turn)
        return {
            "messages": [{"role": it.role, "text": it.content} for it in point.turn_messages],
            "code": point.turn_code,
            "max_cost": limits.max_cost,
            "estimate": await self.estimate(located, wanted),
            "keys": [
                {"model": model, "variable": variable}
                for model, variable in self._lacking[located.key].items()
            ],
        }

    async def estimate(self, located: LocatedRun, wanted: RerunFromTurnRequest) -> dict[str, Any]:
        """Estimate what a requested rerun of a stored run will cost.

        Raises RamifyError if the run would be refused.
        """
        return struct_fields(await _run_on_api_loop(self._estimate(located, wanted)))

    async def start(
        self, located: LocatedRun, wanted: RerunFromTurnRequest
    ) -> tuple[RunStore, str]:
        """Start the new run, and return its store and id.

        Raises RamifyError if the run is refused.
        """
        return await _run_on_api_loop(self._start(located, wanted))

    async def close(self) -> None:
        """Cancel all started runs that have not ended."""
        if self._rlms or self._running:
            await _run_on_api_loop(self._close())

    async def _estimate(self, located: LocatedRun, wanted: RerunFromTurnRequest) -> Any:
        lacking = self._lacking.setdefault(located.key, {})
        while True:
            if located.key not in self._rlms:
                rlm = await self._build_rlm(located, dict.fromkeys(lacking, _UNUSED_KEY))
                self._rlms[located.key] = await self._opened.enter_async_context(rlm)
            rlm = self._rlms[located.key]
            try:
                return await rlm.estimate_fork(located.run.id, wanted.turn, **_options(rlm, wanted))
            except MissingApiKeyError as missing:
                # Each round finds one model without a key, and continues with a placeholder.
                if missing.name in lacking:
                    raise
                lacking[missing.name] = missing.variable
                del self._rlms[located.key]

    async def _build_rlm(self, located: LocatedRun, keys: Mapping[str, str]) -> RLM:
        store = _store_of(located)

        def build() -> RLM:
            started = RunEventIndex(store.events(located.run.id)).started
            return self._rebuild(started, store, keys)

        return await asyncio.to_thread(build)

    async def _start(
        self, located: LocatedRun, wanted: RerunFromTurnRequest
    ) -> tuple[RunStore, str]:
        if len(self._running) >= MAX_RUNNING:
            raise ConfigError(
                f"{MAX_RUNNING} runs started from this viewer are in progress: wait for one to end"
            )
        await self._estimate(located, wanted)
        for name, variable in self._lacking[located.key].items():
            if not wanted.keys.get(name):
                raise ConfigError(
                    f"{name} needs an API key: set {variable} in the environment of ramify view, "
                    "or enter a key"
                )
        own = AsyncExitStack()  # an RLM that has keys of the page ends with its run
        rlm = self._rlms[located.key]
        if wanted.keys:
            rlm = await own.enter_async_context(await self._build_rlm(located, wanted.keys))
        options = _options(rlm, wanted)
        begun = asyncio.Event()

        def on_event(_: AnyEvent) -> None:
            begun.set()

        options["on_event"] = on_event
        handle = rlm.start_fork(located.run.id, wanted.turn, **options)
        ending = self._running[handle] = asyncio.create_task(_wait_for_end(handle, own))
        ending.add_done_callback(lambda _: self._running.pop(handle))
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait([ending, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not begun.is_set():
            raise ConfigError(ending.result() or "the run did not start")
        return _store_of(located), handle.id

    async def _close(self) -> None:
        endings = list(self._running.values())
        for handle in self._running:
            handle.cancel()
        await asyncio.gather(*endings)
        self._rlms.clear()
        await self._opened.aclose()


async def _wait_for_end(handle: RunHandle, own: AsyncExitStack) -> str:
    """Wait until a run has ended, and close the resources that only this run used.

    Returns the run's error, or an empty string.
    """
    try:
        async with own:
            return (await handle).error or ""
    except asyncio.CancelledError:
        return "cancelled"
    except Exception as error:  # noqa: BLE001 -- the run has recorded it; the page shows it
        return str(error)


def _options(rlm: RLM, wanted: RerunFromTurnRequest) -> RunForkOptions:
    options = RunForkOptions(call=wanted.call)
    if wanted.code is not None:
        options["code"] = wanted.code
    if wanted.prompt is not None:
        options["prompt"] = wanted.prompt
    if wanted.max_cost is not None:
        options["limits"] = msgspec.structs.replace(rlm.limits, max_cost=wanted.max_cost)
    return options


def _store_of(located: LocatedRun) -> RunStore:
    """Return the store that contains a run.

    Raises StoreError if the run is a file outside any store.
    """
    if located.store is not None:
        return located.store
    path = located.run.path
    if located.line is not None or path is None or path.parent.name != "runs":
        raise StoreError(f"{located.run} is not in a store: only runs in a store can be run again")
    return Store(path.parent.parent)


async def _run_on_api_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the synchronous API's event loop and await its result."""
    return await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(work, event_loop_thread.background_loop())
    )
