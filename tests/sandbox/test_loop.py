"""How long frames from a session block the host's event loop: the most expensive frames possible,
with the CPU time of each callback of the loop.

While frames are decoded, a timer must be served and another session's cells must end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.guest.message_frames import frame
from ramify.sandbox.host.running_cell import CellLimits
from ramify.sandbox.host.session import GuestSessionProxy
from ramify.sandbox.providers.process import ProcessSandbox
from tests.sandbox.test_fuzz import HELLO
from tests.sandbox.test_session import LyingTransport, said

MAX_CALLBACK_S = 0.05
"""Maximum CPU time of one callback."""
SAME = 2**61 - 1


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    return args


class CallbackTimer:
    """The CPU time of the event loop's callbacks, measured by its own selector."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = 0.0
        self._began: float | None = None
        selector = loop._selector  # type: ignore[attr-defined]  # noqa: SLF001 (asyncio's)
        select = selector.select

        def watched(timeout: float | None = None) -> Any:
            if self._began is not None:
                self.longest = max(self.longest, time.thread_time() - self._began)
            events = select(timeout)
            self._began = time.thread_time()
            return events

        selector.select = watched


def raw_call(value: bytes, id: int = 1, **more: Any) -> bytes:
    rest = "".join(f",{json.dumps(key)}:{json.dumps(item)}" for key, item in more.items())
    text = b'{"op":"call","id":%d,"name":"echo","value":[[%b],{}]%b}' % (id, value, rest.encode())
    return b"".join(frame(text))


def many(item: bytes, num: int) -> bytes:
    return b"[%b]" % b",".join([item] * num)


def tagged(name: str, items: Any) -> bytes:
    return json.dumps({"$": name, "v": items}).encode()


def equal(num: int) -> list[Any]:
    return [{"$": "int", "v": hex(n * SAME)} for n in range(num)]


LARGE: dict[str, Callable[[], bytes]] = {
    "numbers that are slow to read": lambda: raw_call(many(b"1.2345678901234567e-300", 490_000)),
    "long integers": lambda: raw_call(many(b"9" * 3999, 4000)),
    "integers": lambda: raw_call(many(b"7", 499_000)),
    "short strings": lambda: raw_call(many(b'"abcdefghijklmnopqrstuvwxyz"', 490_000)),
    "escapes": lambda: raw_call(b'"%b"' % (b'\\"' * 8_000_000)),
    "brackets in strings": lambda: raw_call(b'"%b"' % (b",[{" * 5_000_000)),
    "spaces": lambda: raw_call(b" " * 15_000_000 + b"1"),
    "small dicts": lambda: raw_call(many(b'{"a":1}', 49_000)),
    "one large dict": lambda: raw_call(
        b"{%b}" % b",".join(b'"k%d":%d' % (n, n) for n in range(99_000))
    ),
    "empty lists": lambda: raw_call(many(b"[]", 49_000)),
    "deep lists": lambda: raw_call(b"[" * 7_000_000),
    "equal hashes": lambda: raw_call(tagged("set", equal(1900)), tags=True),
    "equal hashes of tuples": lambda: raw_call(
        tagged("set", [{"$": "tuple", "v": [n]} for n in equal(1900)]), tags=True
    ),
    "many equal hashes": lambda: raw_call(tagged("set", equal(40_000)), tags=True),
    "many tuples": lambda: raw_call(many(tagged("tuple", [1]), 24_000), tags=True),
    "many dates": lambda: raw_call(
        many(tagged("datetime", ["2026-01-01T00:00:00", 0]), 24_000), tags=True
    ),
    "many blobs": lambda: said(
        {
            "op": "call",
            "id": 1,
            "name": "echo",
            "value": [[[{"$": "bytes", "v": n} for n in range(20_000)]], {}],
            "tags": True,
            "blobs": [0] * 20_000,
        }
    ),
    "a long text": lambda: said(
        {
            "op": "call",
            "id": 1,
            "name": "echo",
            "value": [[{"$": "str", "v": 0}], {}],
            "tags": True,
            "blobs": [100 << 20],
        },
        b"x" * (100 << 20),
    ),
    "a long text that is not ASCII": lambda: said(
        {
            "op": "call",
            "id": 1,
            "name": "echo",
            "value": [[{"$": "str", "v": 0}], {}],
            "tags": True,
            "blobs": [40 << 20],
        },
        "é".encode() * (20 << 20),
    ),
    "long output": lambda: said(
        {"op": "out", "skip": 0, "chars": 1, "upto": 0, "blobs": [100 << 20]}, b"x" * (100 << 20)
    ),
    "a long error": lambda: said(
        {
            "op": "done",
            "id": 1,
            "value": None,
            "error": "x" * 15_000_000,
            "restored": [],
            "note": None,
            "chars": 0,
        }
    ),
    "many restored names": lambda: said(
        {
            "op": "done",
            "id": 1,
            "value": None,
            "error": None,
            "restored": ["x"] * 400_000,
            "note": None,
            "chars": 0,
        }
    ),
    "a large note": lambda: said(
        {
            "op": "done",
            "id": 1,
            "value": None,
            "error": None,
            "restored": [],
            "note": {"m": [1] * 400_000},
            "chars": 0,
        }
    ),
    "many small calls": lambda: b"".join(raw_call(b"1", n) for n in range(1, 20_000)),
    "many small outputs": lambda: (
        said({"op": "out", "skip": 0, "chars": 1, "upto": 0, "blobs": [1]}, b"x") * 50_000
    ),
    "many medium calls": lambda: b"".join(
        raw_call(tagged("set", equal(90)), n, tags=True) for n in range(1, 200)
    ),
    "many calls that are just not large": lambda: b"".join(
        raw_call(many(b"1.2345678901234567e-300", 330), n) for n in range(1, 200)
    ),
}


