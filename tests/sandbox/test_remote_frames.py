"""Frames between ``RemoteSandbox`` and a box whose other end a hostile guest has taken over."""

from __future__ import annotations

import asyncio
import json

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.guest.message_frames import frame, to_base64_lines
from ramify.sandbox.providers.remote import Carries, RemoteSandbox

SPEC = SandboxSpec(provider="docker")


def framed(header: object, blob: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"".join(frame(text, [blob]))


class HostileBox:
    """A box that greets the host, sends prepared bytes in pieces, and stays open."""

    name = "hostile"

    def __init__(self, sent: bytes, carries: Carries = "bytes", piece: int = 1 << 16) -> None:
        self.carries = carries
        data = b"ramify-guest-1\n" + sent
        self._pieces = [data[at : at + piece] for at in range(0, len(data), piece)][::-1]

    async def start_in_new_box(self, command: list[str]) -> HostileBox:
        return self

    async def send(self, data: bytes) -> None:
        pass

    async def receive(self) -> bytes:
        if self._pieces:
            return self._pieces.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        pass


async def opened(box: HostileBox) -> None:
    sandbox = RemoteSandbox(SPEC, box)
    try:
        await sandbox.open()
    finally:
        await sandbox.close()


HEADER_THAT_IS_NONE = "it broke the protocol: invalid frame"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (framed({"op": "exec"}), HEADER_THAT_IS_NONE),
        (framed({"op": "ended", "status": 1 << 40}), HEADER_THAT_IS_NONE),
        (framed(b"[" * 1_000_000), HEADER_THAT_IS_NONE),
        (framed(b'{"op":"data","x":' + b"[" * 1_000_000), HEADER_THAT_IS_NONE),
        (framed(b"\xff\xfe"), HEADER_THAT_IS_NONE),
        (framed({"op": "data"}, bytes(3 << 20)), "it broke the protocol: a frame of 3,145,7"),
        (b"\x02\0\0\0\1\0", "it broke the protocol: a frame of 2 bytes"),
        (b"\x09\0\0\0\x09\0\0\0\0{}{}", "it broke the protocol: a frame has version 9"),
        (b"\x09\0\0\0\x01\xff\0\0\0{}{}", "it broke the protocol: a header of 255 bytes"),
        (framed({"op": "ended", "status": -9}, b"last words"), "killed by signal 9"),
        (framed({"op": "ended"}), "it closed its connection to the host"),
        (framed({"op": "failed", "message": "'numpy' cannot be imported"}), "'numpy' cannot be"),
    ],
)
@pytest.mark.parametrize(("carries", "piece"), [("bytes", 1 << 16), ("text", 60_001)])
def test_session_ends_with_what_the_other_end_did(
    answer: bytes, why: str, carries: Carries, piece: int
) -> None:
    sent = answer if carries == "bytes" else to_base64_lines(answer)
    with pytest.raises(SandboxError, match=why):
        asyncio.run(opened(HostileBox(sent, carries, piece)))


def test_line_without_an_end_is_refused() -> None:
    with pytest.raises(SandboxError, match="a line of 2,"):
        asyncio.run(opened(HostileBox(b"A" * 3_000_000, "text")))
