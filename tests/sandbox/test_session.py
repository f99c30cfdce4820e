"""The host side against lying guests: each is a scripted transport and can do no more than end its
own session."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from ramify.errors import SandboxError, SessionDied
from ramify.sandbox.base import SandboxCapabilities
from ramify.sandbox.guest.message_frames import frame
from ramify.sandbox.host.running_cell import CellLimits
from ramify.sandbox.host.session import GuestSessionProxy


def said(header: Any, *blobs: bytes) -> bytes:
    return b"".join(frame(json.dumps(header).encode(), blobs))


HELLO = said({"op": "hello", "pid": 1})
DONE = {
    "op": "done",
    "id": 1,
    "value": None,
    "error": None,
    "restored": [],
    "note": None,
    "chars": 0,
}


class LyingTransport:
    """Transport that answers the first request with ``script`` and records what the host does."""

    caps = SandboxCapabilities(interrupt=True, kill=True)
    shared_buffers = None

    def __init__(self, *script: bytes, hello: bytes = HELLO, dies: bool = True) -> None:
        self.script, self.hello, self.dies = list(script), hello, dies
        self.written: list[bytes] = []
        self.events: list[str] = []

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        self.received, self.lost = received, lost
        asyncio.get_running_loop().call_soon(received, memoryview(self.hello))

    def write(self, data: list[Any]) -> None:
        self.written.append(b"".join(data))
        script, self.script = self.script, []
        for part in script:
            asyncio.get_running_loop().call_soon(self.received, memoryview(part))

    def pause(self) -> None:
        self.events.append("pause")

    def resume(self) -> None:
        self.events.append("resume")

    def interrupt(self) -> None:
        self.events.append("interrupt")

    def kill(self) -> None:
        self.events.append("kill")
        if self.dies:
            asyncio.get_running_loop().call_soon(self.lost)

    def unsent_output(self, start: int) -> bytes:
        return b"left over"[start:]

    async def exit_reason(self) -> str:
        return "it fell over"

    async def close(self) -> None:
        self.events.append("close")


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    if name == "wait":
        await asyncio.sleep(10)
    return args


async def run(transport: LyingTransport, **options: Any) -> Any:
    session = GuestSessionProxy(transport, CellLimits(5, 0.05, 1000))
    await session.wait_ready()
    try:
        return await session.run("1", answer=answer, **options)
    finally:
        await session.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


CALL = {"op": "call", "id": 1, "name": "echo", "value": [[1], {}]}
LIES = {
    "another version": b"\x07\x00\x00\x00\x02\x02\x00\x00\x00{}",
    "a length of 2 GB": b"\xff\xff\xff\x7f\x01",
    "a length of 1": b"\x01\x00\x00\x00\x01",
    "a header longer than its frame": b"\x07\x00\x00\x00\x01\xff\x00\x00\x00{}",
    "no JSON": b"".join(frame(b"{")),
    "no UTF-8": b"".join(frame(b'{"op":"\xff"}')),
    "deep JSON": b"".join(
        frame(b'{"op":"call","id":1,"name":"x","value":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    ),
    "an unknown op": said({"op": "format"}),
    "an unknown field": said({**DONE, "more": 1}),
    "a second hello": HELLO,
    "another cell's end": said({**DONE, "id": 7}),
    "an answer to nothing": said({"op": "ok", "id": 1}),
    "a negative length": said({**DONE, "chars": -1}),
    "blobs that are not there": said({**CALL, "blobs": [5]}),
    "blobs of odd lengths": said({**CALL, "blobs": [-5, 10]}, b"12345"),
    "blobs nobody named": said(CALL, b"12345"),
    "output without a blob": said({"op": "out", "skip": 0, "chars": 0, "upto": 0, "blobs": []}),
    "a call without arguments": said({**CALL, "value": 3}),
    "a call with odd keywords": said(
        {**CALL, "tags": True, "value": [[], {"$": "dict", "v": [[1, 2]]}]}
    ),
    "a call numbered twice": said(CALL) + said(CALL),
    "a value that does not decode": said({**CALL, "tags": True, "value": {"$": "set", "v": [[]]}}),
    "a frame after the end": said(DONE) + said(CALL),
}


@pytest.mark.parametrize("lie", LIES)
def test_protocol_violation_ends_session(lie: str) -> None:
    transport = LyingTransport(LIES[lie])
    if (
        lie == "a frame after the end"
    ):  # the cell had ended: its result counts, and the session is dead
        assert asyncio.run(run(transport)).cell.error is None
    else:
        with pytest.raises(SessionDied, match="broke the protocol") as caught:
            asyncio.run(run(transport))
        assert caught.value.stdout == "left over"
    assert "kill" in transport.events
    assert transport.events[-1] == "close"


def test_frames_received_during_large_decode_are_kept() -> None:
    large = said({**CALL, "value": [[[1] * 20_000], {}]})
    second = said({**CALL, "id": 2})
    transport = LyingTransport(large, second[:9], second[9:], said({**DONE, "value": "7"}))
    ran = asyncio.run(run(transport))
    assert (ran.cell.value, ran.cell.error, ran.cell.died) == ("7", None, False)
    assert "kill" not in transport.events


def test_incomplete_frame_runs_into_time_limit() -> None:
    transport = LyingTransport(said(DONE)[:-3])
    with pytest.raises(SessionDied, match=r"did not stop within 0\.05 s of an interrupt \(time\)"):
        asyncio.run(run(transport, timeout_s=0.05))
    assert transport.events[0] == "interrupt"


def test_guest_that_survives_kill_is_abandoned() -> None:
    with pytest.raises(SessionDied):
        asyncio.run(run(LyingTransport(dies=False), timeout_s=0.01))


def test_flood_of_calls_pauses_reading() -> None:
    transport = LyingTransport(*(said({**CALL, "id": id, "name": "wait"}) for id in range(1, 1025)))
    with pytest.raises(SessionDied):
        asyncio.run(run_and_interrupt(transport))
    assert transport.events[0] == "pause"
    assert "resume" in transport.events


async def run_and_interrupt(transport: LyingTransport) -> None:
    session = GuestSessionProxy(transport, CellLimits(5, 0.05, 1000))
    await session.wait_ready()

    async def interrupt() -> None:
        while "pause" not in transport.events:
            await asyncio.sleep(0)
        session.interrupt("enough")

    interrupting = asyncio.ensure_future(interrupt())
    try:
        await session.run("1", answer=answer)
    finally:
        interrupting.cancel()
        await session.close()


def test_output_is_truncated_to_its_limit() -> None:
    flood = said({"op": "out", "skip": 5, "chars": 9000, "upto": 3, "blobs": [4000]}, b"x" * 4000)
    ran = asyncio.run(run(LyingTransport(flood + flood + said({**DONE, "chars": 9000}))))
    assert (len(ran.cell.stdout) < 600, ran.cell.stdout_chars) == (True, 9000)


def test_silent_guest_fails_to_open() -> None:
    async def main() -> None:
        session = GuestSessionProxy(LyingTransport(hello=b""), CellLimits(5, 0.05, 1000))
        with pytest.raises(SandboxError, match=r"said nothing for 0\.05 s"):
            await session.wait_ready(0.05)

    asyncio.run(main())
