"""Fuzzing of the host's frame reader with almost valid frames: the worst outcome is the end of the
session.

Frames are built from the protocol's own vocabulary with odd values, then mutated: bits flipped,
cut, joined, doubled, delivered in odd pieces. In every case, a run soon ends with a ``CellResult``
or ``SessionDied``, with no remaining task, no error in a callback and no leaked memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify.errors import SandboxError, SessionDied
from ramify.sandbox.base import CellResult, SandboxCapabilities
from ramify.sandbox.guest.message_frames import frame
from ramify.sandbox.guest.value_encoding import ProtocolError
from ramify.sandbox.host import session_frame_connection
from ramify.sandbox.host.running_cell import CellLimits
from ramify.sandbox.host.session import GuestSessionProxy
from ramify.sandbox.host.transport import MessageFrameAssembler

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
HELLO = b"".join(frame(b'{"op":"hello","pid":1}'))

numbers = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([1 << 31, 1 << 62, (1 << 62) + 1, 1 << 64, -(1 << 63)]),
    st.floats(),
    st.booleans(),
)
plain = st.recursive(
    st.one_of(st.none(), numbers, st.text(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)
TAGS = ("str", "bytes", "tuple", "set", "frozenset", "dict", "int", "float", "complex")
DATES = ("datetime", "date", "time", "timedelta", "nothing")
tagged = st.recursive(
    plain,
    lambda inner: st.builds(
        lambda tag, value: {"$": tag, "v": value},
        st.sampled_from(TAGS + DATES) | plain,
        inner
        | st.lists(inner, max_size=3)
        | st.integers(-1, 3)
        | st.text("0123456789abcdefx-.:T+nait", max_size=24),
    ),
    max_leaves=8,
)
arguments = st.tuples(
    st.lists(tagged, max_size=3), st.dictionaries(st.text(max_size=4), tagged, max_size=2)
)
NAMES = (
    "op",
    "id",
    "name",
    "value",
    "tags",
    "blobs",
    "skip",
    "chars",
    "upto",
    "error",
    "note",
    "kind",
    "pid",
    "more",
)
fields: dict[str, st.SearchStrategy[Any]] = {
    "hello": st.fixed_dictionaries({"pid": numbers}),
    "out": st.fixed_dictionaries({"skip": numbers, "chars": numbers, "upto": numbers}),
    "call": st.fixed_dictionaries(
        {"id": numbers, "name": st.text(max_size=9), "value": arguments | tagged}
    ),
    "done": st.fixed_dictionaries(
        {
            "id": numbers,
            "value": st.none() | st.text(max_size=9),
            "error": st.none() | st.text(max_size=9),
            "restored": st.lists(st.text(max_size=5), max_size=2),
            "chars": numbers,
            "note": st.none() | st.dictionaries(st.text(max_size=5), tagged, max_size=2),
        }
    ),
    "ok": st.fixed_dictionaries({"id": numbers}),
    "value": st.fixed_dictionaries({"id": numbers, "value": tagged}),
    "failed": st.fixed_dictionaries(
        {"id": numbers, "kind": st.text(max_size=9), "message": st.text(max_size=9)}
    ),
}


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One frame that could be valid."""
    op = draw(st.sampled_from([*fields, "run", "fork", ""]))
    header = {"op": op, **draw(fields.get(op, st.just({})))}
    header |= draw(st.dictionaries(st.sampled_from(NAMES), plain, max_size=1))
    blobs = draw(st.lists(st.binary(max_size=20), max_size=3))
    if draw(st.booleans()):
        header["tags"] = draw(st.booleans())
    if blobs or draw(st.booleans()):
        header["blobs"] = draw(
            st.just([len(blob) for blob in blobs]) | st.lists(numbers, max_size=3)
        )
    return b"".join(frame(json.dumps(header).encode(), blobs))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """A few mutated frames, in pieces."""
    data = bytearray(b"".join(draw(st.lists(frames(), min_size=1, max_size=5))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "length"])):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 9))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=9))
            case "double":
                data += data[at : at + 200]
            case "length":
                data[0:4] = draw(st.binary(min_size=4, max_size=4))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@FUZZ
