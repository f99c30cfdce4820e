"""Both HTTP clients return the same answers and raise the same errors. HTTP framing, byte by
byte."""

import asyncio
import contextlib
import gzip
import zlib

import pytest

from ramify.clients.http1 import Http1Client, route_to
from ramify.clients.https import HttpsClient
from ramify.errors import BadReply, ReplyLost, Unreachable
from tests.clients.helpers import run

LIMITS = (60.0, 60.0, 1000)
"""Seconds to keep an idle connection, seconds to connect, maximum bytes of a body."""


class Raw:
    """A server that sends given bytes for each request, in pieces, and then closes or waits for
    another."""

    def __init__(self, *answers, piece=None, close=False):
        self.connections = self.closed = 0
        self.heads = []
        self._answers, self._piece, self._close = list(answers), piece, close

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = (
            f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1/chat/completions"
        )
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        await self._server.wait_closed()

    async def _talk(self, reader, writer):
        self.connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = next(
                    line
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                await reader.readexactly(int(length.split(b":")[1]))
                answer = self._answers.pop(0)
                for at in range(0, len(answer), self._piece or len(answer) or 1):
                    writer.write(answer[at : at + (self._piece or len(answer))])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._close:
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self.closed += 1


class Way:
    """``Http1Client`` or ``HttpsClient`` behind one interface."""

    def __init__(self, kind):
        self._http = kind(*LIMITS)

    async def post(self, url, body=b"{}"):
        return await self._http.post("m", route_to(url, {"Authorization": "Bearer key"}), body)

    async def close(self):
        await self._http.close()


@pytest.fixture(params=[Http1Client, HttpsClient])
def way(request, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda: Way(request.param)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Thing: Value\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
)
TRAILERS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + OK


def responses_from(way, *answers, times=1, url=None, **options):
    async def main():
        async with Raw(*answers, **options) as server:
            network = way()
            try:
                got = [await network.post(url or server.url) for _ in range(times)]
            finally:
                await network.close()
            return got, server

    return run(main())


@pytest.mark.parametrize("piece", [None, 1, 7])
@pytest.mark.parametrize(
    "answer",
    [OK, CHUNKED, TRAILERS, UNTIL_CLOSE, OLD, INTERIM],
    ids=["length", "chunks", "trailers", "until close", "1.0", "interim"],
)
def test_every_body_framing_is_read(way, answer, piece):
    (got,), _ = responses_from(way, answer, piece=piece, close=answer is UNTIL_CLOSE)
    assert (got.status, got.body) == (200, b"hello")


def test_headers_are_sent_and_returned(way):
    (got,), server = responses_from(way, OK)
    assert got.headers["x-thing"] == "Value"
    lines = server.heads[0].decode().split("\r\n")
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert {
        "Authorization: Bearer key",
        "User-Agent: ramify",
        "Content-Type: application/json",
        "Content-Length: 2",
    } <= set(lines)


@pytest.mark.parametrize(
    ("answer", "connections"),
    [(OK, 1), (CHUNKED, 1), (OLD, 3), (OK.replace(b"X-Thing: Value", b"Connection: close"), 3)],
    ids=["length", "chunks", "1.0", "close"],
)
def test_connections_are_reused_when_allowed(way, answer, connections):
    closes = connections > 1
    got, server = responses_from(way, *[answer] * 3, times=3, close=closes)
    assert ([each.body for each in got], server.connections) == ([b"hello"] * 3, connections)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ReplyLost),
        (b"HTTP/1.1 200", ReplyLost),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", ReplyLost),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhel", ReplyLost),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000, BadReply),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n"
            + b"x" * 2000
            + b"\r\n0\r\n\r\n",
            BadReply,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, BadReply),
    ],
    ids=[
        "nothing",
        "half a head",
        "half a body",
        "half a chunk",
        "long",
        "long in chunks",
        "long until close",
    ],
)
def test_truncated_or_oversized_reply_is_an_error(way, answer, error):
    with pytest.raises(error) as caught:
        responses_from(way, answer, close=True)
    assert str(caught.value).startswith("m: ")
    assert caught.value.may_be_paid


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_non_http_reply_is_reported(answer):
    with pytest.raises(BadReply, match="m: the reply is not HTTP: "):
        responses_from(lambda: Way(Http1Client), answer)


def packed(body, encoding):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Encoding: %s\r\n\r\n%s" % (
        len(body),
        encoding,
        body,
    )


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (gzip.compress(b"hello", mtime=0), b"gzip"),
        (zlib.compress(b"hello"), b"deflate"),
        (b"hello", b"Identity"),
    ],
)
def test_unrequested_compression_is_unpacked(way, body, encoding):
    got, server = responses_from(way, packed(body, encoding), packed(body, encoding), times=2)
    assert [answer.body for answer in got] == [b"hello", b"hello"]
    assert server.connections == 1


@pytest.mark.parametrize(
    ("body", "encoding", "says", "again"),
    [
        (b"hello", b"br", "the reply is compressed (br), which was not asked for", False),
        (
            gzip.compress(b"0" * 10**7, mtime=0),
            b"gzip",
            "the reply is longer than 1000 bytes",
            False,
        ),
        (gzip.compress(b"hello", mtime=0)[:-9], b"gzip", "the reply is not valid gzip", True),
        (b"hello", b"gzip", "the reply is not valid gzip", True),
    ],
)
def test_unknown_or_damaged_compression_is_an_error(body, encoding, says, again):
    """What would be the same the next time is not paid for twice."""
    with pytest.raises(BadReply) as caught:
        responses_from(lambda: Way(Http1Client), packed(body, encoding))
    assert str(caught.value).startswith(f"m: {says}")
    assert caught.value.transient is again
    assert caught.value.may_be_paid


def test_refused_connection_raises_unreachable(way):
    async def main():
        async with Raw() as server:
            url = server.url
        network = way()
        with pytest.raises(Unreachable, match="m: cannot reach "):
            await network.post(url)
        await network.close()

    run(main())


def test_idle_connection_closed_by_server_is_reopened(way):
    async def main():
        async with Raw(OK, OK, close=True) as server:
            network = way()
            for num in (1, 2):
                await network.post(server.url)
                while server.closed < num:
                    await asyncio.sleep(0)
                for _ in range(20):  # the close has arrived; the event loop reads it soon
                    await asyncio.sleep(0)
            await network.close()
            return server.connections

    assert run(main()) == 2


def test_cancelled_request_closes_its_connection(way):
    """A late answer to the cancelled request must not be taken for the answer to the next one."""

    async def main():
        async with Raw(b"", OK.replace(b"hello", b"HELLO"), close=False) as server:
            network = way()
            given_up = asyncio.create_task(network.post(server.url))
            while not server.connections:
                await asyncio.sleep(0.01)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            answer = await network.post(server.url)
            await network.close()
            return answer.body, server.connections

    assert run(main()) == (b"HELLO", 2)


def test_large_prompt_is_sent_completely(way):
    body = b"x" * 5_000_000

    async def main():
        async with Raw(OK) as server:
            network = way()
            answer = await network.post(server.url, body)
            await network.close()
            return answer.body

    assert run(main()) == b"hello"
