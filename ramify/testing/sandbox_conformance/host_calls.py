"""Conformance checks of the values and calls that a session and its host exchange."""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ramify.errors import HostCallError, SandboxError
from ramify.testing.sandbox_conformance.base import (
    ConformanceError,
    SandboxUnderTest,
    answer_host_call,
    assert_no_errors,
    assert_same,
    assert_true,
    cell_values,
    open_with_host,
    register_check,
)

ZONE = datetime.timezone(datetime.timedelta(hours=-3))
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64, -(3**500), 1.5, -0.0, 1e308, math.inf, -math.inf, 1j,
    complex(-0.0, 2),
    "", "é\x00\n\"\\", "\ud800 alone", "\U0001f600", "x" * 5000, "é\udfff" * 5000, b"", b"\x00\xff" * 3000,
    [], [1, [2, [3]]], (), (1,), ((), []), set(), {(2, "a")}, {1}, frozenset({frozenset({1})}),
    {}, {"a": {"b": 1}}, {1: "int", (1, 2): "tuple", None: "none", b"k": 1.0}, {"$": "tag", "v": 1}, {"\ud800": 1},
    datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4), datetime.datetime(1, 1, 1), datetime.timedelta(-1, 2, 3),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=ZONE), datetime.time(1, tzinfo=datetime.UTC),
    list(range(1000)), ["ab"] * 1000, [0.5] * 1000, [1, math.nan and 2] * 20, ["\ud800"] * 20, [2**70] * 20, [math.inf] * 20,
]  # fmt: skip


