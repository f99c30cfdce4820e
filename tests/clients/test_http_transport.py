"""HTTP over plain connections and TLS: the same answers and errors. HTTP framing, byte by byte."""

import asyncio
import contextlib
import gzip
import zlib

import pytest

from ramify.errors import ConfigError, MalformedResponse, ReplyLostError, Unreachable
from ramify.http_client.http_transport import HttpConnectionPool, route_to
from tests.clients.helpers import run, server_tls

LIMITS = (60.0, 60.0, 1000)
"""Seconds to keep an idle connection, seconds to connect, maximum bytes of a body."""


class Raw:
    """A server that sends given bytes for each request, in pieces, and then closes or waits for
    another."""

    def __init__(self, *answers, piece=None, close=False, tls=None):
        self.tls = tls
        self.connections = self.closed = 0
        self.heads = []
        self._answers, self._piece, self._close = list(answers), piece, close

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0, ssl=self.tls)
        port = self._server.sockets[0].getsockname()[1]
        origin = f"https://localhost:{port}" if self.tls else f"http://127.0.0.1:{port}"
        self.url = f"{origin}/v1/chat/completions"
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
    """A connection pool that sends one request at a time."""

    def __init__(self, *limits):
        self._http = HttpConnectionPool(*(limits or LIMITS))

    async def post(self, url, body=b"{}"):
        async with self._http.prepare_exchange(
            "m", route_to(url, {"Authorization": "Bearer key"}), body
        ) as sent:
            return await sent.read()

    async def close(self):
        await self._http.close()


@pytest.fixture(params=["plain", "TLS"])
def tls(request, monkeypatch, certificate):
    """The server's TLS, or None."""
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    if request.param == "plain":
        return None
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    return server_tls(certificate)


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


def responses_from(*answers, times=1, **options):
    async def main():
        async with Raw(*answers, **options) as server:
            network = Way()
            try:
                got = [await network.post(server.url) for _ in range(times)]
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
def test_every_body_framing_is_read(tls, answer, piece):
    (got,), _ = responses_from(answer, piece=piece, close=answer is UNTIL_CLOSE, tls=tls)
    assert (got.status, got.body) == (200, b"hello")


def test_headers_are_sent_and_returned(tls):
    (got,), server = responses_from(OK, tls=tls)
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
def test_connections_are_reused_when_allowed(tls, answer, connections):
    closes = connections > 1
    got, server = responses_from(*[answer] * 3, times=3, close=closes, tls=tls)
    assert ([each.body for each in got], server.connections) == ([b"hello"] * 3, connections)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ReplyLostError),
        (b"HTTP/1.1 200", ReplyLostError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", ReplyLostError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhel", ReplyLostError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000, MalformedResponse),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n"
            + b"x" * 2000
            + b"\r\n0\r\n\r\n",
            MalformedResponse,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, MalformedResponse),
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
def test_truncated_or_oversized_reply_is_an_error(tls, answer, error):
    with pytest.raises(error) as caught:
        responses_from(answer, close=True, tls=tls)
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
def test_non_http_reply_is_reported(tls, answer):
    with pytest.raises(MalformedResponse, match="m: the reply is not HTTP: "):
        responses_from(answer, tls=tls)


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
def test_unrequested_compression_is_unpacked(tls, body, encoding):
    got, server = responses_from(packed(body, encoding), packed(body, encoding), times=2, tls=tls)
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
def test_unknown_or_damaged_compression_is_an_error(tls, body, encoding, says, again):
    """What would be the same the next time is not paid for twice."""
    with pytest.raises(MalformedResponse) as caught:
        responses_from(packed(body, encoding), tls=tls)
    assert str(caught.value).startswith(f"m: {says}")
    assert caught.value.transient is again
    assert caught.value.may_be_paid


def test_refused_connection_raises_unreachable(tls):
    async def main():
        async with Raw(tls=tls) as server:
            url = server.url
        network = Way()
        with pytest.raises(Unreachable, match="m: cannot reach "):
            await network.post(url)
        await network.close()

    run(main())


def test_idle_connection_closed_by_server_is_reopened(tls):
    async def main():
        async with Raw(OK, OK, close=True, tls=tls) as server:
            network = Way()
            for num in (1, 2):
                await network.post(server.url)
                while server.closed < num:
                    await asyncio.sleep(0)
                for _ in range(20):  # the close has arrived; the event loop reads it soon
                    await asyncio.sleep(0)
            await network.close()
            return server.connections

    assert run(main()) == 2


def test_cancelled_request_closes_its_connection(tls):
    """A late answer to the cancelled request must not be taken for the answer to the next one."""

    async def main():
        async with Raw(b"", OK.replace(b"hello", b"HELLO"), close=False, tls=tls) as server:
            network = Way()
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


