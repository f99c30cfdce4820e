"""Concurrent forks of one session tree in the jail, and the error of a rollback that was not
prepared."""

import asyncio
import subprocess
import sys
from typing import Any

import jail_tiers as tiers
import pytest
from test_jail import answer, value, with_jail

from ramify.errors import SandboxError, SessionDied
from ramify.sandbox.base import JailSpec, SandboxSpec, open_sandbox
from ramify.sandbox.providers.jail import JailSandbox
from ramify.testing.sandbox_conformance.base import HOST

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="THE JAIL IS NOT TESTED HERE: it needs Linux"
)

FORKS = 64


async def errors_of_concurrent_forks(session: Any) -> list[str]:
    """Fork 64 times concurrently: half from ``session``, half from four of its branches.
    Returns the errors."""
    origins = [session, *[await session.fork() for _ in range(4)]]
    chosen = [origins[0] if number % 2 else origins[1 + number // 2 % 4] for number in range(FORKS)]
    branches = await asyncio.gather(*(each.fork() for each in chosen), return_exceptions=True)
    found = [str(each) for each in branches if isinstance(each, BaseException)]
    for number, branch in enumerate(branches):
        if not isinstance(branch, BaseException):
            assert await value(branch, f"x.append({number})\nx") == f"[0, {number}]"
    for origin in origins:
        assert await value(origin, "x") == "[0]"
    return found


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_concurrent_forks_of_idle_session_tree(tier: str) -> None:
    async def test(sandbox: Any) -> None:
        session = await sandbox.open()
        await value(session, "x = [0]")
        assert await errors_of_concurrent_forks(session) == []

    with_jail(test, tier)


async def fork_during_host_call(session: Any, count: int) -> list[Any]:
    """Fork while the cell waits for the host's answer to the first of its two calls."""
    asked, go = asyncio.Event(), asyncio.Event()

    async def held(name: str, args: Any, kwargs: Any) -> Any:
        asked.set()
        await go.wait()
        return "origin"

    code = "got = [host('word', i) for i in range(2)]\ngot"
    origin = asyncio.ensure_future(session.run(code, answer=held))
    await asyncio.wait_for(asked.wait(), 30)
    branches = await asyncio.gather(*(session.fork() for _ in range(count)), return_exceptions=True)
    go.set()
    assert (await origin).cell.value == "['origin', 'origin']"
    return branches


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_concurrent_forks_during_host_call(tier: str) -> None:
    """Each branch is itself forked twice while it waits for its second call."""

    async def test(sandbox: Any) -> None:
        session = await sandbox.open()
        await session.install("host_names", HOST)
        branches = await fork_during_host_call(session, 16)
        assert [str(each) for each in branches if isinstance(each, BaseException)] == []
        ends = await asyncio.gather(
            *(fork_branch_twice(each, number) for number, each in enumerate(branches))
        )
        assert ends == [[f"['first {n}', 'second {n} {m}']" for m in range(3)] for n in range(16)]

    with_jail(test, tier)


async def fork_branch_twice(branch: Any, number: int) -> list[str]:
    made: list[Any] = []

    async def answers(name: str, args: Any, kwargs: Any) -> Any:
        if args[0] == 0:
            return f"first {number}"
        made.extend(await asyncio.gather(branch.fork(), branch.fork()))
        return f"second {number} 0"

    def later(word: str) -> Any:
        async def answer(name: str, args: Any, kwargs: Any) -> Any:
            return word

        return answer

    ran = [await branch.resume(answer=answers)]
    ran += [
        await each.resume(answer=later(f"second {number} {m + 1}")) for m, each in enumerate(made)
    ]
    return [str(each.cell.value) for each in ran]


def test_cell_is_refused_while_forks_are_queued() -> None:
    async def test(sandbox: Any) -> None:
        session = await sandbox.open()
        forks = [asyncio.ensure_future(session.fork()) for _ in range(4)]
        await asyncio.wait(forks, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(SandboxError, match="busy"):
            await session.run("1", answer=answer)
        forks[-1].cancel()
        done = await asyncio.gather(*forks, return_exceptions=True)
        assert [isinstance(each, BaseException) for each in done] == [False, False, False, True]
        assert await value(session, "1 + 1") == "2"

    with_jail(test)


# ------------------------------------------------------------------------------------------------
# rollback

DIE = "import os\nos._exit(3)"


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_sessions_of_one_tree_roll_back_concurrently(tier: str) -> None:
    async def test(sandbox: Any) -> None:
        root = await sandbox.open()
        tree = [root, *await asyncio.gather(*(root.fork() for _ in range(7)))]
        await asyncio.gather(*(value(each, f"x = {number}") for number, each in enumerate(tree)))
        for _ in range(2):
            ran = await asyncio.gather(
                *(each.run(f"x = -1\n{DIE}", answer=answer) for each in tree)
            )
            assert [each.interrupted for each in ran] == ["killed"] * 8
            assert [await value(each, "x") for each in tree] == [str(number) for number in range(8)]

    with_jail(test, tier, rollback=True)


def test_unprepared_rollback_is_reported() -> None:
    async def test(sandbox: Any) -> None:
        session = await sandbox.open()
        await value(session, "import os\nends = os.pipe()")
        with pytest.raises(SessionDied) as caught:
            await session.run(f"print('so far')\n{DIE}", answer=answer)
        assert caught.value.stdout == "so far\n"
        assert str(caught.value) == (
            "the session ended in the middle of a cell: its process exited with status 3; it was "
            "not rolled back: "
            "the session cannot be forked: files, pipes or sockets are open (2), which a branch "
            "would share: "
            "close them first"
        )

    with_jail(test, rollback=True)


def test_every_descriptor_is_replaced_before_linux_6_2() -> None:
    """The kernel does not report how many descriptors a process has."""

    async def main() -> None:
        sandbox = JailSandbox(JailSpec(pool=0), counts=False)
        try:
            session = await sandbox.open()
            await value(session, "x = [0]")
            assert await errors_of_concurrent_forks(session) == []
            branch = await session.fork()
            used = "import os\nends = os.pipe()\nos.read(0, 10), ends"
            assert await value(branch, used) == "(b'', (3, 4))"
        finally:
            await sandbox.close()

    asyncio.run(main())


def test_process_provider_forks_concurrently() -> None:
    async def main() -> None:
        sandbox = open_sandbox(SandboxSpec(provider="process", allow_weaker=True))
        try:
            session = await sandbox.open()
            await value(session, "x = [0]")
            assert await errors_of_concurrent_forks(session) == []
        finally:
            await sandbox.close()

    asyncio.run(main())


def test_a_refused_fork_leaves_nothing_that_refuses_the_next_one() -> None:
    async def main() -> None:
        sandbox = open_sandbox(SandboxSpec(provider="process", allow_weaker=True))
        try:
            session = await sandbox.open()
            await value(session, "import os\nends = os.pipe()")
            for _ in range(2):
                with pytest.raises(SandboxError, match=r"\(2\)"):  # the two ends of the pipe
                    await session.fork()
            await value(session, "[os.close(end) for end in ends]")
            branch = await session.fork()
            assert await value(branch, "len(ends)") == "2"
        finally:
            await sandbox.close()

    asyncio.run(main())


def test_forks_beyond_open_file_limit_raise_sandbox_error() -> None:
    """Runs in a separate process with a low limit on open files."""
    code = """
import asyncio, resource
from ramify.errors import SandboxError
from ramify.sandbox.base import JailSpec, open_sandbox
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
    sandbox = open_sandbox(JailSpec(tier="C", allow_weaker=True))
    session = await sandbox.open()
    forks = await asyncio.gather(*(session.fork() for _ in range(100)), return_exceptions=True)
    print({type(each).__name__ for each in forks} == {"GuestSessionProxy", "SandboxError"}, len(forks[0].tree) > 20)
    await sandbox.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("True True\n", "", 0)
