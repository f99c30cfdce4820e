"""Sizes and times at their exact bounds, and connections that may or may not be used again."""

import asyncio
import socket
import struct
import zlib

import pytest

from ramify.errors import MalformedResponse, ModelError, ReplyLostError
from ramify.http_client.http_transport import HttpConnectionPool, route_to
from tests.clients.helpers import run, server_tls
from tests.clients.test_http_grammar import CHUNKS, FIVE, LINE, outcome
from tests.clients.test_http_transport import OK, Raw

TOO_LONG = "m: the reply is longer than 1000 bytes"


def body_or_error(answer, piece=None, close=False):
    found = run(outcome(answer, piece, close=close, again=False))[0]
    return found if isinstance(found, bytes) else str(found)


@pytest.mark.parametrize("piece", [None, 1000])
def test_head_has_at_most_64_kib(piece):
    most = 65_536 - len(LINE + b"X: \r\nContent-Length: 5\r\n\r\n")
    for size, wanted in ((most, b"hello"), (most + 1, "headers of more than 65536 bytes")):
        head = LINE + b"X: %s\r\nContent-Length: 5\r\n\r\n" % (b"x" * size)
        found = body_or_error(head + b"hello", piece)
        assert found == wanted or wanted in found


def test_interim_heads_count_too():
    interim = b"HTTP/1.1 103 Hints\r\nX: %s\r\n\r\n" % (b"x" * 30_000)
    assert body_or_error(interim + interim + OK) == b"hello"
    assert "headers of more than" in body_or_error(interim * 3 + OK)


def test_head_has_at_most_256_headers():
    for num, wanted in ((255, b"hello"), (256, "more than 256 headers")):
        found = body_or_error(LINE + b"X: 1\r\n" * num + b"Content-Length: 5\r\n\r\nhello")
        assert found == wanted or wanted in found


def test_reply_has_at_most_16_interim_replies():
    interim = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    assert body_or_error(interim * 16 + OK) == b"hello"
    assert "more than 16 interim replies" in body_or_error(interim * 17 + OK)
    assert body_or_error(b"HTTP/1.1 199 -\r\n\r\n" + OK) == b"hello"
    assert "its status is 99 (" in body_or_error(b"HTTP/1.1 099 -\r\n\r\n" + OK)


def test_interim_reply_is_no_switch_of_protocols():
    """Also if a switch was asked for."""

    async def main():
        async with Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK) as server:
            pool, route = HttpConnectionPool(), route_to(server.url, {})
            async with pool.prepare_exchange("m", route, b"{}", upgrades=True) as sent:
                found = sent.status, (await sent.read()).body
            await pool.close()
            return found

    assert run(main()) == (200, b"hello")


def test_connection_is_taken_over_after_a_switch_of_protocols():
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"

    async def main():
        async with Raw(switch + b"first") as server:
            pool, route = HttpConnectionPool(), route_to(server.url, {})
            async with pool.prepare_exchange("m", route, b"{}", upgrades=True) as sent:
                transport, arrived = sent.take_over()
            is_open = not transport.is_closing()
            transport.abort()
            await pool.close()
            return is_open, arrived

    assert run(main()) == (True, b"first")


def test_frames_of_chunks_have_at_most_8_kib_beyond_their_least():
    """Two frames are free up to 24 bytes each."""
    most = 8192 + 48 - len(b"5;\r\n\r\n0\r\n\r\n")
    for size, wanted in ((most, b"hello"), (most + 1, "trailers of more than 8192 bytes")):
        found = body_or_error(CHUNKS + b"5;%s\r\nhello\r\n0\r\n\r\n" % (b"x" * size))
        assert found == wanted or wanted in found


@pytest.mark.parametrize("size", [1000, 1001])
@pytest.mark.parametrize("form", ["length", "chunks", "close"])
def test_body_may_have_exactly_its_maximum(form, size):
    body = b"x" * size
    answer = {
        "length": LINE + b"Content-Length: %d\r\n\r\n" % size + body,
        "chunks": CHUNKS + b"%x\r\n%s\r\n0\r\n\r\n" % (size, body),
        "close": LINE + b"\r\n" + body,
    }[form]
    found = body_or_error(answer, close=form == "close")
    assert found == body if size == 1000 else found.startswith(TOO_LONG)


