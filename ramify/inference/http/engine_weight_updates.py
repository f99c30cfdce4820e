"""Update the weights of all inference engines of a run, including recovered ones.

    update ── pause all ─ send chunks of weights to all ─ resume all ──▶ version
    sleep  ── requests wait … update: wake the weights ─ (as above, all weights) ─
              wake the KV cache ──▶ version

An engine that is lost during an update is dropped, and the others get all weights again. They also
get all weights again if an engine lacks the weights from which an update only contains the
differences.

How the bytes are transferred is in ``inference/weight_sync``, and whether the right weights arrived
is checked in ``train/engine_consistency_checks.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from ramify.errors import ConfigError, ModelError, TrainError
from ramify.inference.http.engine_client import EngineClient
from ramify.inference.http.engine_json_http import EngineStateConflict
from ramify.inference.http.fleet import EngineFleet, EnginesDroppedError
from ramify.inference.weight_sync.base import LazyExportWeight, WeightChunk, WeightSync
from ramify.logging import ComponentLogger

_log = ComponentLogger("inference")


class EngineWeightSync:
    """Sends each version of the weights to all engines of a run.

    It belongs to one event loop.
    """

    def __init__(self, fleet: EngineFleet, weight_sync: WeightSync, version: int) -> None:
        self._fleet = fleet
        self.weight_sync = weight_sync
        self.version = version
        """Version of the weights that all engines currently use."""
        self.is_open = asyncio.Event()
        """Set while engines can answer. Requests wait while it is cleared: when weights change or
        engines sleep."""
        self.is_open.set()
        self._updating = asyncio.Lock()
        self._needs_all = False
        """True if the next update must send all weights, because an engine lacks those on which
        differences would be based."""

    async def open(self) -> None:
        """Prepare all engines for weight updates.

        Raises ConfigError if an engine is lost or cannot receive weights.
        """
        try:
            await self._open_weight_sync()
        except EnginesDroppedError:
            raise ConfigError(
                "an engine was lost while being set up for weight sync: "
                f"{self._fleet.drop_reasons()}"
            ) from None

    def close(self) -> None:
        """Release the resources that weight updates use, such as shared memory.

        A second call has no effect.
        """
        self.weight_sync.close()

    def record_external_update(self, version: int) -> None:
        """Record that another process has loaded this version of the weights into all engines."""
        self.version = version
        self._fleet.membership.reset_losses_after_update()

    async def update(self, sources: list[LazyExportWeight], version: int) -> None:
        """Send all weights to every engine as version ``version``.

        ``sources`` has one ``LazyExportWeight`` per tensor. Raises TrainError with the last good
        version if an engine does not accept them.
        """
        async with self._updating:
            await self._update_engines(sources, version)
            self._fleet.membership.reset_losses_after_update()

    async def update_returned_engines(self, sources: list[LazyExportWeight], version: int) -> bool:
        """Send the current weights to the engines that have recovered.

        ``version`` is the version that the other engines already use. Returns False if no engine
        needed them.
        """
        async with self._updating:
            if not self._fleet.membership.ready:  # an update came first
                return False
            await self._update_engines(sources, version)
        names = ", ".join(server.url for server in self._fleet.alive)
        _log.debug(
            "back",
            f"an engine is back, with version {version} of the weights; now there are {names}",
            shown=True,
            version=version,
        )
        return True

    async def sleep_engines(self) -> bool:
        """Release the memory of all engines until the next update.

        Requests wait in the meantime. Engines that are still coming back are included. Returns
        False if the engines are configured never to sleep. Raises ServerStatusError if no engine is
        left.
        """
        if not self._fleet.spec.effective_sleep_level:
            return False
        async with self._updating:
            self.is_open.clear()
            self._needs_all |= self._fleet.spec.effective_sleep_level > 1
            try:
                while not await self._try_sleep():
                    pass
            except BaseException:
                self.is_open.set()
                raise
        return True

    async def _try_sleep(self) -> bool:
        """Try to put all engines to sleep, and return True if all of them are asleep.

        Returns False if engines were lost or came back in the meantime. If an engine is still
        starting, wait for it and return False, because it takes memory.
        """
        fleet = self._fleet
        if fleet.membership.is_any_returning:
            await fleet.membership.wait_for_change(fleet.spec.start_s)
            return False
        if fleet.membership.ready:
            fleet.readmit_returned()
            self._needs_all = await self._reopen_weight_sync()
        if not fleet.alive:
            raise fleet.no_engine_left_error()
        try:
            await fleet.sleep()
        except EnginesDroppedError:
            self._needs_all = await self._reopen_weight_sync()
            return False
        return True

    async def _update_engines(self, sources: list[LazyExportWeight], version: int) -> None:
        try:
            await self._send_with_retries(sources, version)
            self._fleet.mark_all_updated()
            self.version = version
        except (ModelError, ConfigError, OSError, RuntimeError) as error:
            raise TrainError(
                f"the engines did not accept version {version} of the weights: {error}; the last "
                f"good one is version {self.version}"
            ) from error
        finally:
            self.is_open.set()
            self._fleet.membership.notify()

    async def _send_with_retries(self, sources: list[LazyExportWeight], version: int) -> None:
        fleet, whole, is_new = self._fleet, self._needs_all, False
        while True:  # bounded by how often servers may be lost
            if fleet.membership.ready:
                self.is_open.clear()
                fleet.readmit_returned()
                whole = is_new = await self._reopen_weight_sync()
            elif not fleet.alive and fleet.membership.is_any_expected:
                await fleet.wait_for_engine()
            elif not fleet.alive:
                raise TrainError(
                    f"version {version} of the weights cannot be sent, since no engine is left: "
                    f"{fleet.drop_reasons()}; the last good one is version {self.version}"
                )
            else:
                try:
                    await self._send(sources, version, whole)
                    self._needs_all = False
                    return
                except EnginesDroppedError:
                    whole = is_new = await self._reopen_weight_sync()
                except EngineStateConflict as error:
                    if is_new:
                        raise  # all weights were sent just now, so sending them again cannot help
                    _log.warning(
                        "whole_weights",
                        f"{error}: sending all weights",
                        shown=True,
                        version=version,
                    )
                    whole = is_new = await self._reopen_weight_sync()

    async def _send(self, sources: list[LazyExportWeight], version: int, whole: bool) -> None:
        chunks = iter(self.weight_sync.chunks(sources, version, whole=whole))
        # The engines keep answering meanwhile: finding the differences takes time.
        chunk = await asyncio.to_thread(next, chunks, None)
        self.is_open.clear()
        await self._fleet.wake("weights")
        await self._fleet.call_on_all(lambda server: server.pause())
        first = True
        while chunk is not None:
            give_chunk = partial(_update_server, chunk, version, first)
            requests, first = asyncio.ensure_future(self._fleet.call_on_all(give_chunk)), False
            try:
                if chunk.send is not None:
                    await self._broadcast(chunk.send, requests)
                # The next chunk is written while the engines read this one.
                chunk = await asyncio.to_thread(next, chunks, None)
            finally:
                await requests
        await self._fleet.wake("kv_cache")
        await self._fleet.call_on_all(lambda server: server.resume())

    async def _broadcast(self, send: Callable[[], None], requests: asyncio.Future[None]) -> None:
        try:
            await asyncio.to_thread(send)
        except RuntimeError:
            await requests  # raises the reason: a lost engine, or a refusal
            raise

    async def _open_weight_sync(self) -> None:
        """Prepare all engines to receive weights.

        Each gets the information that it needs for this. Raises EnginesDroppedError if an engine
        was lost in the meantime.
        """
        alive = self._fleet.alive
        infos = dict(
            zip([each.url for each in alive], self.weight_sync.open(len(alive)), strict=True)
        )
        joined = asyncio.ensure_future(asyncio.to_thread(self.weight_sync.join))
        try:
            await self._fleet.call_on_all(lambda server: server.open_weights(infos[server.url]))
        except ModelError as error:
            weight_sync = self._fleet.spec.weight_sync_name
            raise ConfigError(
                f"an engine cannot receive weights by '{weight_sync}': {error}"
            ) from None
        finally:
            with contextlib.suppress(RuntimeError):
                await joined

    async def _reopen_weight_sync(self) -> bool:
        """Prepare all engines for weight updates again, for example after one was lost.

        Returns True to signal that all weights must now be sent.
        """
        while True:
            self.weight_sync.close()
            try:
                if self._fleet.alive:
                    await self._open_weight_sync()
                return True
            except EnginesDroppedError:
                pass


async def _update_server(
    chunk: WeightChunk, version: int, first: bool, server: EngineClient
) -> None:
    await server.update(chunk.info, version, first=first, last=chunk.is_last)