class PiecewiseTransport(LyingTransport):
    """Delivers its script in pieces as a socket does, and not while it is paused."""

    def __init__(self, data: bytes) -> None:
        super().__init__(hello=HELLO)
        self.pieces = [data[at : at + (1 << 18)] for at in range(0, len(data), 1 << 18)]
        self.is_paused = False

    def write(self, data: list[Any]) -> None:
        self.written.append(b"")  # joining a large reply would itself block the loop
        if len(self.written) == 1:
            asyncio.get_running_loop().call_soon(self.deliver)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            asyncio.get_running_loop().call_soon(self.deliver)

    def deliver(self) -> None:
        if not self.is_paused and self.pieces:
            self.received(memoryview(self.pieces.pop(0)))
            asyncio.get_running_loop().call_soon(self.deliver)


@pytest.fixture(autouse=True)
def freeze_existing_objects() -> Iterator[None]:
    """Exclude objects that other tests left, whose collection would count as time of a frame."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def longest_block(data: bytes) -> tuple[float, float]:
    """CPU seconds of the longest turn of the loop, and how long the cell took."""
    watched = CallbackTimer(asyncio.get_running_loop())
    began = time.monotonic()
    limits = CellLimits(1.0, 0.05, 1000)
    session = GuestSessionProxy(PiecewiseTransport(data), limits)
    await session.wait_ready()
    try:
        await session.run("1", answer=answer)
    except SandboxError:
        pass
    finally:
        await session.close()
    took = time.monotonic() - began
    await asyncio.sleep(0)
    return watched.longest, took


@pytest.mark.parametrize("name", LARGE)
def test_no_frame_blocks_event_loop(name: str) -> None:
    longest, took = min(asyncio.run(longest_block(LARGE[name]())) for _ in range(2))
    assert longest <= MAX_CALLBACK_S
    assert took < 20


def test_random_values_do_not_block_event_loop() -> None:
    """Values of random shape, each as large as the limits allow."""
    generator = random.Random(7)
    leaves: list[Callable[[], bytes]] = [
        lambda: b"1",
        lambda: b"-1.7976931348623157e+308",
        lambda: b"9" * generator.randrange(1, 3000),
        lambda: json.dumps("\u00e9\\" * generator.randrange(200)).encode(),
        lambda: tagged("tuple", [1, 2]),
        lambda: tagged("set", equal(generator.randrange(60))),
        lambda: tagged("float", "nan"),
    ]

    def value(depth: int) -> bytes:
        if depth == 0 or generator.random() < 0.3:
            return generator.choice(leaves)()
        size = generator.randrange(1, 12)
        if generator.random() < 0.5:
            return b"[%b]" % b",".join(value(depth - 1) for _ in range(size))
        return b"{%b}" % b",".join(b'"%d":%b' % (n, value(depth - 1)) for n in range(size))

    worst = 0.0
    for _ in range(25):
        item = value(generator.randrange(1, 6))
        count = max(1, min(2_000_000 // len(item), 40_000))
        data = raw_call(many(item, count), tags=True)
        worst = max(worst, min(asyncio.run(longest_block(data))[0] for _ in range(2)))
    assert worst <= MAX_CALLBACK_S


def test_closed_sessions_leave_no_reference_cycles() -> None:
    """A full collection would scan every object of the host and block its loop meanwhile."""

    async def main() -> list[str]:
        sandbox = ProcessSandbox(SandboxSpec(provider="process"))
        await (await sandbox.open()).close()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                session = await sandbox.open()
                await session.run("print(1)", answer=answer)
                branch = await session.fork()
                await branch.close()
                await session.close()
                del session, branch
            while sandbox.buffers.endings:
                await asyncio.sleep(0.01)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return sorted({type(each).__name__ for each in gc.garbage})
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            await sandbox.close()

    assert asyncio.run(main()) == []
