"""Limits on values from a session: oversized values are refused before they are decoded, and the
error names the limit.

A lying guest is a scripted transport. An honest guest is a real session, whose cell gets an
exception and which keeps its variables.
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
from ramify.sandbox.base import CellResult, SandboxSpec, open_sandbox
from ramify.sandbox.guest.message_frames import (
    MAX_BLOBS,
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_NESTING,
    copy_as_sent_to_host,
    json_bytes,
    json_complexity,
)
from ramify.sandbox.guest.value_encoding import ValueEncoder
from ramify.sandbox.host import session_frame_connection
from tests.sandbox.test_codec import same, values
from tests.sandbox.test_session import LyingTransport, run, said

SAME = 2**61 - 1
"""Every multiple of it hashes to 0."""


def ints_of_equal_hash(num: int) -> list[Any]:
    return [{"$": "int", "v": hex(n * SAME)} for n in range(num)]


def tagged(name: str, items: Any) -> dict[str, Any]:
    return {"$": name, "v": items}


def call_frame(value: Any, *blobs: bytes) -> bytes:
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
OVERSIZED = {
    "a set of equal hashes": (call_frame(tagged("set", ints_of_equal_hash(3000))), EQUAL),
    "a frozenset of equal hashes": (
        call_frame(tagged("frozenset", ints_of_equal_hash(3000))),
        EQUAL,
    ),
    "a dict of equal hashes": (
        call_frame(tagged("dict", [[key, 1] for key in ints_of_equal_hash(3000)])),
        EQUAL,
    ),
    "tuples of equal hashes": (
        call_frame(tagged("set", [tagged("tuple", [1, n]) for n in ints_of_equal_hash(3000)])),
        EQUAL,
    ),
    "frozensets of equal hashes": (
        call_frame(tagged("set", [tagged("frozenset", [n]) for n in ints_of_equal_hash(3000)])),
        EQUAL,
    ),
    "floats and integers of equal hashes": (
        call_frame(
            tagged(
                "set",
                [
                    *ints_of_equal_hash(1500),
                    *(float(2**60 * 2 ** (61 * n)) for n in range(15)),
                    *ints_of_equal_hash(3000)[1500:],
                ],
            )
        ),
        EQUAL,
    ),
    "many sets of some equal hashes": (
        call_frame([tagged("set", ints_of_equal_hash(1200)) for _ in range(4)]),
        EQUAL,
    ),
    "one number many times": (call_frame(tagged("set", [7] * 3000)), EQUAL),
    "many items": (
        call_frame([1] * (MAX_ITEMS + 1)),
        r"a value with 500,\d\d\d items: at most 500,000",
    ),
    "many strings": (call_frame([""] * (2 * MAX_ITEMS + 1)), r"more than 500,000 strings"),
    "many small dicts": (
        call_frame([{}] * (MAX_CONTAINERS + 1)),
        r"50,\d\d\d lists, dicts and the like: at most 50,000",
    ),
    "a deep list": (call_frame(nested(MAX_NESTING)), r"nested deeper than 320 levels of JSON"),
    "a deep list behind brackets in text": (
        call_frame(["]" * 400, nested(MAX_NESTING)]),
        r"nested deeper than 320",
    ),
    "many blobs": (
        call_frame(1, *[b""] * (MAX_BLOBS + 1)),
        r"20,001 long strings and bytes values: at most 20,000",
    ),
    "a long integer": (
        call_frame(tagged("int", hex(10**4000))),
        r"an integer of more than 4,000 digits",
    ),
    "a very long integer": (
        call_frame(tagged("int", "f" * 15_000_000)),
        r"an integer of more than 4,000 digits",
    ),
}


@pytest.mark.parametrize("what", OVERSIZED)
def test_oversized_value_from_lying_guest_is_refused_naming_limit(what: str) -> None:
    frame, limit = OVERSIZED[what]
    with pytest.raises(
        SessionDied, match=f"it broke the protocol: {limit}|it broke the protocol: .*{limit}"
    ):
        asyncio.run(run(LyingTransport(frame)))


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
def test_value_within_limits_is_accepted(value: Any) -> None:
    message, blobs = session_frame_connection.parse(memoryview(call_frame(value))[4:])
    assert isinstance(message, session_frame_connection.HostCallFrame)
    assert len(session_frame_connection.decode_value(message, message.value, blobs)[0]) == 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}",\\: aé', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text('[]{}",\\:', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def count_recursively(value: Any) -> tuple[int, int, int]:
    """Reference for ``counts``: walks the value recursively."""
    parts = (
        value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else None
    )
    if parts is None:
        return 0, 0, 0
    inner = [count_recursively(part) for part in parts]
    items = max(len(parts), 1) + sum(each[0] for each in inner)
    return (
        items,
        1 + sum(each[1] for each in inner),
        1 + max((each[2] for each in inner), default=0),
    )


@settings(max_examples=300, deadline=None)
@given(plain)
def test_json_counts_match_recursive_walk(value: Any) -> None:
    assert (
        json_complexity(json.dumps(value).encode())
        == json_complexity(msgspec.json.encode(value))
        == count_recursively(value)
    )


@settings(max_examples=300, deadline=None)
@given(values)
def test_host_accepts_every_value_a_guest_may_send(value: Any) -> None:
    try:
        copy = copy_as_sent_to_host(value)
    except (TypeError, ValueError):
        return
    assert same(copy, value)
    encoder = ValueEncoder(bounded=True)
    header = {"op": "value", "id": 1, "value": encoder.encode(value), "tags": encoder.tags}
    header["blobs"] = [len(blob) for blob in encoder.blobs]
    data = b"".join(
        [b"\x01", len(json_bytes(header)).to_bytes(4, "little"), json_bytes(header), *encoder.blobs]
    )
    message, blobs = session_frame_connection.parse(memoryview(data))
    assert isinstance(message, session_frame_connection.ValueReplyFrame)
    assert same(session_frame_connection.decode_value(message, message.value, blobs), value)


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


async def run_cells(*codes: str) -> list[CellResult]:
    sandbox = open_sandbox(SandboxSpec())
    try:
        session = await sandbox.open()
        await session.install("asking", MODULE)
        return [await session.run(code, answer=echo) for code in codes]
    finally:
        await sandbox.close()


def test_oversized_value_raises_in_cell_and_session_survives() -> None:
    tried = [f"try:\n    {cell}\nexcept ValueError as error:\n    print(error)" for cell in CELLS]
    first, *between, last = asyncio.run(run_cells("x = 5", *tried, "ask(x, name=1, self=2)"))
    assert first.cell.error is None
    for ran, limit in zip(between, CELLS.values(), strict=True):
        assert limit in ran.cell.stdout
    assert last.cell.value == "['ask', 1, ['name', 'self']]"


def test_documented_nesting_limit_is_exact() -> None:
    deep = "x = []\nfor _ in range({}): x = [x]\nask(x)"
    ran = asyncio.run(run_cells(deep.format(98), deep.format(99)))
    assert ran[0].cell.value == "['ask', 1, []]"
    assert ran[1].cell.error is not None
    assert "TypeError: list nested deeper than 100 levels" in ran[1].cell.error


def test_limits_do_not_apply_to_values_from_host() -> None:
    async def main() -> Any:
        sandbox = open_sandbox(SandboxSpec())
        try:
            session = await sandbox.open()
            await session.set("x", [10**5000, ["a"] * 600_000, [(1,)] * 30_000])
            return (await session.run("x[0] == 10**5000, len(x[1]), len(x[2])", answer=echo)).cell
        finally:
            await sandbox.close()

    assert asyncio.run(main()).value == "(True, 600000, 30000)"


def test_oversized_after_cell_note_is_error_of_cell() -> None:
    odd = "class Odd(Exception):\n    def __str__(self): raise KeyError\nclass Note:\n    pass\n"
    left = [
        "note = [0] * 600_000",
        "note = 10**5000",
        "note = {n * (2**61 - 1) for n in range(3000)}",
        "note = 7",
    ]
    ran = asyncio.run(run_cells(odd, *left))
    assert [each.cell.error and each.cell.error.partition(":")[0] for each in ran] == [
        None,
        *["ValueError"] * 3,
        None,
    ]
    assert ran[-1].note == {"asking": 7}
