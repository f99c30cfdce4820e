"""Limits of a session in the jail: processes, CPU time, threads and memory."""

import pytest

from ramify.errors import SessionDied
from ramify.sandbox.providers.jail import JailSandbox
from tests.sandbox.jail_helpers import (
    SPIN,
    answer,
    error,
    value,
    with_jail,
)


def test_abort_is_reported_and_kills_only_its_session() -> None:
    """A session may not send signals. If it calls abort(), the host signals that session and no
    other process."""

    async def test(sandbox: JailSandbox) -> None:
        other = await sandbox.open()
        pid = await value(other, "import os\nos.getpid()")
        for code in (
            "import os\nos.abort()",
            f"import ctypes\nctypes.CDLL(None).tgkill({pid}, {pid}, 6)",
        ):
            session = await sandbox.open()
            with pytest.raises(SessionDied, match=r"killed by signal 6 \(SIGABRT\)"):
                await session.run(code, answer=answer)
        session = await sandbox.open()
        assert (
            await value(session, f"import ctypes\nctypes.CDLL(None).tgkill({pid}, {pid}, 9)")
            == "-1"
        )
        assert (
            await error(session, "import os\nos.kill(os.getpid(), 6)")
            == "PermissionError: [Errno 1] Operation not permitted"
        )
        assert await value(other, "1 + 1") == "2"
        for each in (session, other):
            await each.close()

    with_jail(test)


def test_cpu_time_limit_ends_session() -> None:
    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        with pytest.raises(SessionDied, match=r"SIG(XCPU|KILL)"):
            await session.run(SPIN, answer=answer)

    with_jail(test, cpu_s=1, pool=0)


def test_threads_are_limited() -> None:
    async def test(jail: JailSandbox) -> None:
        code = """
import threading
stop, started = threading.Event(), []
try:
    for _ in range(5000):
        t = threading.Thread(target=stop.wait); t.start(); started.append(t)
except (RuntimeError, MemoryError): pass
stop.set()
for t in started: t.join()
0 < len(started) < 600
"""
        assert await value(await jail.open(), code) == "True"

    with_jail(test)


def test_largest_session_is_ended_when_total_memory_is_exceeded() -> None:
    async def test(jail: JailSandbox) -> None:
        small, large = await jail.open(), await jail.open()
        await value(small, "b = bytearray(40 << 20)")
        with pytest.raises(
            SessionDied, match=r"all sessions together used .* of 100 MB, this one most of it"
        ):
            await large.run("b = bytearray(90 << 20)\nimport time; time.sleep(20)", answer=answer)
        assert await value(small, "len(b) >> 20") == "40"

    with_jail(test, all_memory_bytes=100 << 20)


def test_rollback_restores_session_after_killed_cell() -> None:
    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        await value(session, "x = 1")
        ran = await session.run("x = 2\nprint('so far')\nimport os\nos._exit(3)", answer=answer)
        assert (ran.cell.stdout, ran.interrupted) == ("so far\n", "killed")
        assert "exited with status 3\nThe session is as it was" in (ran.cell.error or "")
        assert await value(session, "x") == "1"
        await session.run(f"x = 4\n{SPIN}", answer=answer, timeout_s=0.2)
        assert await value(session, "x") == "1"

    with_jail(test, rollback=True, grace_s=0.3)