@given(streams())
def test_mutated_frames_parse_or_raise_protocol_error(pieces: list[bytes]) -> None:
    """Bytes -> messages and values, or a ProtocolError; the reader never holds more than it was
    fed."""
    assembler, fed = MessageFrameAssembler(), 0
    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            fed += len(piece)
            for view in assembler.feed(memoryview(piece)):
                message, blobs = session_frame_connection.parse(view)
                if isinstance(
                    message,
                    session_frame_connection.HostCallFrame
                    | session_frame_connection.ValueReplyFrame,
                ):
                    session_frame_connection.decode_value(message, message.value, blobs)
            assert assembler.held_bytes() <= fed


@FUZZ
@given(st.lists(st.binary(max_size=64), max_size=6))
def test_random_bytes_parse_or_raise_protocol_error(pieces: list[bytes]) -> None:
    assembler = MessageFrameAssembler()
    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            for view in assembler.feed(memoryview(piece)):
                session_frame_connection.parse(view)


class ScriptedTransport:
    """A guest that answers the first request with ``pieces`` and then stays silent, or dies."""

    caps = SandboxCapabilities(interrupt=True, kill=True)
    shared_buffers = None

    def __init__(self, pieces: list[bytes], is_gone: bool) -> None:
        self.pieces, self.is_gone = pieces, is_gone
        self.sent = 0
        self.is_lost = False

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        self.received, self.lost = received, lost
        self._soon(HELLO)

    def _soon(self, piece: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, piece)

    def _deliver(self, piece: bytes) -> None:
        if not self.is_lost:
            self.received(memoryview(bytearray(piece)))

    def write(self, data: list[Any]) -> None:
        self.sent += sum(map(len, data))
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            self._soon(piece)
        if pieces and self.is_gone:
            asyncio.get_running_loop().call_soon(self.kill)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().call_soon(self.lost)

    def unsent_output(self, start: int) -> bytes:
        return b"left"

    async def exit_reason(self) -> str:
        return "it fell over"

    async def close(self) -> None:
        self.kill()


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    if name.startswith("w"):
        await asyncio.sleep(30)
    return args


async def feed_session(
    pieces: list[bytes], is_gone: bool, request: str, cell_s: float = 0.02
) -> list[Any]:
    """Answer a session's request with the pieces; returns the errors raised in callbacks."""
    loop, faults = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    session = GuestSessionProxy(ScriptedTransport(pieces, is_gone), CellLimits(cell_s, 0.02, 1000))  # type: ignore[arg-type]
    await session.wait_ready()
    try:
        async with asyncio.timeout(60):
            if request == "run":
                assert isinstance(await session.run("1", answer=answer), CellResult)
            else:
                await session.set("x", 1)
    except SessionDied:
        pass
    except SandboxError:  # a guest may refuse what it was asked
        if request == "run":
            raise
    finally:
        await session.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return faults


@settings(FUZZ, max_examples=150)
@given(streams(), st.booleans(), st.sampled_from(["run", "run", "set"]))
def test_session_with_mutated_frames_ends_cleanly(
    pieces: list[bytes], is_gone: bool, request: str
) -> None:
    assert asyncio.run(feed_session(pieces, is_gone, request)) == []


def test_flood_of_frames_is_not_retained() -> None:
    """20,000 frames of output and of calls: the memory that the host holds afterwards does not
    depend on their number."""
    out = b"".join(frame(b'{"op":"out","skip":0,"chars":9,"upto":9,"blobs":[512]}', [b"x" * 512]))
    calls = [
        b"".join(frame(b'{"op":"call","id":%d,"name":"a","value":[["x"],{}]}' % n))
        for n in range(1, 2001)
    ]
    kept = []
    for times in (1, 10):
        flood = [out * 100] * 20 * times + [b"".join(calls)]
        tracemalloc.start()
        asyncio.run(feed_session(flood, True, "run", cell_s=60.0))
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert kept[1] < kept[0] + 500_000, kept


def test_unfinished_long_frame_is_buffered_once() -> None:
    assembler, piece = MessageFrameAssembler(), memoryview(b"x" * 100_000)
    list(assembler.feed(memoryview((200 << 20).to_bytes(4, "little"))))
    tracemalloc.start()
    for _ in range(300):
        assert list(assembler.feed(piece)) == []
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * held < 2.5 * 40_000_000, (held, peak)
