"""The fork server's process that starts before its configuration is known: which sandbox takes it,
what replaces it, and that it ends if nothing takes it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.cli.predict_session_need import SMALL_BYTES, is_ask_over_large_input
from ramify.sandbox.base import JailSpec, open_sandbox
from ramify.sandbox.host.forkserver_process import JAIL_MODULES, start_early, take_prestarted_server
from ramify.sandbox.prewarm import prewarm_sandbox
from ramify.sandbox.providers.process import ProcessSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the jail needs Linux")


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    return args


@pytest.fixture
def early() -> Iterator[int]:
    """Process id of a fork server that was started early."""
    before = {*_children()}
    start_early()
    start_early()  # the second does nothing
    (pid,) = {*_children()} - before
    yield pid
    if (left := take_prestarted_server(JAIL_MODULES)) is not None:
        left.discard()


def _children() -> list[int]:
    path = f"/proc/self/task/{os.getpid()}/children"
    return [int(pid) for pid in Path(path).read_text().split()]


def opened_servers() -> tuple[str, list[int]]:
    """Open a session of the jail. Returns the value of a cell, and the fork servers' processes."""

    async def main() -> tuple[str, list[int]]:
        spec = JailSpec(memory_bytes=1 << 30)
        prewarm_sandbox(spec)
        sandbox = open_sandbox(spec)
        assert isinstance(sandbox, ProcessSandbox)
        try:
            session = await sandbox.open()
            cell = (await session.run("import random, uuid\n6 * 7", answer=answer)).cell
            return str(cell.value), _children()
        finally:
            await sandbox.close()

    return asyncio.run(main())


def test_next_sandbox_takes_the_early_process_whatever_its_spec(early: int) -> None:
    value, servers = opened_servers()
    assert value == "42"
    assert early in servers
    assert early not in _children()
    assert take_prestarted_server(JAIL_MODULES) is None


def test_killed_early_process_is_replaced(early: int) -> None:
    os.kill(early, signal.SIGKILL)
    os.waitid(os.P_PID, early, os.WEXITED | os.WNOWAIT)
    value, servers = opened_servers()
    assert value == "42"
    assert early not in servers


def test_unused_early_process_ends_with_its_host() -> None:
    code = (
        "from ramify.sandbox.host.forkserver_process import *; import os; start_early();"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not os.path.exists(f"/proc/{int(run.stdout)}")


@pytest.mark.parametrize("direct_chars", [0, 32_000])
def test_entered_rlm_starts_its_server_if_every_question_needs_one(direct_chars: int) -> None:
    code = (
        "import os, time; from ramify import RLM, Scaffold, ScriptedClient\n"
        f"with RLM(ScriptedClient([]), scaffold=Scaffold(direct_chars={direct_chars})):\n"
        "    for _ in range(500):\n"
        "        found = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        f"        if found or {direct_chars}: break\n"
        "        time.sleep(.02)\n"
        "print(len(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n" if direct_chars == 0 else "0\n", "")


def test_start_imports_nothing_that_is_heavy() -> None:
    code = (
        "import sys, ramify.sandbox.host.forkserver_process;"
        "print(*(n for n in sys.modules if n.startswith(('ramify.', 'msgspec', 'asyncio'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [
        "ramify.sandbox",
        "ramify.sandbox.host",
        "ramify.sandbox.host.guest_module_files",
        "ramify.sandbox.host.forkserver_process",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("ask question {large}", True),
        ("ask question {folder}", True),
        ("ask question {small} --model openai:m {large} -q", True),
        ("ask question {large} --sandbox-unknown", True),
        ("ask question {small}", False),
        ("ask question", False),
        ("ask {large}", False),
        ("ask question {large} --help", False),
        ("ask question {large} --mode=plan", False),
        ("ask question {large} --sandbox docker", False),
        ("ask question {large} --dry-run", False),
        ("show question {large}", False),
        ("", False),
    ],
)
def test_guess_from_the_arguments(
    arguments: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAMIFY_SANDBOX", raising=False)
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(SMALL_BYTES + 1))
    small.write_bytes(bytes(SMALL_BYTES))
    given = arguments.format(large=large, small=small, folder=tmp_path).split()
    assert is_ask_over_large_input(given) is expected
    monkeypatch.setenv("RAMIFY_SANDBOX", "docker")
    assert not is_ask_over_large_input(given)
