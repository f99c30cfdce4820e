"""HTTP responses of a container engine: valid ones are parsed, malformed ones raise one error, and
none blocks forever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.docker import DockerEngine

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
    """Return what ``DockerEngine.ask`` gets from an engine that sends ``answer`` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> object:
        path = str(folder / "engine.sock")
        async with await asyncio.start_unix_server(serve, path):
            return await DockerEngine(path).ask("list images", "GET", "/images")

    return asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.parametrize("name", VALID)
def test_valid_response_is_parsed(tmp_path: Path, name: str) -> None:
    assert ask_engine(tmp_path, VALID[name]) == [1, 2, 3]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_response_raises_one_line_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        SandboxError, match=r"the container engine at .* broke off \(list images\): "
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
