"""Values that would cost the host seconds: counted before they are decoded, and refused with the
limit that they exceed.

A lying guest is a few bytes behind a transport. An honest one is a real session, whose cell gets an
exception and whose names survive.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.errors import SessionDied
from ramify.sandbox import session_wire
from ramify.sandbox.base import CellResult, SandboxSpec, open_sandbox
from ramify.sandbox.guest.frames import (
    MAX_BLOBS,
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_NESTING,
    counts,
    json_bytes,
    portable_to_host,
)
from ramify.sandbox.guest.values import ValueEncoder
from tests.sandbox.test_codec import same, values
from tests.sandbox.test_session import LyingDoor, run, said

SAME = 2**61 - 1
"""Multiples of it all have the hash 0."""


def ints(num: int) -> list[Any]:
    return [{"$": "int", "v": hex(n * SAME)} for n in range(num)]


def tagged(name: str, items: Any) -> dict[str, Any]:
    return {"$": name, "v": items}


def called(value: Any, *blobs: bytes) -> bytes:
    header: dict[str, Any] = {
        "op": "call",
        "id": 1,
        "name": "echo",
        "value": [[value], {}],
        "tags": True,
    }
    return said({**header, "blobs": [len(blob) for blob in blobs]} if blobs else header, *blobs)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


EQUAL = r"a set or dict with more than 2,000 keys of equal hashes"
TOO_MUCH = {
    "a set of equal hashes": (called(tagged("set", ints(3000))), EQUAL),
    "a frozenset of equal hashes": (called(tagged("frozenset", ints(3000))), EQUAL),
    "a dict of equal hashes": (called(tagged("dict", [[key, 1] for key in ints(3000)])), EQUAL),
    "tuples of equal hashes": (
        called(tagged("set", [tagged("tuple", [1, n]) for n in ints(3000)])),
        EQUAL,
    ),
    "frozensets of equal hashes": (
        called(tagged("set", [tagged("frozenset", [n]) for n in ints(3000)])),
        EQUAL,
    ),
    "floats and integers of equal hashes": (
        called(
            tagged(
                "set",
                [
                    *ints(1500),
                    *(float(2**60 * 2 ** (61 * n)) for n in range(15)),
                    *ints(3000)[1500:],
                ],
            )
        ),
        EQUAL,
    ),
    "many sets of some equal hashes": (
        called([tagged("set", ints(1200)) for _ in range(4)]),
        EQUAL,
    ),
    "one number many times": (called(tagged("set", [7] * 3000)), EQUAL),
    "many items": (
        called([1] * (MAX_ITEMS + 1)),
        r"a value with 500,\d\d\d items: at most 500,000",
    ),
    "many strings": (called([""] * (2 * MAX_ITEMS + 1)), r"more than 500,000 strings"),
    "many small dicts": (
        called([{}] * (MAX_CONTAINERS + 1)),
        r"50,\d\d\d lists, dicts and the like: at most 50,000",
    ),
    "a deep list": (called(nested(MAX_NESTING)), r"nested deeper than 320 levels of JSON"),
    "a deep list behind brackets in text": (
        called(["]" * 400, nested(MAX_NESTING)]),
        r"nested deeper than 320",
    ),
    "many blobs": (
        called(1, *[b""] * (MAX_BLOBS + 1)),
        r"20,001 long strings and bytes values: at most 20,000",
    ),
    "a long integer": (
        called(tagged("int", hex(10**4000))),
        r"an integer of more than 4,000 digits",
    ),
    "a very long integer": (
        called(tagged("int", "f" * 15_000_000)),
        r"an integer of more than 4,000 digits",
    ),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_a_lying_guest_sends_is_refused_with_its_limit(what: str) -> None:
    frame, limit = TOO_MUCH[what]
    with pytest.raises(
        SessionDied, match=f"it broke the protocol: {limit}|it broke the protocol: .*{limit}"
    ):
        asyncio.run(run(LyingDoor(frame)))


@pytest.mark.parametrize(
    "value",
    [
        ["[{,]" * 1000] * 300,
        ['"\\' * 2000] * 50,
        tagged("set", [*range(100_000)]),
        tagged("dict", [[tagged("tuple", [n, -n % 3]), 1] for n in range(12_000)]),
        nested(90),
        tagged("set", [tagged("tuple", [n, x]) for n in range(1000) for x in (-1, -2)]),
        tagged("set", [tagged("float", "nan")] * 100),
    ],
)
def test_what_honest_guests_send_is_taken(value: Any) -> None:
    message, blobs = session_wire.parse(memoryview(called(value))[4:])
    assert isinstance(message, session_wire.HostCallFrame)
    assert len(session_wire.value_of(message, message.value, blobs)[0]) == 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}",\\: aé', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text('[]{}",\\:', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """The same result by walking through the value."""
    parts = (
        value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else None
    )
    if parts is None:
        return 0, 0, 0
    inner = [counted(part) for part in parts]
    items = max(len(parts), 1) + sum(each[0] for each in inner)
    return (
        items,
        1 + sum(each[1] for each in inner),
        1 + max((each[2] for each in inner), default=0),
    )


@settings(max_examples=300, deadline=None)
@given(plain)
def test_json_is_counted_as_it_is(value: Any) -> None:
    assert (
        counts(json.dumps(value).encode()) == counts(msgspec.json.encode(value)) == counted(value)
    )


@settings(max_examples=300, deadline=None)
@given(values)
def test_what_a_guest_may_send_a_host_takes(value: Any) -> None:
    try:
        copy = portable_to_host(value)
    except (TypeError, ValueError):
        return
    assert same(copy, value)
    encoder = ValueEncoder(bounded=True)
    header = {"op": "value", "id": 1, "value": encoder.encode(value), "tags": encoder.tags}
    header["blobs"] = [len(blob) for blob in encoder.blobs]
    data = b"".join(
        [b"\x01", len(json_bytes(header)).to_bytes(4, "little"), json_bytes(header), *encoder.blobs]
    )
    message, blobs = session_wire.parse(memoryview(data))
    assert isinstance(message, session_wire.ValueFrame)
    assert same(session_wire.value_of(message, message.value, blobs), value)


async def echo(name: str, args: Any, kwargs: Any) -> Any:
    return [name, len(args), sorted(kwargs)]


MODULE = """
__all__ = ["ask"]

