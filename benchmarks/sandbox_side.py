"""One version of the product, for ``sandbox.py``: reads the names of measurements and prints the
result of each, so that versions can take turns.

    PYTHONPATH=tree python benchmarks/sandbox_side.py
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from ramify.sandbox import base
from ramify.sandbox.base import open_sandbox

JailSpec: Any = getattr(base, "JailSpec", base.SandboxSpec)
SharedContextValue: Any = getattr(base, "SharedContextValue", None)
if SharedContextValue is None:  # an earlier version
    SharedContextValue = importlib.import_module("ramify.sandbox.context").SharedContext
MB = 1_000_000
SESSIONS = 64


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    return args[0] if args else None


async def run(session: Any, code: str = "x = 1") -> None:
    error = (await session.run(code, answer=answer)).cell.error
    if error:
        raise RuntimeError(error)


class Side:
    """The sandboxes and sessions that the measurements use. All results are in seconds, except
    memory (MB)."""

    def __init__(self) -> None:
        self.plain: Any = open_sandbox(JailSpec(pool=0, memory_bytes=4 << 30))
        self.pooled: Any = open_sandbox(JailSpec(pool=4))
        self.session: Any = None
        self.large: Any = None
        self.many: list[Any] = []
        self.closing: list[float] = []

    async def prepare(self) -> None:
        self.session = await self.plain.open()
        self.large = await self.plain.open()
        await run(self.large, f"text = 'a' * {100 * MB}")
        await run(self.session)
        await (await self.pooled.open()).close()

    async def end(self) -> None:
        await self.plain.close()
        await self.pooled.close()

    async def first(self) -> float:
        began = time.perf_counter()
        session = await self.plain.open()
        await run(session)
        ended = time.perf_counter()
        await session.close()
        self.closing.append(time.perf_counter() - ended)
        return ended - began

    async def close(self) -> float:
        await self.first()
        return self.closing.pop()

    async def pool(self) -> float:
        await asyncio.sleep(0.2)  # until the pool is full again
        began = time.perf_counter()
        session = await self.pooled.open()
        await run(session)
        took = time.perf_counter() - began
        await session.close()
        return took

    async def cell(self) -> float:
        """Return the median of the fastest of 16 groups (see ``GROUPS`` in ``sandbox.py``)."""
        groups = []
        for _ in range(16):
            laps = []
            for _ in range(200):
                began = time.perf_counter()
                await run(self.session)
                laps.append(time.perf_counter() - began)
            groups.append(median(laps))
        return min(groups)

    async def fork(self) -> float:
        began = time.perf_counter()
        branch = await self.large.fork()
        took = time.perf_counter() - began
        await branch.close()
        return took

    async def forks_in_a_row(self) -> float:
        began = time.perf_counter()
        branches = [await self.session.fork() for _ in range(SESSIONS)]
        took = time.perf_counter() - began
        await asyncio.gather(*(each.close() for each in branches))
        return took

    async def forks_at_once(self) -> float:
        began = time.perf_counter()
        branches = await asyncio.gather(*(self.session.fork() for _ in range(SESSIONS)))
        took = time.perf_counter() - began
        await asyncio.gather(*(each.close() for each in branches))
        return took

    async def sessions(self) -> float:
        """Seconds for each cell of 64 sessions that run at the same time."""
        if not self.many:
            self.many = [await self.plain.open() for _ in range(SESSIONS)]
        cells = 50

        async def work(session: Any) -> None:
            for _ in range(cells):
                await run(session)

        began = time.perf_counter()
        await asyncio.gather(*map(work, self.many))
        return (time.perf_counter() - began) / (cells * SESSIONS)

    async def memory(self) -> float | None:
        context = SharedContextValue("some text of some length " * (100 * MB // 25))
        sessions = [await self.plain.open(context=context) for _ in range(5)]
        for session in sessions:
            await run(session, "context.count('text')")
        private = [private_mb(session) for session in sessions]
        for session in sessions:
            await session.close()
        return max((each for each in private if each is not None), default=None)


def private_mb(session: Any) -> float | None:
    """Return the memory of a session's process in pages that no other process shares; None if this
    user may not read it."""
    try:
        pidfd = session.pidfd if hasattr(session, "pidfd") else session.process  # earlier
        fields = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        pid = next(int(line.split()[1]) for line in fields if line.startswith("Pid:"))
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, AttributeError, StopIteration):
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / MB


async def main() -> None:
    side, loop = Side(), asyncio.get_running_loop()
    await side.prepare()
    print(json.dumps("ready"), flush=True)
    while name := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        measure: Callable[[], Awaitable[float | None]] = getattr(side, name)
        print(json.dumps(await measure()), flush=True)
    await side.end()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main())
