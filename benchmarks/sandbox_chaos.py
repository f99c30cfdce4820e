"""Chaos: sessions that run, fork and call the host while their processes are killed at random.

    python benchmarks/sandbox_chaos.py --minutes 30 --at-once 32

Kills guests, their branches, the fork server and the process that watches over it. Every answer is
checked; an error that says that a session or the server has ended is expected. At the end nothing
may be left: no process, descriptor, folder or memory file, and the sandbox must still open
sessions. The last line is JSON; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from sandbox import _below

from ramify.errors import RamifyError
from ramify.sandbox.base import JailSpec, SharedContextValue, open_sandbox
from ramify.sandbox.host.process_transport import pid_of_pidfd

HOST = "__all__ = ['host']\ndef host(*args):\n    return call_host('host', *args)\n"
HUNG_S = 120.0


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    await asyncio.sleep(random.random() * 0.005)
    return args[0]


class Chaos:
    """One run, and what it has counted."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.sandbox: Any = open_sandbox(JailSpec(pool=2, memory_bytes=512 << 20, cell_s=20.0))
        self.context = SharedContextValue("a line of text\n" * 100_000)
        self.live: set[Any] = set()
        self.longest_block_s = 0.0
        self.longest_collection_s = 0.0
        self._began = 0.0

    async def check(self, session: Any, code: str, wanted: str) -> None:
        async with asyncio.timeout(HUNG_S):
            ran = await session.run(code, answer=answer)
        self.counts["cells"] += 1
        if ran.interrupted is None and ran.cell.value != wanted:
            self.counts["wrong"] += 1
            print(f"wrong: {code!r}: {ran.cell.value} {ran.cell.error}", file=sys.stderr)

    async def life(self) -> None:
        """Open a session, use it and its branches, close it."""
        large = self.random.random() < 0.3
        async with asyncio.timeout(HUNG_S):
            session = await self.sandbox.open(context=self.context if large else None)
        self.counts["sessions"] += 1
        tree = [session]
        self.live.add(session)
        try:
            await session.install("host_names", HOST)
            number = self.random.randrange(10**9)
            await self.check(session, f"x = [{number}]\nx[0] + 1", str(number + 1))
            if large:
                await self.check(session, "context.count('line')", "100000")
            for step in range(self.random.randrange(4)):
                async with asyncio.timeout(HUNG_S):
                    branch = await self.random.choice(tree).fork()
                tree.append(branch)
                self.live.add(branch)
                self.counts["forks"] += 1
                await self.check(branch, f"x.append({step})\nhost(x[-1])", str(step))
            cells = [self.check(each, "x[0]", str(number)) for each in tree]
            await asyncio.gather(*cells)
            await self.check(session, "len(host('a' * 200_000))", "200000")
        finally:
            for each in tree:
                self.live.discard(each)
                async with asyncio.timeout(HUNG_S):
                    await each.close()

    async def worker(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self.life()
            except RamifyError as error:
                self.errors[f"{type(error).__name__}: {str(error)[:70]}"] += 1
            except TimeoutError:
                self.counts["hung"] += 1

    async def killer(self, until: float) -> None:
        """Kill something every so often."""
        while time.monotonic() < until:
            await asyncio.sleep(self.random.random() * 0.2)
            chance = self.random.random()
            if chance < 0.05:
                self._kill("server", await asyncio.to_thread(_servers))
            elif self.live:
                session = self.random.choice(sorted(self.live, key=id))
                pid = pid_of_pidfd(session.pidfd) if session.pidfd >= 0 else -1
                self._kill("guest", [pid] if pid > 0 else [])

    def _kill(self, kind: str, pids: list[int]) -> None:
        if pids:
            with contextlib.suppress(OSError):
                os.kill(self.random.choice(pids), signal.SIGKILL)
                self.counts[f"killed {kind}"] += 1

    def note_collection(self, phase: str, _: Any) -> None:
        """Measure the CPU time of Python's garbage collector."""
        if phase == "start":
            self._began = time.thread_time()
        else:
            took = time.thread_time() - self._began
            self.longest_collection_s = max(self.longest_collection_s, took)

    async def heartbeat(self, until: float) -> None:
        """Measure the CPU time of this thread between two turns of the event loop."""
        while time.monotonic() < until:
            began = time.thread_time()
            await asyncio.sleep(0)
            self.longest_block_s = max(self.longest_block_s, time.thread_time() - began)
            await asyncio.sleep(0.001)

    async def run(self, minutes: float, at_once: int) -> dict[str, Any]:
        await self.sandbox.open(context=self.context)  # creates the context's memory file
        await self.sandbox.close()
        before = _left()
        self.sandbox = open_sandbox(self.sandbox.spec)
        until = time.monotonic() + 60 * minutes
        workers = [self.worker(until) for _ in range(at_once)]
        faults: list[str] = []
        gc.collect()
        gc.freeze()  # as the commands do: the objects of the start live on
        gc.callbacks.append(self.note_collection)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(str(context)[:300]))
        await asyncio.gather(*workers, self.killer(until), self.heartbeat(until))
        is_useful = False
        with contextlib.suppress(RamifyError):
            session = await self.sandbox.open()
            is_useful = (await session.run("6 * 7", answer=answer)).cell.value == "42"
        await self.sandbox.close()
        await asyncio.sleep(2.0)
        after = _left()
        left = {name: after[name] - before[name] for name in before if after[name] > before[name]}
        return {
            "counts": dict(self.counts),
            "left": left,
            "useful": is_useful,
            "faults": faults[:10],
            "longest block, ms of CPU": round(self.longest_block_s * 1e3, 1),
            "longest collection, ms of CPU": round(self.longest_collection_s * 1e3, 1),
            "errors": dict(self.errors.most_common(12)),
        }


def _servers() -> list[int]:
    return [pid for pid in _below(os.getpid()) if _is_server(pid)]


def _is_server(pid: int) -> bool:
    """Return True for fork servers, templates and what watches over them."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
        session = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[3])
    except OSError:
        return False
    return b"ramify_" in text and session != pid  # a session leads its own process session


def _left() -> dict[str, int]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return {
        "processes": len(_below(os.getpid())),
        "descriptors": len(links),
        "memory files": sum("memfd:" in link for link in links),
        "folders": sum(1 for _ in Path(tempfile.gettempdir()).iterdir()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Chaos for the jail.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    async def run() -> dict[str, Any]:
        return await Chaos(options.seed).run(options.minutes, options.at_once)

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        tempfile.tempdir = folder
        found = asyncio.run(run())
    print(json.dumps(found))
    counts = found["counts"]
    is_wrong = counts.get("wrong") or counts.get("hung") or found["left"] or found["faults"]
    return 1 if is_wrong or not found["useful"] else 0


if __name__ == "__main__":
    sys.exit(main())
