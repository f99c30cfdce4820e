"""A DataFrame as a context: the time until a session has it, and the memory that this takes.

    python benchmarks/inputs.py --part values

The frame has four columns of numbers and one of Arrow strings. The session imports pandas before
the timed part. Memory is what all processes have beside the frame of the caller, in private pages
and in the memory file of the context, which counts in full. It is compared with that of a session
over a small frame of the same columns, because each session needs a few megabytes anyway.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

from figures import Figure

_FLOOR_S = 1.0
_FLOOR_SIZES = 1.1
_SMALL_BYTES = 2_000_000
_CELL = "[len(context), float(context['n1'].iloc[-1]), str(context['s'].iloc[-1])]"
_SUMS = "[context[name].to_numpy().sum() for name in ('n0', 'n1', 'n2', 'n3')]"
"""Reads all numbers. The sum of pandas would copy a column."""


def figures(quick: bool) -> Iterator[Figure]:
    frame = _frame(100_000_000 if quick else 1_000_000_000)
    size = int(frame.memory_usage(index=False).sum())
    seconds, cpu_s, digest_s, sizes = asyncio.run(_measured(frame, size))
    name = f"a DataFrame of {size / 1e9:.2f} GB"
    yield Figure(f"{name}: first cell over it", round(seconds, 3), "s", {}, floor=_FLOOR_S)
    yield Figure(f"{name}: first cell, CPU time of the host", round(cpu_s, 3), "s", {})
    yield Figure(f"{name}: memory beside the caller's", round(sizes, 3), "sizes", {}, _FLOOR_SIZES)
    yield Figure(f"{name}: its hash, for the journal", round(digest_s, 3), "s", {})


def _frame(num_bytes: int) -> Any:
    import numpy as np
    import pandas as pd

    num_rows = num_bytes // (4 * 8 + 17)
    random = np.random.default_rng(0)
    words = np.array(["alpha", "beta 12345", "gamma gamma", "delta north"])
    columns = {f"n{number}": random.random(num_rows) for number in range(4)}
    texts = pd.Series(words[random.integers(0, 4, num_rows)], dtype="str")
    return pd.DataFrame({**columns, "s": texts})


async def _measured(frame: Any, size: int) -> tuple[float, float, float, float]:
    """Return the seconds to the first cell, the CPU time of this process meanwhile, the seconds of
    the hash, and the memory in sizes of the frame."""
    from ramify.sandbox.base import SandboxSpec, SharedContextValue, open_sandbox
    from ramify.sources.convert_to_context import as_context

    async def answer(*_: Any) -> Any:
        raise AssertionError("the cells make no calls")

    sandbox = open_sandbox(SandboxSpec(packages=("pandas",)))
    try:
        small = SharedContextValue(as_context(_frame(_SMALL_BYTES)))
        warm = await sandbox.open(context=small)
        for code in (_CELL, _SUMS):
            await warm.run(code, answer=answer)
        before = _private_bytes() - small.nbytes
        await warm.close()
        del warm, small
        await asyncio.sleep(0.5)  # until their processes have ended
        started, cpu = time.perf_counter(), time.process_time()
        context = SharedContextValue(as_context(frame))
        session = await sandbox.open(context=context)
        found = await session.run(_CELL, answer=answer)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        last = frame.iloc[-1]
        assert found.cell.value == repr([len(frame), float(last["n1"]), str(last["s"])]), found
        found = await session.run(_SUMS, answer=answer)
        assert found.cell.error is None, found
        used = _private_bytes() - before + context.nbytes
        started = time.perf_counter()
        assert context.digest
        return seconds, cpu_s, time.perf_counter() - started, used / size
    finally:
        await sandbox.close()


def _private_bytes() -> int:
    """Anonymous memory of this process and all that it has started, each page once."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss_Anon:"))
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    waiting += map(int, children.read().split())
        except OSError:
            continue  # it has ended
    return total * 1024