@register_check("values survive a round trip", "full_python")
async def check_value_round_trip(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    await session.set("v", VALUES)
    assert_same(repr(await session.get("v")), repr(VALUES), "set, get")
    [cell] = assert_no_errors(
        await probe.cells("w = host('echo', v)\nrepr(w) == repr(v)", session=session)
    )
    assert_same(cell.value, "True", "call")
    await session.set("nan", {"n": math.nan})
    assert_true(math.isnan((await session.get("nan"))["n"]), "nan")


@register_check("other values are refused, with type and path", "full_python")
async def check_refused_values(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    code = "class Foo: pass\nx = {'a': [1, (Foo(),)]}\nloop = []\nloop.append(loop)"
    _, called, cyclic, after = await probe.cells(
        code, "host('echo', x)", "host('echo', loop)", "1", session=session
    )
    assert_true(
        called.error and "TypeError" in called.error and "type Foo" in called.error,
        f"{called.error}",
    )
    assert_true(called.error and "['a'][1][0]" in called.error, f"no path: {called.error}")
    assert_true(cyclic.error and "nested deeper" in cyclic.error, f"{cyclic.error}")
    assert_same(after.value, "1")
    for name, kind in (("x", "TypeError"), ("nothing", "NameError")):
        try:
            await session.get(name)
        except HostCallError as error:
            assert_same(error.kind, kind)
        else:
            raise ConformanceError(f"get({name!r}) did not fail")
    try:
        await session.set("y", {"a": object()})
    except SandboxError as error:
        assert_true("type object" in str(error) and "['a']" in str(error), str(error))
    else:
        raise ConformanceError("set of an object did not fail")


@register_check("large values survive a round trip")
async def check_large_values(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    text = "é" * 1_000_000
    await session.set("text", text)
    [cell] = assert_no_errors(
        await probe.cells(
            "host('echo', text) == text, host('echo', [text] * 8) == [text] * 8", session=session
        )
    )
    assert_same(cell.value, "(True, True)")
    assert_same(await session.get("text"), text)


@register_check("reserved names are restored and reported", "full_python")
async def check_reserved_names(probe: SandboxUnderTest) -> None:
    session = await probe.open()
    await session.set("given", [1], reserved=True)
    await session.set("other", 1, reserved=True)
    await session.set("free", 1)
    ran = await probe.cells(
        "given = 5\ndel other\nfree = 2",
        "given, other, free",
        "given.append(2)",
        "given",
        session=session,
    )
    assert_same([ran[0].restored, ran[1].value], [("given", "other"), "([1], 1, 2)"])
    assert_same([ran[1].restored, ran[2].restored, ran[3].value], [(), (), "[1, 2]"])
    await session.set("given", 7)
    assert_same(cell_values(await probe.cells("given = 8", "given", session=session))[-1], "8")


@register_check("modules bind names and send notes", "full_python")
async def check_modules(probe: SandboxUnderTest) -> None:
    session = await probe.open()
    source = """
__all__ = ["double", "Failure"]
class Failure(Exception): pass
def double(x):
    "Twice x."
    if x is None: raise Failure("none given")
    return call_host("echo", x) * 2
hidden = 1
def after_cell():
    return {"has": sorted(n for n in ("double", "a") if n in namespace), "out": last_output()}
"""
    await session.install("tools", source)
    ran = await session.run("a = double(4)\nprint(a)\ndouble = 3", answer=answer_host_call)
    assert_same(
        (ran.cell.stdout, ran.cell.restored, ran.note),
        ("8\n", ("double",), {"tools": {"has": ["a", "double"], "out": "8\n"}}),
    )
    cells = await probe.cells(
        "'hidden' in globals(), double('x'), double.__doc__", "double(None)", session=session
    )
    assert_same(cells[0].value, "(False, 'xx', 'Twice x.')")
    assert_true(
        cells[1].error
        and cells[1].error.count("File ") == 1
        and "Failure: none given" in cells[1].error,
        f"{cells[1].error}",
    )
    try:
        await session.install("broken", "x = 1\n1/0")
    except SandboxError as error:
        assert_true("ZeroDivisionError" in str(error) and "line 2" in str(error), str(error))
    else:
        raise ConformanceError("a module that fails was installed")


@register_check("errors of the host are raised in the cell", "full_python")
async def check_host_errors(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    code = "try:\n    host('fail')\nexcept SessionHostCallError as e:\n    r = (e.kind, str(e), e.data)\nr"
    caught, raised = await probe.cells(code, "\nhost('fail')", session=session)
    assert_same(
        caught.value,
        "('SubcallError', 'two failed', {'results': ['a', None], 'failures': {1: 'no'}})",
    )
    assert_true(
        raised.error
        and 'File "<cell 2>", line 2' in raised.error
        and raised.error.count("File ") == 1,
        f"{raised.error}",
    )


@register_check("a bug of the host is raised by run")
async def check_host_bugs(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)

    async def broken(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise ZeroDivisionError("a bug")

    try:
        await session.run("host('x')", answer=broken)
    except ZeroDivisionError:
        pass
    else:
        raise ConformanceError("the host's bug was not raised")
    assert_same(cell_values(await probe.cells("1", session=session)), ["1"])


@register_check("calls from threads run at once", "full_python")
async def check_concurrent_calls(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    got = list(pool.map(lambda i: host('sleep', 1 + i * 0), range(16)))
    big = list(pool.map(lambda i: len(host('echo', str(i) * 100_000)), range(10)))
got == [1] * 16, big
"""
    started = time.perf_counter()
    [cell] = assert_no_errors(await probe.cells(code, session=session))
    assert_same(cell.value, f"(True, {[100_000] * 10})")
    assert_true(
        time.perf_counter() - started < 12, "16 calls of 1 s took as long as one after the other"
    )


@register_check("a call outside its cell fails clearly", "full_python")
async def check_calls_outside_cell(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    code = """
import threading, time
caught = []
def late(wait, *call):
    time.sleep(wait)
    try: host(*call)
    except BaseException as e: caught.append(str(e))
for args in ((1.2, 'echo', 1), (0, 'sleep', 30)):
    threading.Thread(target=late, args=args, daemon=True).start()
time.sleep(.2)
"""
    assert_no_errors(await probe.cells(code, session=session))
    await asyncio.sleep(2.5)  # the first call is made meanwhile, even on a busy machine
    wait = "for _ in range(300):\n    if len(caught) < 2: time.sleep(.05)"
    ran = await probe.cells(wait, "len(caught), caught", session=session)
    value = cell_values(ran)[-1] or ""
    assert_true(
        value.startswith("(2, ")
        and "after its cell had ended" in value
        and "still waiting" in value,
        value,
    )


@register_check("a forked process is not the session", "full_python", "kill", "starts_processes")
async def check_forked_process(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    code = """
import os
pid = os.fork()
if not pid:
    try: host('echo', 1)
    except Exception as e: print(e)
else:
    status = os.waitpid(pid, 0)[1]
"""
    first, second = assert_no_errors(
        await probe.cells(code, "status, host('echo', 2)", session=session)
    )
    assert_true("forked process" in first.stdout, first.stdout)
    assert_same(second.value, "(0, 2)")
