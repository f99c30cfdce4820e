"""A context is the same value, bytes and digest wherever it is held."""

import hashlib
import json
from typing import Any

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SharedContextValue
from ramify.sandbox.guest.message_frames import pack_value


@pytest.mark.parametrize(
    "value",
    [
        "short",
        "é\ud800" * 800_000,
        "ascii" * 100_000,
        "ascii" * 300_000,
        {"a": (1, {2}), "b": "x" * 300_000, "c": ["é" * 200_000, b"\xff" * 300_000]},
        ["x" * 10] * 200_000,
        ["x" * 5_000] * 2_000,
        5,
        None,
        b"x",
    ],
)
def test_context_round_trips_through_its_bytes(value: Any) -> None:
    context = SharedContextValue(value)
    data = bytes(context.buffer())
    assert context.digest == hashlib.sha256(data).hexdigest()
    assert context.nbytes == len(data)
    assert data == b"".join(pack_value(value)[0])
    again = SharedContextValue.from_encoded(data)
    assert (again.value, again.digest, again.chars, again.kind) == (
        value,
        context.digest,
        context.chars,
        context.kind,
    )


def test_context_reports_kind_and_chars() -> None:
    assert (SharedContextValue("héllo").kind, SharedContextValue("héllo").chars) == ("str", 5)
    assert (
        SharedContextValue(["ab", {"c": "de"}]).kind,
        SharedContextValue(["ab", {"c": "de"}]).chars,
    ) == (
        "list",
        5,
    )


def test_packed_context_survives_json() -> None:
    value = {"a": (1, b"\xff" * 5000, "é\ud800", {2}), "text": "x" * 10_000}
    assert (
        SharedContextValue.from_jsonable(
            json.loads(json.dumps(SharedContextValue(value).to_jsonable()))
        )
        == value
    )


@pytest.mark.parametrize(
    "data", [b"", b"abc", b"\xff\xff\xff\xff{}", b"\x02\x00\x00\x00{}", b"\x02\x00\x00\x00[]x"]
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SandboxError, match="cannot be read"):
        SharedContextValue.from_encoded(data)
    with pytest.raises(SandboxError, match="cannot be read"):
        SharedContextValue.from_jsonable(data)
