"""Ramify doing the same tasks as the other sides, through its public API."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contexts import log_text

import ramify
from ramify.sandbox.base import open_sandbox

Result = dict[str, Any]
SESSIONS_ONLY = ramify.Scaffold(direct_chars=0)
"""A short context is also read in a session, as on the other sides."""


def engine(limits: ramify.Limits | None = None, **more: Any) -> ramify.RLM:
    return ramify.RLM("openai:test", limits=limits, scaffold=SESSIONS_ONLY, **more)


def timed(rlm: ramify.RLM, question: str, context: str, repeats: int) -> Result:
    seconds, responses = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        responses.append(rlm.completion(context, question).response)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "responses": responses}


def three(url: str, repeats: int) -> Result:
    """The first completion also connects and starts the fork server."""
    with engine() as rlm:
        return timed(rlm, "<<scene:three>>", "line of a log\n" * 1000, repeats)


def children(url: str, repeats: int) -> Result:
    with engine() as rlm:
        return timed(rlm, "<<scene:children>>", "c", repeats)


def calls(url: str, repeats: int, limit: int) -> Result:
    with engine(ramify.Limits(max_concurrency=limit)) as rlm:
        responses = timed(rlm, "<<scene:calls>>", "c", repeats)["responses"]
    return {"seconds": [float(each) for each in responses]}


def cell(url: str, repeats: int) -> Result:
    """Return the seconds of a round trip of ``x = 1`` to the child process."""

    async def answer(name: str, args: Any, kwargs: Any) -> None:
        return None

    async def measure() -> list[float]:
        sandbox = open_sandbox(ramify.SandboxSpec())
        session = await sandbox.open()
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            await session.run("x = 1", answer=answer)
            seconds.append(time.perf_counter() - started)
        await sandbox.close()
        return seconds

    return {"seconds": asyncio.run(measure())}


def big(url: str, repeats: int, chars: int) -> Result:
    """Use a new store each time, so that the context must be written. The bytes are those by which
    the run makes the store larger: a store that has one run has its reserve for a full disk."""
    context, seconds, written = log_text(chars), [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            with engine(store=ramify.Store(folder)) as rlm:
                timed(rlm, "<<scene:three>>", "a short context", 1)
            before = size_of(Path(folder))
            with engine(store=ramify.Store(folder)) as rlm:
                seconds += timed(rlm, "<<scene:three>>", context, 1)["seconds"]
            written.append(size_of(Path(folder)) - before)
    return {"seconds": seconds, "bytes": written}


def size_of(folder: Path) -> int:
    """Return the bytes of all files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def loop(url: str, limit_s: float) -> Result:
    """Return how long the endless cell ran, and whether its variable existed afterwards."""
    with engine(sandbox=ramify.SandboxSpec(cell_s=limit_s)) as rlm:
        result = rlm.completion("c", "<<scene:loop>>")
    return {
        "seconds": [result.trajectory.root.turns[0].cells[0].seconds],
        "kept": result.response == "42",
    }


def deadline(url: str, limit_s: float) -> Result:
    """Measure a whole run whose deadline passes during an endless cell."""
    with engine(ramify.Limits(max_seconds=limit_s)) as rlm:
        rlm.completion("c", "<<scene:three>>")  # warm
        done = timed(rlm, "<<scene:loop>>", "c", 1)
    return done


def usage(url: str) -> Result:
    with engine() as rlm:
        return counted(rlm.completion("c", "<<scene:children>>"))


def lost(url: str) -> Result:
    with engine() as rlm:
        return counted(rlm.completion("c", "<<scene:lost>>"))


def budget(url: str, **limits: Any) -> Result:
    with engine(ramify.Limits(**limits)) as rlm:
        return counted(rlm.completion("c", "<<scene:budget>>"))


def counted(result: Any) -> Result:
    used = result.usage
    return {
        "input": used.input_tokens,
        "output": used.output_tokens,
        "calls": used.calls,
        "unknown": used.unknown_calls,
        "cost": result.cost,
        "stop": str(result.stop),
        "response": result.response,
    }


def many(url: str, count: int) -> Result:
    """Return the resident memory of this process with ``count`` concurrent runs, minus that after
    one run."""

    async def measure() -> Result:
        async with engine(ramify.Limits(max_concurrency=count)) as rlm:
            await rlm.acompletion("warm up", "<<scene:wait>>")
            before = resident_mb()
            runs = [
                rlm.acompletion(f"context {i} " * 100, f"<<scene:wait>> {i}") for i in range(count)
            ]
            started = time.perf_counter()
            work = asyncio.gather(*runs)
            most = before
            while not work.done():
                most = max(most, resident_mb())
                await asyncio.wait([work], timeout=0.1)
            answers = [result.response for result in work.result()]
            return {
                "mb": (most - before) / count,
                "right": answers.count("done"),
                "seconds": [time.perf_counter() - started],
            }

    return asyncio.run(measure())


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


TASKS: dict[str, Callable[..., Result]] = {
    "three": three,
    "children": children,
    "calls": calls,
    "cell": cell,
    "big": big,
    "loop": loop,
    "usage": usage,
    "deadline": deadline,
    "lost": lost,
    "budget": budget,
    "many": many,
}

if __name__ == "__main__":
    print("\n" + json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
