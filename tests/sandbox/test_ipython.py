"""The provider ``ipython``: every conformance check, and notebook features such as magics."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec, open_sandbox
from ramify.testing.sandbox_conformance import CHECKS, ConformanceCheck, answer_host_call, check_one
from ramify.types.trajectory import Cell

SPEC = SandboxSpec(
    provider="ipython", memory_bytes=256 << 20, max_output_bytes=100_000, grace_s=3.0
)
needs_ipython = pytest.mark.skipif(
    importlib.util.find_spec("IPython") is None, reason="IPython is not installed"
)


def run_cells(*codes: str) -> list[Cell]:
    async def run() -> list[Cell]:
        sandbox = open_sandbox(SPEC)
        session = await sandbox.open()
        ran = [(await session.run(code, answer=answer_host_call)).cell for code in codes]
        await sandbox.close()
        return ran

    return asyncio.run(run())


@needs_ipython
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_conformance_check(check: ConformanceCheck) -> None:
    async def put() -> None:
        sandbox = open_sandbox(SPEC)
        result = await check_one(sandbox, SPEC, check)
        await sandbox.close()
        if result.passed is None:
            pytest.skip(result.detail)
        assert result.passed, result.detail

    asyncio.run(put())


@needs_ipython
def test_in_out_and_underscore_history() -> None:
    ran = run_cells(
        "6 * 7", "_ + 1", "Out[1], _2, __", "In[1]", "5;", "get_ipython().__class__.__name__"
    )
    assert [cell.value for cell in ran] == [
        "42",
        "43",
        "(42, 43, 42)",
        "'6 * 7'",
        None,
        "'HeadlessIPythonShell'",
    ]


@needs_ipython
def test_magics_and_shell_commands() -> None:
    ran = run_cells(
        "print(1)\n!echo two\nprint(3)",
        "names = !echo a; echo b\nlist(names)",
        "%%capture out\nprint('kept')",
        "out.stdout",
        "%pwd",
        "t = %timeit -n1 -r1 -q -o 1\nt.loops",
        "%no_such",
        "len?",
    )
    assert ran[0].stdout == "1\ntwo\n3\n"
    assert [ran[1].value, ran[3].value, ran[5].value] == ["['a', 'b']", "'kept\\n'", "1"]
    assert ran[2].stdout == ""
    assert "ramify-" in (ran[4].value or "")
    assert ran[6].error is not None or "no_such" in ran[6].stdout
    assert "Return the number of items in a container" in ran[7].stdout


@needs_ipython
def test_tracebacks_match_other_providers() -> None:
    [failed, wrong] = run_cells("\nx = 1\n1 / 0", "a b")
    assert failed.error is not None
    assert failed.error.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<cell 1>", line 3, in <module>',
        "    1 / 0",
    ]
    assert wrong.error is not None
    assert wrong.error.splitlines()[0] == '  File "<cell 2>", line 1'


def test_missing_ipython_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SandboxError, match=r"pip install .*\[ipython\]'"):
        open_sandbox(SPEC)
