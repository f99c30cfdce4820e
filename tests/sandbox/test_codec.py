"""The codec: every supported value survives a round trip, and hostile data is refused."""

import math
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.sandbox.guest.message_frames import (
    MessageFrameReader,
    frame,
    pack_value,
    unpack_value,
    write_all,
)
from ramify.sandbox.guest.output import HeadTailBuffer
from ramify.sandbox.guest.value_encoding import (
    ProtocolError,
    ValueDecoder,
    ValueEncoder,
    ValueEncodingError,
)
from ramify.sandbox.host.session_frame_connection import parse
from ramify.sandbox.host.transport import MessageFrameAssembler

text = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.timedeltas()
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=30)
        | st.tuples(inner)
        | st.dictionaries(hashables, inner, max_size=5)
        | st.sets(hashables, max_size=4)
        | st.frozensets(hashables, max_size=4)
    ),
    max_leaves=30,
)


def same(a: Any, b: Any) -> bool:
    """Equal, including types at every level and the sign of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b)


@settings(max_examples=300, deadline=None)
@given(values)
def test_values_round_trip_directly_and_through_host_json(value: Any) -> None:
    parts, _ = pack_value(value)
    assert same(unpack_value(b"".join(parts))[0], value)
    encoder = ValueEncoder()
    data = msgspec.json.decode(msgspec.json.encode(encoder.encode(value)))
    assert same(ValueDecoder(encoder.blobs).decode(data) if encoder.tags else data, value)


def test_dict_subclasses_decode_as_dict() -> None:
    from collections import Counter, OrderedDict, defaultdict

    for kind in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        assert unpack_value(b"".join(pack_value(kind)[0])) == ({"a": 2, "b": 1}, 2)


def test_equal_sets_encode_identically() -> None:
    first, second = {f"name {i}" for i in range(50)}, {f"name {i}" for i in reversed(range(50))}
    assert pack_value(first) == pack_value(second)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a value of type object at value cannot"),
        ({"a": [1, (object,)]}, "a value of type type at value['a'][1][0] cannot"),
        ({(1, object()): 1}, "at value[<tuple>][1] cannot"),
        (bytearray(), "a value of type bytearray at value cannot"),
        ([True] * 20 + [os.stat_result], "a value of type type at value[20] cannot"),
    ],
)
def test_unsupported_value_is_named_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(ValueEncodingError) as caught:
        pack_value(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"$": "pickle", "v": 1},
        {"$": "str", "v": 0},
        {"$": "str", "v": -1},
        {"$": "str"},
        {"$": ["str"], "v": 1},
        {"$": "set", "v": [[]]},
        {"$": "set", "v": "abc"},
        {"$": "int", "v": 5},
        {"$": "int", "v": "z"},
        {"$": "float", "v": "1"},
        {"$": "complex", "v": [1]},
        {"$": "complex", "v": ["a", "b"]},
        {"$": "dict", "v": [[1]]},
        {"$": "datetime", "v": "x"},
        {"$": "timedelta", "v": [10**30, 0, 0]},
        {"$": "dict", "v": [[[], 1]]},
    ],
)
def test_hostile_values_are_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        ValueDecoder([]).decode(data)


def test_blob_cannot_be_referenced_twice() -> None:
    with pytest.raises(ProtocolError, match="used before"):
        ValueDecoder([b"x" * 1000]).decode([{"$": "str", "v": 0}] * 2)


def test_frames_reassemble_from_pieces_of_any_size(tmp_path: Any) -> None:
    frames = [
        frame(b'{"op":"out","skip":0,"chars":1,"upto":1,"blobs":[5]}', [b"x" * 5]),
        frame(b'{"op":"ok","id":1}'),
    ]
    frames.append(
        frame(b'{"op":"out","skip":0,"chars":1,"upto":1,"blobs":[200000]}', [b"y" * 200_000])
    )
    data = b"".join(part for parts in frames for part in parts)
    for step in (1, 7, 4096, 65_537, len(data)):
        assembler, got = MessageFrameAssembler(), []
        for at in range(0, len(data), step):
            got += [
                (type(m).__name__, [len(b) for b in blobs])
                for m, blobs in map(parse, assembler.feed(memoryview(data[at : at + step])))
            ]
        assert got == [
            ("CellOutputFrame", [5]),
            ("OkReplyFrame", []),
            ("CellOutputFrame", [200_000]),
        ]
    path = tmp_path / "frames"
    with path.open("w+b") as file:
        write_all(file.fileno(), [part for parts in frames for part in parts])
        file.seek(0)
        reader, sizes = MessageFrameReader(file.fileno()), []
        while len(sizes) < 3:
            view = reader.next()
            if view is None:
                reader.fill()
            else:
                sizes.append(len(view))
        with pytest.raises(EOFError):
            reader.fill()
    assert sizes == [sum(map(len, parts)) - 4 for parts in frames]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=20), st.integers(2, 60))
def test_head_tail_buffer_keeps_both_ends_of_output(pieces: list[str], limit: int) -> None:
    kept, whole = HeadTailBuffer(limit), "".join(pieces).replace("\r", "")
    for piece in whole.encode().splitlines(keepends=True):
        kept.add(piece)
    shown = kept.text(len(whole))
    if len(whole.encode()) <= limit // 2 * 2:
        assert shown == whole
    elif shown != whole:
        head, _, rest = shown.partition("\n[… ")
        gap, _, tail = rest.partition(" characters left out …]\n")
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert len(head) + len(tail) + int(gap.replace(",", "")) == len(whole)
        assert len(head.encode()) + len(tail.encode()) <= limit