def test_one_request_may_lower_the_maximum_of_its_pool():
    async def main():
        outcomes = []
        pool = HttpConnectionPool(60.0, 60.0, 100)
        for most in (4, 5, 1000):
            for size in (5, 101):
                answer = LINE + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
                async with Raw(answer) as server:
                    try:
                        route = route_to(server.url, {})
                        async with pool.prepare_exchange(
                            "m", route, b"{}", max_body_bytes=most
                        ) as sent:
                            outcomes.append(len((await sent.read()).body))
                    except MalformedResponse as error:
                        outcomes.append(str(error).split(" bytes")[0].rsplit(" ", 1)[1])
        await pool.close()
        return outcomes

    assert run(main()) == ["4", "4", 5, "5", 5, "100"]


@pytest.mark.parametrize(
    ("size", "error"), [(64 << 20, ReplyLostError), ((64 << 20) + 1, MalformedResponse)]
)
def test_body_of_a_pool_has_at_most_64_mib(size, error):
    """The announced length decides, before any of it has arrived."""

    async def main():
        async with Raw(LINE + b"Content-Length: %d\r\n\r\n" % size, close=True) as server:
            pool = HttpConnectionPool()
            with pytest.raises(error):
                async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
                    await sent.read()
            await pool.close()

    run(main())


def test_error_quotes_the_start_of_what_is_not_http():
    data = bytes(range(97, 123)) * 2
    assert body_or_error(data).startswith(f"m: the reply is not HTTP: it begins with {data[:40]!r}")
    assert body_or_error(LINE + b"Content-Length: five\r\n\r\n").startswith(
        "m: the reply is not HTTP: invalid character in Content-Length (http://"
    )
    coding = bytes(range(97, 123)) * 2
    assert body_or_error(LINE + b"Transfer-Encoding: %s\r\n\r\n" % coding).startswith(
        f"m: the reply is not HTTP: its Transfer-Encoding is {coding[:40].decode()!r} (http://"
    )


def test_lost_reply_gives_a_reason_only_if_there_is_one():
    assert body_or_error(OK[:-1], close=True).startswith(
        "m: the connection broke before the reply was whole (http://"
    )


# --- connections that are used again --------------------------------------------------------------


