"""Resources that the runs of one ``RLM`` share on one event loop: the connection pool and the
sandbox.

They are opened by the first run that needs them and closed by the last one that ends, unless they
are pinned by ``async with`` or by the synchronous API, which keeps them until ``RLM.close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ramify.clients.pool import ClientPool
from ramify.errors import WeakSandboxWarning
from ramify.logging import RoomLogger
from ramify.sandbox.base import Sandbox, SandboxSpec, launch, open_sandbox, warning_of

_log = RoomLogger("engine")
_opened: set[str] = set()
"""Providers whose sandbox this process has already opened."""


class LoopResources:
    """One pool and one sandbox."""

    def __init__(self, max_in_flight: int, spec: SandboxSpec) -> None:
        self.pool = ClientPool(max_in_flight=max_in_flight)
        self._spec = spec
        self._sandbox: Sandbox | None = None

    def sandbox(self) -> Sandbox:
        """Return the sandbox, opened at the first call. The jail then tests its isolation, once per
        process, which takes a tenth of a second.

        Raises ConfigError for invalid settings and SandboxError if the sandbox is not available.
        """
        if self._sandbox is None:
            # The launched server reports its own isolation, so no separate test is needed.
            if self._spec.provider not in _opened:
                _opened.add(self._spec.provider)
                launch(self._spec)
            self._sandbox = open_sandbox(self._spec)
            if warning := warning_of(self._sandbox, self._spec):
                _log.warn(warning, WeakSandboxWarning, stacklevel=2)
        return self._sandbox

    def prepare(self) -> None:
        """Start preparing what a session needs, because one will be opened soon."""
        if self._sandbox is None:
            launch(self._spec)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
        await self.pool.close()


class SharedResources:
    """Counts the users of each loop's resources."""

    def __init__(self, max_in_flight: int, spec: SandboxSpec) -> None:
        self._max_in_flight = max_in_flight
        self._spec = spec
        self._open: dict[asyncio.AbstractEventLoop, tuple[LoopResources, int]] = {}

    def pin(self) -> LoopResources:
        """Add one user on the running loop and return its resources."""
        loop = asyncio.get_running_loop()
        resources, count = self._open.get(loop) or (
            LoopResources(self._max_in_flight, self._spec),
            0,
        )
        self._open[loop] = (resources, count + 1)
        return resources

    async def unpin(self) -> None:
        loop = asyncio.get_running_loop()
        resources, count = self._open.pop(loop)
        if count > 1:
            self._open[loop] = (resources, count - 1)
        else:
            await resources.close()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[LoopResources]:
        resources = self.pin()
        try:
            yield resources
        finally:
            await self.unpin()
