"""The provider ``monty``: the conformance checks that it claims, and where it differs from other
providers."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ramify.errors import ConfigError, HostCallError, SandboxError
from ramify.extras.sandboxes.monty import CAPS, MontySession
from ramify.sandbox.base import SandboxSpec, SharedContextValue, open_sandbox
from ramify.testing.sandbox_conformance import CHECKS, ConformanceCheck, answer_host_call, check_one

SPEC = SandboxSpec(provider="monty", memory_bytes=256 << 20, max_output_bytes=100_000)
CLAIMED = [check for check in CHECKS if all(getattr(CAPS, name) for name in check.needs)]
needs_monty = pytest.mark.skipif(
    importlib.util.find_spec("pydantic_monty") is None, reason="Monty is not installed"
)
VALUES: list[Any] = [
    None, True, 0, 2**64, -(3**500), 1.5, float("inf"), "é\x00", b"\x00\xff", [], [1, [2]], (1,), {2, "a"}, frozenset({1}),
    {}, {"a": {"b": 1}}, {1: "int", (1, 2): "tuple", None: "none"},
]  # fmt: skip


def with_session(test: Callable[[MontySession], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        sandbox: Any = open_sandbox(SPEC)
        try:
            await test(await sandbox.open(**options))
        finally:
            await sandbox.close()

    asyncio.run(go())


async def run(session: MontySession, *codes: str, timeout_s: float | None = None) -> list[Any]:
    return [await session.run(code, answer=answer_host_call, timeout_s=timeout_s) for code in codes]


@needs_monty
@pytest.mark.parametrize("check", CLAIMED, ids=[check.name for check in CLAIMED])
def test_conformance_check(check: ConformanceCheck) -> None:
    async def put() -> None:
        sandbox = open_sandbox(SPEC)
        result = await check_one(sandbox, SPEC, check)
        await sandbox.close()
        assert result.passed, result.detail

    asyncio.run(put())


@needs_monty
def test_echo_errors_and_names_that_survive_errors() -> None:
    async def test(session: MontySession) -> None:
        ran = await run(
            session,
            "a = 1\n1/0\nb = 2",
            "a",
            "_ + 1",
            "x = 5",
            "class P:\n    pass\nP()",
            "y = = 2",
            "nothing",
        )
        assert [r.cell.value for r in ran] == [None, "1", "2", None, "<P object>", None, None]
        assert [(r.cell.error or "").splitlines()[-1:] for r in ran] == [
            ["ZeroDivisionError: division by zero"],
            [],
            [],
            [],
            [],
            ["SyntaxError: Expected an expression"],
            ["NameError: name 'nothing' is not defined"],
        ]
        assert 'File "<cell 1>", line 2' in ran[0].cell.error

    with_session(test)


@needs_monty
def test_values_round_trip_and_reserved_names_are_restored() -> None:
    async def test(session: MontySession) -> None:
        await session.set("v", VALUES)
        assert repr(await session.get("v")) == repr(VALUES)
        await run(session, "def f(): pass", "p = [1]")
        for name, kind in (("nothing", "NameError"), ("no name", "NameError")):
            with pytest.raises(HostCallError) as caught:
                await session.get(name)
            assert caught.value.kind == kind
        with pytest.raises(SandboxError, match="type object at value"):
            await session.set("y", {"a": object()})
        await session.set("given", [1], reserved=True)
        ran = await run(session, "given = 5", "given")
        assert (ran[0].cell.restored, ran[1].cell.value) == (("given",), "[1]")

    with_session(test)


SOURCE = """
__all__ = ["double", "state", "Kind"]
class Kind(Exception): pass
state = {"n": 0}
def double(x, times=2):
    if x is None: raise Kind("none given")
    return call_host("echo", x) * times
def after_cell():
    return {"n": state["n"], "has": sorted(n for n in ("a", "double") if n in namespace), "out": last_output()}
