"""What the runs of one ``RLM`` share on one event loop: the connection pool and the sandbox.

Opened by the first run that needs them, closed by the last one that ends, unless pinned by ``async with`` or by the
synchronous face, which keeps them until ``RLM.close``.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ramify.clients.pool import Pool
from ramify.errors import WeakSandboxWarning
from ramify.sandbox.base import Sandbox, SandboxSpec, launch, open_sandbox, said_aloud


class Resources:
    """One pool and one sandbox."""

    def __init__(self, max_in_flight: int, spec: SandboxSpec) -> None:
        self.pool = Pool(max_in_flight=max_in_flight)
        self._spec = spec
        self._opening: asyncio.Task[Sandbox] | None = None

    async def sandbox(self) -> Sandbox:
        """Opened by whoever asks first. Raises ConfigError for what was asked of it, SandboxError where it cannot be
        had; for the next one it is tried again."""
        if self._opening is None or _has_failed(self._opening):
            self.prepare()
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Sandbox:
        sandbox = await asyncio.to_thread(open_sandbox, self._spec)  # the jail first tries out its walls
        if warning := said_aloud(sandbox, self._spec):
            warnings.warn(warning, WeakSandboxWarning, stacklevel=2)
        return sandbox

    def prepare(self) -> None:
        """A session will be needed soon: let what it takes to open one start meanwhile."""
        if self._opening is None:
            launch(self._spec)

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if not _has_failed(self._opening):
                await self._opening.result().close()
        await self.pool.close()


def _has_failed(task: asyncio.Task[Sandbox]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Shared:
    """Counts who uses the resources of each loop."""

    def __init__(self, max_in_flight: int, spec: SandboxSpec) -> None:
        self._max_in_flight, self._spec = max_in_flight, spec
        self._open: dict[asyncio.AbstractEventLoop, tuple[Resources, int]] = {}

    def pin(self) -> Resources:
        """One user more on the running loop."""
        loop = asyncio.get_running_loop()
        resources, count = self._open.get(loop) or (Resources(self._max_in_flight, self._spec), 0)
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
    async def use(self) -> AsyncIterator[Resources]:
        resources = self.pin()
        try:
            yield resources
        finally:
            await self.unpin()
