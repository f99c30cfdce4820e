"""HTTP responses of a container engine: valid ones are parsed, malformed ones raise one error, and
none blocks forever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.providers.docker import DockerApiClient, DockerEngineError

LINE = b"HTTP/1.1 200 OK\r\n"
CHUNKS = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
VALID = {
    "length": LINE + b"Content-Length: 7\r\n\r\n[1,2,3]",
    "chunks": CHUNKS + b"3;x=y\r\n[1,\r\n4\r\n2,3]\r\n0\r\n\r\n",
    "trailers": CHUNKS + b"7\r\n[1,2,3]\r\n0\r\nA: b\r\n\r\n",
    "until close": LINE + b"\r\n[1,2,3]",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + LINE + b"Content-Length: 7\r\n\r\n[1,2,3]",
}
MALFORMED = {
    "negative": CHUNKS + b"-2\r\n" * 10,
    "negative by one": CHUNKS + b"-1\r\nx" * 10,
    "0x": CHUNKS + b"0x7\r\n[1,2,3]\r\n0\r\n\r\n",
    "underscore": CHUNKS + b"0_7\r\n[1,2,3]\r\n0\r\n\r\n",
    "no CRLF": CHUNKS + b"7\r\n[1,2,3]xx0\r\n\r\n",
    "huge": CHUNKS + b"ffffffffffff\r\n[1,2,3]\r\n0\r\n\r\n",
    "endless size": CHUNKS + b"0" * 100_000,
    "xchunked": LINE + b"Transfer-Encoding: xchunked\r\n\r\n7\r\n[1,2,3]\r\n0\r\n\r\n",
    "both": LINE
    + b"Transfer-Encoding: chunked\r\nContent-Length: 7\r\n\r\n7\r\n[1,2,3]\r\n0\r\n\r\n",
    "two lengths": LINE + b"Content-Length: 7\r\nContent-Length: 8\r\n\r\n[1,2,3]x",
    "signed length": LINE + b"Content-Length: +7\r\n\r\n[1,2,3]",
    "negative length": LINE + b"Content-Length: -7\r\n\r\n[1,2,3]",
    "length in another script": LINE + b"Content-Length: \xb2\r\n\r\n[]",
    "long length": LINE + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n[1,2,3]",
    "half a body": LINE + b"Content-Length: 70\r\n\r\n[1,2,3]",
    "half a head": LINE,
    "nothing": b"",
    "no status": b"HTTP/1.1\r\n\r\n",
    "no colon": LINE + b"Content-Length 7\r\n\r\n[1,2,3]",
    "endless headers": LINE + b"A: b\r\n" * 50_000,
    "endless interim": b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
}


def ask_engine(folder: Path, answer: bytes) -> object:
    """Return what ``DockerApiClient.ask`` gets from an engine that sends ``answer`` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> object:
        path = str(folder / "engine.sock")
        async with await asyncio.start_unix_server(serve, path):
            return await DockerApiClient(path).ask("list images", "GET", "/images")

    return asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.parametrize("name", VALID)
def test_valid_response_is_parsed(tmp_path: Path, name: str) -> None:
    assert ask_engine(tmp_path, VALID[name]) == [1, 2, 3]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_response_raises_one_line_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        SandboxError, match=r"the connection to the container engine at .* broke \(list images\): "
    ) as caught:
        ask_engine(tmp_path, MALFORMED[name])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_deeply_nested_json_body_is_returned_as_text(tmp_path: Path) -> None:
    deep = b"[" * 200_000
    assert (
        ask_engine(tmp_path, LINE + b"Content-Length: %d\r\n\r\n" % len(deep) + deep)
        == deep.decode()
    )


FRAME = b"\1\0\0\0\0\0\0\5hello"
"""A frame of five bytes of standard output."""
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


async def attached(folder: Path, first: bytes, later: bytes = b"") -> tuple[list[bytes], bytes]:
    """Return (output, input that the engine received) of a container whose engine answers ``first``
    to the request to attach, and ``later`` to the container's input."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        if b"\r\n\r\n" in first:
            received.append(await reader.read(100))
        writer.write(later)
        writer.close()

    path = str(folder / "engine.sock")
    async with await asyncio.start_unix_server(serve, path):
        stdio = await DockerApiClient(path).attach("c0")
        await stdio.send(b"input")
        output = []
        while data := await stdio.receive():
            output.append(data)
        await stdio.close()
    return output, received[0]


@pytest.mark.parametrize("head", [UPGRADED, LINE + b"\r\n"], ids=["101", "200"])
@pytest.mark.parametrize("early", [b"", FRAME, FRAME[:3]], ids=["none", "a frame", "half a head"])
def test_connection_becomes_a_stream_and_loses_no_early_bytes(
    tmp_path: Path, head: bytes, early: bytes
) -> None:
    """An engine may send output together with its response."""
    whole = FRAME + FRAME
    run = attached(tmp_path, head + early, whole[len(early) :])
    output, received = asyncio.run(asyncio.wait_for(run, 100))
    assert (output, received) == ([b"hello", b"hello"], b"input")


def test_response_that_is_not_a_stream_is_refused(tmp_path: Path) -> None:
    for answer, text in (
        (LINE + b"Content-Length: 2\r\n\r\n[]", "does not become a plain stream"),
        (UPGRADED[:40], "the connection broke before the reply was whole"),
    ):
        with pytest.raises(SandboxError, match=rf"broke \(attach to a container\): .*{text}"):
            asyncio.run(asyncio.wait_for(attached(tmp_path, answer), 100))
    missing = b'HTTP/1.1 404 Not Found\r\nContent-Length: 19\r\n\r\n{"message": "gone"}'
    with pytest.raises(DockerEngineError, match="could not attach to a container: gone"):
        asyncio.run(asyncio.wait_for(attached(tmp_path, missing), 100))


def test_upgrade_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="a protocol that was not asked for"):
        ask_engine(tmp_path, UPGRADED + FRAME)