"""


@needs_monty
def test_installed_modules_run_in_host_and_export_functions() -> None:
    async def test(session: MontySession) -> None:
        await session.install("tools", SOURCE)
        [ran] = await run(
            session, "a = double(4)\nprint(a, double('x', times=3))\nstate['n'] = a\ndouble = 3"
        )
        assert (ran.cell.error, ran.cell.stdout, ran.cell.restored) == (
            None,
            "8 xxx\n",
            ("double",),
        )
        assert ran.note == {"tools": {"n": 8, "has": ["a", "double"], "out": "8 xxx\n"}}
        [failed, caught] = await run(
            session,
            "double(None)",
            "try:\n    double(None)\nexcept Exception as e:\n    r = str(e)\nr",
        )
        assert failed.cell.error.splitlines()[-1] == "RuntimeError: Kind: none given"
        assert caught.cell.value == "'Kind: none given'"
        with pytest.raises(SandboxError, match="ZeroDivisionError: division by zero, line 2"):
            await session.install("broken", "x = 1\n1/0")

    with_session(test)


@needs_monty
def test_stopped_cell_is_rolled_back() -> None:
    async def test(session: MontySession) -> None:
        [_, ran, after] = [
            *await run(session, "x = 41"),
            *await run(session, "x = 0\nprint('so far')\nwhile True:\n    pass", timeout_s=2.0),
            *await run(session, "x"),
        ]
        assert (ran.interrupted, ran.cell.stdout, after.cell.value) == ("time", "so far\n", "41")
        assert (
            ran.cell.error
            == "KeyboardInterrupt: the cell was stopped (time), and what it had bound is undone"
        )
        asyncio.get_running_loop().call_later(0.1, session.interrupt, "deadline")
        [ran, after] = await run(session, "while True: pass", "x + 1")
        assert (ran.interrupted, after.cell.value) == ("deadline", "42")

    with_session(test)


@needs_monty
def test_cell_waiting_for_host_can_be_interrupted() -> None:
    async def test(session: MontySession) -> None:
        await session.install(
            "host_names", "__all__ = ['host']\ndef host(*a): return call_host(*a)"
        )
        asyncio.get_running_loop().call_later(0.1, session.interrupt, "deadline")
        ran, after = await run(session, "host('sleep', 60)", "host('echo', 1)")
        assert (ran.interrupted, after.cell.value) == ("deadline", "1")
        task = asyncio.ensure_future(run(session, "host('sleep', 60)"))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert (await run(session, "2"))[0].cell.value == "2"

    with_session(test)


@needs_monty
def test_files_processes_and_network_are_unreachable() -> None:
    async def test(session: MontySession) -> None:
        ran = await run(
            session,
            "import socket",
            "import subprocess",
            "import ctypes",
            "open('/etc/passwd')",
            "import os\nos.getenv('HOME')",
        )
        assert all(r.cell.error for r in ran[:4])
        assert ran[4].cell.error or ran[4].cell.value is None

    with_session(test)


@needs_monty
def test_context_is_readable_and_restored_after_overwrite() -> None:
    async def test(session: MontySession) -> None:
        ran = await run(
            session, "context['a'][:3], len(context['b'])", "context = 1", "context['a'][0]"
        )
        assert [r.cell.value for r in ran] == ["('xyz', 2)", None, "'x'"]
        assert ran[1].cell.restored == ("context",)

    with_session(test, context=SharedContextValue({"a": "xyz" * 1000, "b": [1, 2]}))


def test_packages_and_missing_extra_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("pydantic_monty") is not None:
        with pytest.raises(
            ConfigError, match="does not support packages, but 'numpy' was requested"
        ):
            open_sandbox(SandboxSpec(provider="monty", packages=("numpy",)))
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(SandboxError, match=r"pip install .*\[monty\]'"):
        open_sandbox(SPEC)


def test_imports_without_unix_only_modules() -> None:
    """As on Windows, for example."""
    code = """
import os, sys
for name in ("fork", "memfd_create", "pidfd_open", "pipe2", "preadv", "readv", "writev"):
    vars(os).pop(name, None)
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource")))
import ramify.extras.sandboxes.monty
from ramify.sandbox.base import SharedContextValue
print(SharedContextValue.from_encoded(SharedContextValue({"a": (1, 2)}).buffer()).value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{'a': (1, 2)}\n", "")
