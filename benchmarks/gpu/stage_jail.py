"""Sessions of the default sandbox beside a busy device: cells per second with and without work on
the device, and that every session gives its own answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from kit import Kit, Skipped

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec, open_sandbox


def measure(kit: Kit) -> None:
    for num in (8, 32) if kit.quick else (64, 512):
        why = "one thread feeds the device; cells run on the others"
        with kit.figure(f"{num} sessions"):
            expected = kit.expect("a share", 0.02 if kit.quick else 0.2, 1.5, "", why)
            idle = asyncio.run(_cells(kit, num))
            with _busy(kit) as count:
                busy = asyncio.run(_cells(kit, num))
            kit.add(
                f"{num} sessions: cells beside a busy device, share of those beside an idle one",
                busy / idle,
                "",
                expected=expected,
                against={
                    "cells/s, idle": idle,
                    "cells/s, busy": busy,
                    "products meanwhile": float(count()),
                },
            )


async def _cells(kit: Kit, num: int) -> float:
    """Open ``num`` sessions and run cells in all of them at once; returns cells per second."""
    cells = 5 if kit.quick else 20
    try:
        sandbox: Any = open_sandbox(SandboxSpec(memory_bytes=256 << 20))
    except SandboxError as error:
        raise Skipped(str(error).splitlines()[0][:200]) from None
    try:
        sessions = await asyncio.gather(*(sandbox.open(seed=str(index)) for index in range(num)))

        async def run(index: int, session: Any) -> None:
            for cell in range(cells):
                ran = await session.run(f"x = {index} * 1000 + {cell}\nx", answer=_refuse)
                if ran.cell.value != str(index * 1000 + cell):
                    raise AssertionError(f"session {index} answered {ran.cell.value!r}")

        started = time.perf_counter()
        await asyncio.gather(*(run(index, each) for index, each in enumerate(sessions)))
        return num * cells / (time.perf_counter() - started)
    finally:
        await sandbox.close()


async def _refuse(name: str, args: Any, kwargs: Any) -> Any:
    raise SandboxError(f"no call is expected, and {name} was called")


@contextmanager
def _busy(kit: Kit) -> Iterator[Callable[[], int]]:
    """Keep the device at work; yields how many products it has done."""
    size = 256 if kit.quick else 8192
    dtype = torch.bfloat16 if kit.is_cuda else torch.float32
    left = torch.randn(size, size, device=kit.device, dtype=dtype)
    ends, done = threading.Event(), [0]

    def work() -> None:
        while not ends.is_set():
            torch.mm(left, left)
            kit.sync()
            done[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: done[0]
    finally:
        ends.set()
        thread.join()
