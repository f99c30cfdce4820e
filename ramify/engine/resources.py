"""What the runs of one ``RLM`` share on one event loop: the connection pool and the sandbox.

Opened by the first run that needs them, closed by the last one that ends, unless pinned by ``async
with`` or by the synchronous face, which keeps them until ``RLM.close``.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ramify.clients.pool import ClientPool
from ramify.errors import WeakSandboxWarning
from ramify.sandbox.base import Sandbox, SandboxSpec, launch, open_sandbox, warning_of

_opened: set[str] = set()
"""Providers of which this process has had a sandbox."""


class LoopResources:
    """One pool and one sandbox."""

    def __init__(self, max_in_flight: int, spec: SandboxSpec) -> None:
        self.pool = ClientPool(max_in_flight=max_in_flight)
        self._spec = spec
        self._sandbox: Sandbox | None = None

    def sandbox(self) -> Sandbox:
        """Opened by whoever asks first: the jail then tries out its walls, once in a process, for a
        tenth of a second.

        Raises ConfigError for what was asked of it, SandboxError where it cannot be had."""
        if self._sandbox is None:
            if (
                self._spec.provider not in _opened
            ):  # its server says what its walls are worth: no trial apart from it
                _opened.add(self._spec.provider)
                launch(self._spec)
            self._sandbox = open_sandbox(self._spec)
            if warning := warning_of(self._sandbox, self._spec):
                warnings.warn(warning, WeakSandboxWarning, stacklevel=2)
        return self._sandbox

    def prepare(self) -> None:
        """A session will be needed soon: let what it takes to open one start meanwhile."""
        if self._sandbox is None:
            launch(self._spec)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
        await self.pool.close()


class SharedResources:
    """Counts who uses the resources of each loop."""

    def __init__(self, max_in_flight: int, spec: SandboxSpec) -> None:
        self._max_in_flight, self._spec = max_in_flight, spec
        self._open: dict[asyncio.AbstractEventLoop, tuple[LoopResources, int]] = {}

    def pin(self) -> LoopResources:
        """One user more on the running loop."""
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
