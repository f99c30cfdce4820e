"""Conformance checks: values in and out of a session, through the codec."""

from __future__ import annotations

import datetime
import math
from typing import Any

from ramify.errors import HostCallError, SandboxError
from ramify.sandbox.conformance.base import (
    ConformanceError,
    SandboxProbe,
    check,
    clean,
    same,
    true,
    with_host,
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


@check("values survive a round trip", "full_python")
async def round_trip(probe: SandboxProbe) -> None:
    session = await with_host(probe)
    await session.set("v", VALUES)
    same(repr(await session.get("v")), repr(VALUES), "set, get")
    [cell] = clean(await probe.cells("w = host('echo', v)\nrepr(w) == repr(v)", session=session))
    same(cell.value, "True", "call")
    await session.set("nan", {"n": math.nan})
    true(math.isnan((await session.get("nan"))["n"]), "nan")


@check("other values are refused, with type and path", "full_python")
async def refused_values(probe: SandboxProbe) -> None:
    session = await with_host(probe)
    code = "class Foo: pass\nx = {'a': [1, (Foo(),)]}\nloop = []\nloop.append(loop)"
    _, called, cyclic, after = await probe.cells(
        code, "host('echo', x)", "host('echo', loop)", "1", session=session
    )
    true(
        called.error and "TypeError" in called.error and "type Foo" in called.error,
        f"{called.error}",
    )
    true(called.error and "['a'][1][0]" in called.error, f"no path: {called.error}")
    true(cyclic.error and "nested deeper" in cyclic.error, f"{cyclic.error}")
    same(after.value, "1")
    for name, kind in (("x", "TypeError"), ("nothing", "NameError")):
        try:
            await session.get(name)
        except HostCallError as error:
            same(error.kind, kind)
        else:
            raise ConformanceError(f"get({name!r}) did not fail")
    try:
        await session.set("y", {"a": object()})
    except SandboxError as error:
        true("type object" in str(error) and "['a']" in str(error), str(error))
    else:
        raise ConformanceError("set of an object did not fail")


@check("large values survive a round trip")
async def large_values(probe: SandboxProbe) -> None:
    session = await with_host(probe)
    text = "é" * 1_000_000
    await session.set("text", text)
    [cell] = clean(
        await probe.cells(
            "host('echo', text) == text, host('echo', [text] * 8) == [text] * 8", session=session
        )
    )
    same(cell.value, "(True, True)")
    same(await session.get("text"), text)
