"""A spinning branch never outlives its fork server or its host, however they die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import jail_tiers as tiers
import pytest
from attacks.watch import start_time

from ramify.errors import SandboxError
from ramify.sandbox.base import JailSpec, SandboxSpec, open_sandbox

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="THE JAIL IS NOT TESTED HERE: it needs Linux"
)

HOST = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[2])
import jail_tiers as tiers
from attacks import watch
from ramify.sandbox.base import JailSpec
async def answer(name, args, kwargs): return None
async def main():
    sandbox = tiers.open_jail(JailSpec(tier=sys.argv[1], allow_weaker=True, pool=0))
    session = await sandbox.open()
    branch = await session.fork()
    spinning = asyncio.ensure_future(branch.run("while True: pass", answer=answer, timeout_s=600))
    await asyncio.sleep(0.3)
    servers = [process.pid for process in sandbox._processes]
    print(json.dumps([sorted(watch.descendants(os.getpid())), servers]), flush=True)
    await spinning
asyncio.run(main())
"""


@pytest.mark.parametrize("tier", tiers.TIERS)
@pytest.mark.parametrize("first", ["host", "watcher", "server", "all but the branch"])
def test_spinning_branch_dies_with_host_or_fork_server(tier: str, first: str) -> None:
    if why := tiers.why_not(tier):
        pytest.skip(why)
    here = os.path.dirname(os.path.abspath(__file__))
    with subprocess.Popen(
        [sys.executable, "-c", HOST, tier, here], stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        below, servers = json.loads(host.stdout.readline())
        began = {pid: start_time(pid) for pid in below}
        inner = [pid for pid in below if pid not in servers]
        killed = {
            "host": [host.pid],
            "watcher": servers,
            "server": [inner[0]],
            "all but the branch": [host.pid, *servers, inner[0]],
        }[first]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        if host.pid not in killed:
            host.kill()
    until = time.monotonic() + 30
    while left := [pid for pid, start in began.items() if start and start_time(pid) == start]:
        assert time.monotonic() < until, f"processes {left} of {began} are left"
        time.sleep(0.02)


def test_sandbox_recovers_from_failed_fork_server_start() -> None:
    """A caller that retries in a loop also lets other tasks run."""

    async def main() -> None:
        sandbox = open_sandbox(SandboxSpec(provider="process", allow_weaker=True))
        start, starts = sandbox.start_fork_server, []  # type: ignore[attr-defined]

        def killed_start() -> object:
            started = start()
            starts.append(started)
            started.process.kill()
            return started

        sandbox.start_fork_server = killed_start  # type: ignore[attr-defined]
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        for _ in range(2):
            with pytest.raises(SandboxError):
                await sandbox.open()
        sandbox.start_fork_server = start  # type: ignore[attr-defined]
        session = await sandbox.open()
        assert (await session.run("6 * 7", answer=answer)).cell.value == "42"
        await sandbox.close()
        before = ticks
        for _ in range(20):
            with pytest.raises(SandboxError, match="closed"):
                await sandbox.open()
        assert ticks >= before + 20
        ticking.cancel()

    asyncio.run(main())


async def answer(name: str, args: object, kwargs: object) -> None:
    return None


def test_cancelled_fork_leaves_origin_usable() -> None:
    async def main() -> None:
        sandbox = open_sandbox(JailSpec(pool=0))
        session = await sandbox.open()
        for delay in (0.0, 0.0005, 0.001, 0.002, 0.004):
            forking = asyncio.ensure_future(session.fork())
            await asyncio.sleep(delay)
            forking.cancel()
            await asyncio.wait([forking])
            assert (await session.run("6 * 7", answer=answer)).cell.value == "42"
        for tree in [*session.tree]:  # forks that were completed before they were cancelled
            await tree.close()
        await sandbox.close()

    asyncio.run(main())
