"""New weights to all engines, and again to those that went and came back.

    update ── pause all ─ chunks of weights to all ─ resume all ──▶ version
    sleep  ── nobody is asked … update: wake weights ─ (as above, whole) ─ wake keys and values ──▶ version

One that goes on the way is dropped, and the others get everything again; one that lacks what a
difference builds on, too. Leaves out what carries the bytes (``inference/weights``), and whether
what arrived is right (``train/selfcheck.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from ramify.errors import ConfigError, ModelError, TrainError
from ramify.inference.http.api import EngineStateConflict
from ramify.inference.http.engine_server import EngineServer
from ramify.inference.http.fleet import EngineFleet, EnginesDropped
from ramify.inference.weight_sync.base import WeightChunk, WeightSource, WeightSync


class EngineWeightSync:
    """Belongs to one event loop."""

    def __init__(
        self, fleet: EngineFleet, weight_sync: WeightSync, version: int, say: Callable[[str], None]
    ) -> None:
        self._fleet, self._weight_sync, self._say = fleet, weight_sync, say
        self.version = version
        """Of the weights that all engines answer with."""
        self.is_open = asyncio.Event()
        """Not set while weights change, or engines sleep."""
        self.is_open.set()
        self._updating = asyncio.Lock()
        self._lacks = False
        """Whether some engine has nothing that a difference could build on."""

    async def open(self) -> None:
        """Make the way for weights. Raises ConfigError."""
        try:
            await self._open_carrier()
        except EnginesDropped:
            raise ConfigError(
                f"an engine went away while it was prepared for weights: {self._fleet.why()}"
            ) from None

    def close(self) -> None:
        """Free what carries the bytes. Idempotent."""
        self._weight_sync.close()

    def follow(self, version: int) -> None:
        """Another has given the engines this version."""
        self.version = version
        self._fleet.membership.took()

    async def update(self, sources: list[WeightSource], version: int) -> None:
        """From now on ``sources``, all tensors, answer as ``version`` at every engine. Raises
        TrainError with the last good version where one does not take them."""
        async with self._updating:
            await self._give(sources, version)
            self._fleet.membership.took()

    async def rejoin(self, sources: list[WeightSource], version: int) -> bool:
        """Give ``sources``, which answer as ``version`` already, to engines that came back; whether
        there were any."""
        async with self._updating:
            if not self._fleet.membership.ready:  # an update came first
                return False
            await self._give(sources, version)
        names = ", ".join(server.url for server in self._fleet.alive)
        self._say(
            f"an engine is back, with version {version} of the weights; now there are {names}"
        )
        return True

    async def sleep(self) -> bool:
        """Let all engines give their devices' memory back until the next update, and those that are
        on their way before they are given weights; nobody is asked meanwhile. Whether they are to
        sleep at all. Raises ServerFailed where none is left."""
        if not self._fleet.spec.level:
            return False
        async with self._updating:
            self.is_open.clear()
            self._lacks |= self._fleet.spec.level > 1
            try:
                while not await self._slept():
                    pass
            except BaseException:
                self.is_open.set()
                raise
        return True

    async def _slept(self) -> bool:
        """One try; False where engines went or came meanwhile. One that starts takes its device's
        memory, so it is waited for."""
        fleet = self._fleet
        if fleet.membership.is_any_coming:
            await fleet.membership.news(fleet.spec.start_s)
            return False
        if fleet.membership.ready:
            fleet.take_back()
            self._lacks = await self._reopened()
        if not fleet.alive:
            raise fleet.none_left()
        try:
            await fleet.sleep()
        except EnginesDropped:
            self._lacks = await self._reopened()
            return False
        return True

    async def _give(self, sources: list[WeightSource], version: int) -> None:
        try:
            await self._sent(sources, version)
            self._fleet.all_given()
            self.version = version
        except (ModelError, ConfigError, OSError, RuntimeError) as error:
            raise TrainError(
                f"the engines did not take version {version} of the weights: {error}; the last "
                "good one is version "
                f"{self.version}"
            ) from error
        finally:
            self.is_open.set()
            self._fleet.membership.tell()

    async def _sent(self, sources: list[WeightSource], version: int) -> None:
        fleet, whole, is_new = self._fleet, self._lacks, False
        while True:  # at most as often as servers may go
            if fleet.membership.ready:
                self.is_open.clear()
                fleet.take_back()
                whole = is_new = await self._reopened()
            elif not fleet.alive and fleet.membership.is_any_expected:
                await fleet.one_is_back()
            elif not fleet.alive:
                raise TrainError(
                    f"version {version} of the weights cannot be given to anybody: {fleet.why()}; "
                    "the last good one is "
                    f"version {self.version}"
                )
            else:
                try:
                    await self._send(sources, version, whole)
                    self._lacks = False
                    return
                except EnginesDropped:
                    whole = is_new = await self._reopened()
                except EngineStateConflict as error:
                    if is_new:
                        raise
                    self._say(f"{error}: all weights are sent")
                    whole = is_new = await self._reopened()

    async def _send(self, sources: list[WeightSource], version: int, whole: bool) -> None:
        chunks = iter(self._weight_sync.chunks(sources, version, whole=whole))
        chunk = await asyncio.to_thread(
            next, chunks, None
        )  # engines go on meanwhile: finding differences takes time
        self.is_open.clear()
        await self._fleet.wake("weights")
        await self._fleet.all(lambda server: server.pause())
        first = True
        while chunk is not None:
            given = partial(_give, chunk, version, first)
            told, first = asyncio.ensure_future(self._fleet.all(given)), False
            try:
                if chunk.send is not None:
                    await self._broadcast(chunk.send, told)
                chunk = await asyncio.to_thread(
                    next, chunks, None
                )  # written while the engines read the one before
            finally:
                await told
        await self._fleet.wake("kv_cache")
        await self._fleet.all(lambda server: server.resume())

    async def _broadcast(self, send: Callable[[], None], told: asyncio.Future[None]) -> None:
        try:
            await asyncio.to_thread(send)
        except RuntimeError:
            await told  # says who is gone, or what was refused
            raise

    async def _open_carrier(self) -> None:
        """Raises Lost where a server went meanwhile."""
        alive = self._fleet.alive
        infos = dict(
            zip([each.url for each in alive], self._weight_sync.open(len(alive)), strict=True)
        )
        joined = asyncio.ensure_future(asyncio.to_thread(self._weight_sync.join))
        try:
            await self._fleet.all(lambda server: server.open_weights(infos[server.url]))
        except ModelError as error:
            weight_sync = self._fleet.spec.carried_by
            raise ConfigError(
                f"an engine cannot be given weights by '{weight_sync}': {error}"
            ) from None
        finally:
            with contextlib.suppress(RuntimeError):
                await joined

    async def _reopened(self) -> bool:
        """Another group, of those that are left; True."""
        while True:
            self._weight_sync.close()
            try:
                if self._fleet.alive:
                    await self._open_carrier()
                return True
            except EnginesDropped:
                pass


async def _give(chunk: WeightChunk, version: int, first: bool, server: EngineServer) -> None:
    await server.update(chunk.info, version, first=first, last=chunk.is_last)