class StoppedClock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only if a test says so."""

    now_s = 0.0

    def time(self):
        return self.now_s


def run_on_stopped_clock(main):
    with asyncio.Runner(loop_factory=StoppedClock) as runner:
        return runner.run(main())


@pytest.mark.parametrize(("idle_s", "connections"), [(3.75, 1), (4.0, 2)])
def test_connection_that_was_idle_for_four_seconds_is_not_used_again(idle_s, connections):
    async def main():
        loop = asyncio.get_running_loop()
        async with Raw(OK, OK) as server:
            pool = HttpConnectionPool()
            for _ in range(2):
                async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
                    assert (await sent.read()).body == b"hello"
                loop.now_s += idle_s
            await pool.close()
            return server.connections

    assert run_on_stopped_clock(main) == connections


def test_nothing_but_the_server_is_waited_for():
    """On a stopped clock, a wait for a time would not end: neither while a large body is
    sent, nor when the pool is closed."""

    async def main():
        async with Raw(OK) as server:
            pool = HttpConnectionPool()
            async with pool.prepare_exchange(
                "m", route_to(server.url, {}), b"x" * 3_000_000
            ) as sent:
                assert (await sent.read()).body == b"hello"
            await pool.close()
            return len(server.heads)

    assert run_on_stopped_clock(main) == 1


class Watching(asyncio.SelectorEventLoop):
    """An event loop that keeps the connections which it opens, so that a test can watch them."""

    def __init__(self):
        super().__init__()
        self.opened = []

    async def create_connection(self, *args, **options):
        transport, protocol = await super().create_connection(*args, **options)
        self.opened.append(transport)
        return transport, protocol


async def turns(until=lambda: False):
    for _ in range(2000):
        if until():
            return
        await asyncio.sleep(0)


async def asked_twice(first, use):
    """Return the number of connections after a request that ``use`` handles and another one."""
    async with Raw(first, OK) as server:
        pool = HttpConnectionPool()
        try:
            async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
                await use(sent)
        except ModelError:
            pass
        async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
            assert (await sent.read()).body == b"hello"
        await pool.close()
        return server.connections


async def leave(sent):
    """Use nothing of the response."""


async def read(sent):
    await sent.read()


async def receive_all(sent):
    while await sent.receive():
        pass


async def receive_part(sent):
    assert await sent.receive()


LONG = LINE + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000


@pytest.mark.parametrize(
    ("first", "use", "connections"),
    [
        (OK, read, 1),
        (OK, receive_all, 1),
        (OK, leave, 1),  # it has arrived as a whole
        (CHUNKS + FIVE, receive_all, 1),
        (LONG, read, 1),
        (LONG, receive_all, 1),
        (LONG, receive_part, 2),
        (LONG, leave, 2),
        (LINE + b"\r\nhello", leave, 2),
    ],
    ids=lambda each: getattr(each, "__name__", str(len(each)) if isinstance(each, bytes) else each),
)
def test_connection_is_used_again_after_a_complete_response(first, use, connections):
    assert run(asked_twice(first, use)) == connections


def test_connection_that_carried_a_large_request_is_used_again():
    async def main():
        async with Raw(OK, OK) as server:
            pool = HttpConnectionPool()
            for body in (b"x" * 30_000_000, b"{}"):  # more than fits into a socket's buffers
                async with pool.prepare_exchange("m", route_to(server.url, {}), body) as sent:
                    assert (await sent.read()).body == b"hello"
            await pool.close()
            return server.connections

    assert run(main()) == 1


def test_bytes_after_a_complete_response_spoil_its_connection():
    """They arrive while the exchange is still open."""
    connections = 0

    async def talk(reader, writer):
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(OK)
        if connections == 1:
            await is_complete.wait()
            writer.write(OK.replace(b"hello", b"STALE"))
            await writer.drain()
            has_sent.set()
        await reader.read()
        writer.close()

    async def main():
        global is_complete, has_sent
        is_complete, has_sent, pool = asyncio.Event(), asyncio.Event(), HttpConnectionPool()
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            route = route_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", {})
            for _ in range(2):
                async with pool.prepare_exchange("m", route, b"{}") as sent:
                    assert (await sent.read()).body == b"hello"
                    is_complete.set()
                    await has_sent.wait()
                    await turns()
            await pool.close()

    run(main())
    assert connections == 2


@pytest.mark.parametrize("stale", [OK.replace(b"hello", b"STALE"), CHUNKS + FIVE])
def test_response_right_after_a_chunked_one_is_not_part_of_it(stale):
    """Both arrive at once. The second one answers no request, so its connection is not used
    again."""
    assert run(outcome(CHUNKS + FIVE + stale)) == (b"hello", 2)


def test_unread_part_of_a_stream_is_bounded_again_and_again():
    """Receiving pauses once more than 1 MiB is unread, here at the last byte of each part, and also
    in the next response on the same connection."""
    part, may_send = b"x" * ((1 << 20) + 1), asyncio.Semaphore(0)

    async def talk(reader, writer):
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(LINE + b"Content-Length: %d\r\n\r\nx" % (2 * len(part) + 1))
            for _ in range(2):
                await may_send.acquire()
                writer.write(part)
        await reader.read()
        writer.close()

    async def main():
        loop, pool = asyncio.get_running_loop(), HttpConnectionPool()
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            route = route_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", {})
            for _ in range(2):
                async with pool.prepare_exchange("m", route, b"{}") as sent:
                    assert await sent.receive() == b"x"
                    for num in range(2):
                        may_send.release()
                        while loop.opened[0].is_reading():
                            await asyncio.sleep(0.002)
                        if num == 0:
                            assert await sent.receive() == part
                            waiting = asyncio.ensure_future(sent.receive())
                            await turns(loop.opened[0].is_reading)
                            assert loop.opened[0].is_reading()
                            waiting.cancel()
                            await asyncio.wait({waiting})
                    assert sent.is_complete
                assert loop.opened[0].is_reading()
            await pool.close()
        return len(loop.opened)

    with asyncio.Runner(loop_factory=Watching) as runner:
        assert runner.run(asyncio.wait_for(main(), 100)) == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_closed_pool_leaves_no_socket_to_its_event_loop(scheme, certificate, monkeypatch):
    """The loop may end right after ``close``, without another iteration."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))

    async def main():
        tls = server_tls(certificate) if scheme == "https" else None
        async with Raw(OK, tls=tls) as server:
            pool = HttpConnectionPool()
            async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
                assert (await sent.read()).body == b"hello"
            (opened,) = asyncio.get_running_loop().opened
            kept = opened.get_extra_info("socket")
            is_open = kept.fileno() >= 0
            await pool.close()
            return is_open, kept.fileno()

    with asyncio.Runner(loop_factory=Watching) as runner:
        assert runner.run(main()) == (True, -1)