def test_large_prompt_is_sent_completely(tls):
    body = b"x" * 5_000_000

    async def main():
        async with Raw(OK, tls=tls) as server:
            network = Way()
            answer = await network.post(server.url, body)
            await network.close()
            return answer.body

    assert run(main()) == b"hello"


# --- unsolicited bytes ----------------------------------------------------------------------------


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "unseen"])
def test_bytes_on_an_idle_connection_close_it(tls, is_seen):
    """They are never given to the next request, not even if they arrive just before it."""
    writers = []

    async def talk(reader, writer):
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n{}")
                writer.write(OK)

    async def main():
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        url = f"https://localhost:{port}/" if tls else f"http://127.0.0.1:{port}/"
        network, faults = Way(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        assert (await network.post(url)).body == b"hello"
        writers[0].write(OK.replace(b"hello", b"STALE"))
        if is_seen:
            await asyncio.sleep(0.05)
        answer = await network.post(url)
        await network.close()
        for writer in writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()
        return answer.body, len(writers), faults

    assert run(main()) == (b"hello", 2, [])


def test_early_response_ends_the_sending_of_a_large_body(tls):
    """A server that refuses a request may not read the rest of it."""
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"

    async def talk(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(refusal)
            await stop.wait()
        writer.transport.abort()

    async def main():
        global stop
        stop = asyncio.Event()
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls, limit=1000)
        port = server.sockets[0].getsockname()[1]
        url = f"https://localhost:{port}/" if tls else f"http://127.0.0.1:{port}/"
        network = Way()
        answer = await network.post(url, b"x" * 50_000_000)
        stop.set()
        await network.close()
        server.close()
        await server.wait_closed()
        return answer.status, answer.body

    assert run(main()) == (413, b"no")


def test_redirect_is_returned_and_not_followed(tls):
    moved = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    (got,), server = responses_from(moved, OK, tls=tls)
    assert (got.status, got.headers["location"], len(server.heads)) == (302, "/elsewhere", 1)


# --- a body as it arrives -------------------------------------------------------------------------


def test_body_is_received_as_it_arrives(tls):
    """The second piece is sent after the first one has been received."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await received.wait()
        writer.write(b"5\r\nworld\r\n0\r\n\r\n")
        await reader.read()
        writer.close()

    async def main():
        global received
        received = asyncio.Event()
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        url = f"https://localhost:{port}/" if tls else f"http://127.0.0.1:{port}/"
        pool, pieces = HttpConnectionPool(), []
        async with pool.prepare_exchange("m", route_to(url, {}), b"{}") as sent:
            while piece := await sent.receive():
                pieces.append(piece)
                received.set()
        await pool.close()
        server.close()
        await server.wait_closed()
        return pieces

    assert run(main()) == [b"hello", b"world"]


def test_unread_stream_makes_its_sender_wait(tls):
    """A body that is larger than the limit for whole ones is received; little of it waits here."""
    num_sent = 0

    async def talk(reader, writer):
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n")
        for _ in range(600):
            writer.write(b"x" * 100_000)
            await writer.drain()
            num_sent += 100_000
        writer.close()

    async def main():
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        url = f"https://localhost:{port}/" if tls else f"http://127.0.0.1:{port}/"
        pool, size, most_ahead = HttpConnectionPool(max_body_bytes=1 << 30), 0, 0
        async with pool.prepare_exchange("m", route_to(url, {}), b"{}") as sent:
            while piece := await sent.receive():
                size += len(piece)
                for _ in range(20):
                    await asyncio.sleep(0)
                most_ahead = max(most_ahead, num_sent - size)
        await pool.close()
        server.close()
        await server.wait_closed()
        return size, most_ahead < 30_000_000

    assert run(main()) == (60_000_000, True)


@pytest.mark.parametrize("value", ["a\r\nX: b", "a\nb", "a\0b", "ключ"])
def test_header_that_cannot_be_sent_is_refused_without_its_value(value):
    with pytest.raises(ConfigError, match="the header 'X-Thing' contains") as caught:
        route_to("http://host/", {"X-Thing": value})
    assert value not in str(caught.value)


def test_header_replaces_the_default_of_the_same_name():
    lines = route_to("http://host/", {"user-agent": "mine"}).head.decode().lower().split("\r\n")
    assert [line for line in lines if line.startswith("user-agent")] == ["user-agent: mine"]


def test_silent_server_without_tls_is_reported():
    ended = []

    async def silent(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        ended.append(True)

    async def main():
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port, network = server.sockets[0].getsockname()[1], Way(60.0, 1.0, 1000)
            with pytest.raises(Unreachable) as caught:
                await network.post(f"https://127.0.0.1:{port}/v1/x")
            await network.close()
            await until(lambda: ended)
            await asyncio.sleep(0)
            return str(caught.value)

    assert run(main()).endswith("does not speak TLS at this port, write http://")