def ask(*args, **kwargs):
    return call_host("ask", *args, **kwargs)

def after_cell():
    return namespace.get("note")
"""
CELLS = {
    "ask({n * (2**61 - 1) for n in range(5000)})": "2,000 keys of equal hashes",
    "ask({float(n) if n % 2 else n * (2**61 - 1): 1 for n in range(5000)})": "2,000 keys of equal hashes",
    "ask([0] * 500_001)": "items: at most 500,000 at once",
    "ask([{}] * 50_001)": "lists, dicts and the like: at most 50,000 at once",
    "ask([b''] * 20_001)": "20,001 long strings and bytes values: at most 20,000 at once",
    "ask([(1,)] * 25_001)": "lists, dicts and the like: at most 50,000 at once",
    "ask({str(n): 1 for n in range(100_001)})": "keys of dicts: at most 100,000 at once",
    "ask(['a' * 4097] * 20_001)": "20,001 long strings and bytes values: at most 20,000 at once",
    "ask(['a' * 4000] * 4300)": "16,777,216 of them outside long strings",
    "ask('a' * (257 << 20))": "at most 268,435,456 at once",
    "ask(10**5000)": "an integer of more than 4,000 digits",
    "ask(**{'name': 1, 'self': 2, 'x': -10**4000})": "an integer of more than 4,000 digits",
}


async def cells(*codes: str) -> list[CellResult]:
    sandbox = open_sandbox(SandboxSpec())
    try:
        session = await sandbox.open()
        await session.install("asking", MODULE)
        return [await session.run(code, answer=echo) for code in codes]
    finally:
        await sandbox.close()


def test_the_cell_gets_an_exception_and_its_session_goes_on() -> None:
    tried = [f"try:\n    {cell}\nexcept ValueError as error:\n    print(error)" for cell in CELLS]
    first, *between, last = asyncio.run(cells("x = 5", *tried, "ask(x, name=1, self=2)"))
    assert first.cell.error is None
    for ran, limit in zip(between, CELLS.values(), strict=True):
        assert limit in ran.cell.stdout
    assert last.cell.value == "['ask', 1, ['name', 'self']]"


def test_a_value_may_be_nested_as_deep_as_the_page_says() -> None:
    deep = "x = []\nfor _ in range({}): x = [x]\nask(x)"
    ran = asyncio.run(cells(deep.format(98), deep.format(99)))
    assert ran[0].cell.value == "['ask', 1, []]"
    assert ran[1].cell.error is not None
    assert "TypeError: list nested deeper than 100 levels" in ran[1].cell.error


def test_the_host_may_send_more() -> None:
    async def main() -> Any:
        sandbox = open_sandbox(SandboxSpec())
        try:
            session = await sandbox.open()
            await session.set("x", [10**5000, ["a"] * 600_000, [(1,)] * 30_000])
            return (await session.run("x[0] == 10**5000, len(x[1]), len(x[2])", answer=echo)).cell
        finally:
            await sandbox.close()

    assert asyncio.run(main()).value == "(True, 600000, 30000)"


def test_what_a_cell_leaves_for_the_host_is_its_error_where_it_is_too_much() -> None:
    odd = "class Odd(Exception):\n    def __str__(self): raise KeyError\nclass Note:\n    pass\n"
    left = [
        "note = [0] * 600_000",
        "note = 10**5000",
        "note = {n * (2**61 - 1) for n in range(3000)}",
        "note = 7",
    ]
    ran = asyncio.run(cells(odd, *left))
    assert [each.cell.error and each.cell.error.partition(":")[0] for each in ran] == [
        None,
        *["ValueError"] * 3,
        None,
    ]
    assert ran[-1].note == {"asking": 7}