def test_pool_may_be_closed_while_a_stream_is_paused():
    """What has arrived can still be received. Then the stream is lost."""

    async def main():
        loop, received = asyncio.get_running_loop(), 0
        async with Raw(LONG) as server:
            pool = HttpConnectionPool()
            async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
                received += len(await sent.receive())
                while loop.opened[0].is_reading():
                    await asyncio.sleep(0.002)
                await pool.close()
                received += len(await sent.receive())
                with pytest.raises(ReplyLostError):
                    await sent.receive()
            return received

    with asyncio.Runner(loop_factory=Watching) as runner:
        assert 1 << 20 < runner.run(asyncio.wait_for(main(), 100)) < 3_000_000


def test_unread_part_of_a_request_waits_here_and_not_in_a_buffer():
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await may_end.wait()
        writer.transport.abort()

    async def main():
        global may_end
        may_end, loop, pool = asyncio.Event(), asyncio.get_running_loop(), HttpConnectionPool()
        async with await asyncio.start_server(talk, "127.0.0.1", 0, limit=1000) as server:
            route = route_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", {})

            async def send():
                async with pool.prepare_exchange("m", route, b"x" * 50_000_000):
                    pass

            sending = asyncio.ensure_future(send())
            await turns()
            size = loop.opened[0].get_write_buffer_size()
            may_end.set()
            with pytest.raises(ReplyLostError):
                await sending
            await pool.close()
        return 0 < size < 2_000_000

    with asyncio.Runner(loop_factory=Watching) as runner:
        assert runner.run(asyncio.wait_for(main(), 100))


def test_stream_may_be_longer_than_a_whole_body():
    """Only the part that was not received yet is bounded."""
    may_send = asyncio.Semaphore(0)

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(CHUNKS)
        for _ in range(3):
            writer.write(b"258\r\n" + b"x" * 600 + b"\r\n")
            await may_send.acquire()
        writer.write(b"0\r\n\r\n")
        await reader.read()
        writer.close()

    async def main():
        pool, size = HttpConnectionPool(max_body_bytes=1000), 0
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            route = route_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", {})
            async with pool.prepare_exchange("m", route, b"{}") as sent:
                while data := await sent.receive():
                    size += len(data)
                    may_send.release()
            await pool.close()
        return size

    assert run(main()) == 1800


def test_connection_that_did_not_carry_the_whole_request_is_not_used_again():
    """The server answers a large request early, and completely."""
    connections = 0

    async def talk(reader, writer):
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await may_end.wait()
        writer.transport.abort()

    async def main():
        global may_end
        may_end = asyncio.Event()
        server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1000)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        pool = HttpConnectionPool()
        for body in (b"x" * 50_000_000, b"{}"):
            async with pool.prepare_exchange("m", route_to(url, {}), body) as sent:
                assert (await sent.read()).body == b"hello"
        may_end.set()
        await pool.close()
        server.close()
        await server.wait_closed()

    run(main())
    assert connections == 2


def test_reset_is_not_the_end_of_a_body():
    """A body without a length ends with its connection, if that is closed in order."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(LINE + b"\r\nhello")
        await has_arrived.wait()
        linger = struct.pack("ii", 1, 0)  # close with a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def main():
        global has_arrived
        has_arrived = asyncio.Event()
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        pool = HttpConnectionPool()
        async with pool.prepare_exchange("m", route_to(url, {}), b"{}") as sent:
            assert await sent.receive() == b"hello"
            has_arrived.set()
            with pytest.raises(
                ReplyLostError, match=r"broke before the reply was whole: .* by peer"
            ):
                await sent.receive()
        await pool.close()
        server.close()
        await server.wait_closed()

    run(main())


# --- compressed streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 4], ids=["whole", "cut"])
def test_compressed_stream_is_unpacked_as_it_arrives(cut):
    text = b"".join(b"%d " % each for each in range(5000))
    packed = zlib.compress(text)[: -cut or None]
    answer = LINE + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(packed)

    async def main():
        async with Raw(answer + packed, piece=500) as server:
            pool, pieces = HttpConnectionPool(), []
            try:
                async with pool.prepare_exchange("m", route_to(server.url, {}), b"{}") as sent:
                    while piece := await sent.receive():
                        pieces.append(piece)
            finally:
                await pool.close()
            return b"".join(pieces), len(pieces)

    if cut:
        with pytest.raises(
            MalformedResponse, match="m: the reply is not valid deflate: it is incomplete"
        ):
            run(main())
    else:
        found, num = run(main())
        assert found == text
        assert num > 1
