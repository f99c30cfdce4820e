"""Replies that violate HTTP's grammar raise one typed error; valid ones are read as other clients
read them."""

import asyncio
import http.client
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify.errors import MalformedResponse, ModelError, ReplyLostError
from tests.clients.helpers import run
from tests.clients.test_http_transport import OK, Raw, Way

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
LINE = b"HTTP/1.1 200 OK\r\n"
CHUNKS = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
FIVE = b"5\r\nhello\r\n0\r\n\r\n"


async def outcome(answer, piece=None, close=False, again=True):
    """Return the body or error of a request answered with ``answer``, and the number of
    connections after a second request, which gets ``OK``.

    The server leaves the connection open, so that only the bytes it sent can end the first
    request."""
    async with Raw(answer, OK, piece=piece, close=close) as server:
        network = Way()
        try:
            first = (await network.post(server.url)).body
        except ModelError as error:
            first = error
        assert not again or (await network.post(server.url)).body == b"hello"
        await network.close()
        return first, server.connections


MALFORMED = {
    "negative chunk": CHUNKS + b"-2\r\n0\r\n\r\n",
    "far negative": CHUNKS + b"5\r\nhello\r\n-ffff\r\nhello\r\n0\r\n\r\n",
    "more negative": CHUNKS + b"-10\r\nhello\r\n0\r\n\r\n",
    "plus": CHUNKS + b"+5\r\nhello\r\n0\r\n\r\n",
    "0x": CHUNKS + b"0x5\r\nhello\r\n0\r\n\r\n",
    "underscore": CHUNKS + b"0_5\r\nhello\r\n0\r\n\r\n",
    "space before": CHUNKS + b" 5\r\nhello\r\n0\r\n\r\n",
    "space after": CHUNKS + b"5 \r\nhello\r\n0\r\n\r\n",
    "no size": CHUNKS + b"\r\nhello\r\n0\r\n\r\n",
    "an extension alone": CHUNKS + b";x\r\nhello\r\n0\r\n\r\n",
    "too many digits": CHUNKS + b"10000000000000005\r\nhello\r\n0\r\n\r\n",
    "space before an extension": CHUNKS + b"5 ;a\r\nhello\r\n0\r\n\r\n",
    "folded": LINE + b"X: a\r\n\tb\r\nTransfer-Encoding:\r\n chunked\r\n\r\n" + FIVE,
    "one length twice": LINE + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "one length as a list": LINE + b"Content-Length: 5 , 5\r\n\r\nhello",
    "RTSP": b"RTSP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "no hex": CHUNKS + b"five\r\nhello\r\n0\r\n\r\n",
    "a chunk without CRLF": CHUNKS + b"5\r\nhello0\r\n\r\n",
    "a chunk with another end": CHUNKS + b"5\r\nhello\r\r0\r\n\r\n",
    "a longer chunk": CHUNKS + b"5\r\nhello!\r\n0\r\n\r\n",
    "a shorter chunk": CHUNKS + b"5\r\nhell\r\n0\r\n\r\n",
    "chunks with LF": CHUNKS + b"5\nhello\n0\n\n",
    "LF in an extension": CHUNKS + b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "NUL in an extension": CHUNKS + b"5;\0\r\nhello\r\n0\r\n\r\n",
    "an endless extension": CHUNKS + b"5;" + b"x" * 10_000,
    "many extensions": CHUNKS + b"".join(b"1;%s\r\nx\r\n" % (b"e" * 8000) for _ in range(9)),
    "an endless size": CHUNKS + b"0" * 10_000,
    "a trailer that is none": CHUNKS + b"5\r\nhello\r\n0\r\nX\r\n\r\n",
    "a folded trailer": CHUNKS + b"5\r\nhello\r\n0\r\nX: 1\r\n 2\r\n\r\n",
    "an endless trailer": CHUNKS + b"0\r\nX: " + b"x" * 10_000,
    "endless trailers": CHUNKS + b"0\r\n" + b"X: 1\r\n" * 20_000,
    "xchunked": LINE + b"Transfer-Encoding: xchunked\r\n\r\n" + FIVE,
    "chunked twice": LINE
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"
    + FIVE,
    "gzip, chunked": LINE + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + FIVE,
    "chunked, gzip": LINE + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + FIVE,
    "chunked;x": LINE + b"Transfer-Encoding: chunked;x=1\r\n\r\n" + FIVE,
    "VT chunked": LINE + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + FIVE,
    "identity": LINE + b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello",
    "no coding": LINE + b"Transfer-Encoding:\r\n\r\n" + FIVE,
    "both": LINE + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + FIVE,
    "both, turned": LINE + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n" + FIVE,
    "two lengths": LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "two lengths in one": LINE + b"Content-Length: 5, 6\r\n\r\nhello!",
    "two spellings": LINE + b"Content-Length: 5, 05\r\n\r\nhello",
    "half a list": LINE + b"Content-Length: 5,\r\n\r\nhello",
    "no length": LINE + b"Content-Length:\r\n\r\nhello",
    "a signed length": LINE + b"Content-Length: +5\r\n\r\nhello",
    "a negative length": LINE + b"Content-Length: -5\r\n\r\nhello",
    "a length with an underscore": LINE + b"Content-Length: 0_5\r\n\r\nhello",
    "a length in hex": LINE + b"Content-Length: 0x5\r\n\r\nhello",
    "a length in another script": LINE + b"Content-Length: \xb2\r\n\r\nhe",
    "a length beside NBSP": LINE + b"Content-Length: 5\xa0\r\n\r\nhello",
    "a length that is too long": LINE + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nhello",
    "a folded length": LINE + b"Content-Length: 5\r\n 6\r\n\r\nhello",
    "space before the colon": LINE + b"Content-Length : 5\r\n\r\nhello",
    "no colon": LINE + b"Content-Length 5\r\n\r\nhello",
    "no name": LINE + b": 5\r\n\r\nhello",
    "CR in a header": LINE + b"X: a\rb\r\nContent-Length: 5\r\n\r\nhello",
    "LF in a header": LINE + b"X: a\nb: c\r\nContent-Length: 5\r\n\r\nhello",
    "NUL in a header": LINE + b"X: a\0b\r\nContent-Length: 5\r\n\r\nhello",
    "a head with LF": b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    "a last line with LF": LINE + b"Content-Length: 5\n\nhello",
    "an endless header": LINE + b"X: " + b"x" * 70_000,
    "an endless status line": b"HTTP/1.1 200 " + b"x" * 70_000,
    "endless headers": LINE + b"X: 1\r\n" * 20_000,
    "many headers": LINE + b"X: 1\r\n" * 1000 + b"Content-Length: 5\r\n\r\nhello",
    "endless interim replies": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50,
    "an endless interim reply": b"HTTP/1.1 103 Early Hints\r\n" + b"X: 1\r\n" * 20_000,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "another protocol, announced": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
    b"Upgrade: x\r\n\r\n",
    "another protocol without a name": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + OK,
    "an empty line before": b"\r\n" + OK,
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "HTTP/2": b"HTTP/2 200\r\nContent-Length: 5\r\n\r\nhello",
    "HTTP/1": b"HTTP/1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "HTTP/1.²": b"HTTP/1.\xb2 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 5\r\n\r\nhello",
    "four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 5\r\n\r\nhello",
    "a status in another script": b"HTTP/1.1 20\xb2 OK\r\nContent-Length: 5\r\n\r\nhello",
    "status 099": b"HTTP/1.1 099 OK\r\n\r\n" + OK,
    "no status": b"HTTP/1.1 OK\r\nContent-Length: 5\r\n\r\nhello",
    "two spaces": b"HTTP/1.1  200 OK\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("piece", [None, 1000, 7])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_reply_raises_one_error_and_closes_connection(name, piece):
    error, connections = run(outcome(MALFORMED[name], piece))
    assert (type(error), connections) == (MalformedResponse, 2)
    assert str(error).startswith(
        ("m: the reply is not HTTP: ", "m: the reply is longer than 1000 bytes")
    )
    assert "\n" not in str(error)
    assert len(str(error)) < 300


def test_negative_chunk_size_does_not_hang_the_process():
    """Runs in a separate process, because a client that spins cannot be stopped from within."""
    program = """
import asyncio
from tests.clients.test_http_grammar import MALFORMED, outcome
print(type(asyncio.run(outcome(MALFORMED["far negative"]))[0]).__name__)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "MalformedResponse\n")


VALID = {
    "an extension": (CHUNKS + b'5;a=b;c="d"\r\nhello\r\n0;last\r\n\r\n', b"hello", 1),
    "capital hex": (CHUNKS + b"00A\r\n0123456789\r\n0\r\n\r\n", b"0123456789", 1),
    "superfluous zeros": (
        CHUNKS + b"00000000000000005\r\nhello\r\n0\r\n\r\n",
        b"hello",
        1,
    ),
    "two zeros": (CHUNKS + b"5\r\nhello\r\n00\r\n\r\n", b"hello", 1),
    "nothing in chunks": (CHUNKS + b"0\r\n\r\n", b"", 1),
    "trailers": (CHUNKS + b"5\r\nhello\r\n0\r\nA: 1\r\nB:\r\n\r\n", b"hello", 1),
    "Chunked": (LINE + b"Transfer-Encoding: Chunked\r\n\r\n" + FIVE, b"hello", 1),
    "an empty element": (LINE + b"Transfer-Encoding: , chunked\r\n\r\n" + FIVE, b"hello", 1),
    "old and in chunks": (CHUNKS.replace(b"/1.1", b"/1.0") + FIVE, b"hello", 2),
    "a padded length": (LINE + b"Content-Length:\t0000005 \r\n\r\nhello", b"hello", 1),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", b"hello", 1),
    "a reason in another script": (
        b"HTTP/1.1 200 \xd6K\r\nContent-Length: 5\r\n\r\nhello",
        b"hello",
        1,
    ),
    "interim replies": (b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" * 3 + OK, b"hello", 1),
    "204 with chunks": (CHUNKS.replace(b"200 OK", b"204 -"), b"", 1),
    "204 with a length": (b"HTTP/1.1 204 -\r\nContent-Length: 5\r\n\r\n", b"", 1),
    "204 and a body": (b"HTTP/1.1 204 -\r\nContent-Length: 5\r\n\r\nhello", b"", 2),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", 1),
    "more than its length": (OK + b"!", b"hello", 2),
    "more than its chunks": (CHUNKS + FIVE + b"!", b"hello", 2),
    "another reply behind it": (OK + OK.replace(b"hello", b"HELLO"), b"hello", 2),
    "close in a list": (OK.replace(b"X-Thing: Value", b"Connection: x, Close"), b"hello", 2),
    "close in its second line": (
        OK.replace(b"X-Thing: Value", b"Connection: x\r\nConnection: close"),
        b"hello",
        2,
    ),
    "old and kept": (
        OK.replace(b"/1.1", b"/1.0").replace(b"X-Thing: Value", b"Connection: Keep-Alive"),
        b"hello",
        1,
    ),
    "old": (OK.replace(b"/1.1", b"/1.0"), b"hello", 2),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_reply_is_read_and_its_connection_reused_when_allowed(name):
    answer, body, connections = VALID[name]
    assert run(outcome(answer)) == (body, connections)


@pytest.mark.parametrize(
    "name", [name for name in VALID if not name.startswith(("more", "another", "204 and"))]
)
def test_valid_reply_is_read_byte_by_byte(name):
    answer, body, connections = VALID[name]
    assert run(outcome(answer, piece=1)) == (body, connections)


@pytest.mark.parametrize("at", range(len(CHUNKS + FIVE)))
def test_truncated_reply_raises_reply_lost(at):
    error, connections = run(outcome((CHUNKS + FIVE)[:at], close=True))
    assert (type(error), connections) == (ReplyLostError, 2)


def test_header_values_are_joined_and_stripped_of_spaces_and_tabs_only():
    async def main():
        answer = LINE + b"A: 1\r\na:\t2 \r\nB:\xa0\r\nContent-Length: 0\r\n\r\n"
        async with Raw(answer) as server:
            network = Way()
            got = await network.post(server.url)
            await network.close()
            return got.headers

    assert run(main()) == {"a": "1, 2", "b": "\xa0", "content-length": "0"}


# --- arbitrary bytes
# --------------------------------------------------------------------------------------------

PARTS = [
    b"HTTP/1.1 200 OK",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 204 -",
    b"HTTP/1.1 100 Continue",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding:",
    b"Content-Length: ",
    b"Content-Length: 5",
    b"Connection: close",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"0",
    b"5",
    b"-2",
    b"-ff",
    b"+3",
    b"0x3",
    b"0_3",
    b"a",
    b"FFFFFFFFFFFFFFFF",
    b"hello",
    b"\0",
    b"\xff",
    b"\xb2",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"x" * 300,
]
malformed_bytes = st.tuples(
    st.sampled_from([b"", LINE, CHUNKS, CHUNKS + b"5\r\nhello\r\n", OK[:-5]]),
    st.lists(st.sampled_from(PARTS) | st.binary(max_size=4), max_size=12),
).map(lambda parts: parts[0] + b"".join(parts[1]))


@FUZZ
@given(malformed_bytes, st.sampled_from([None, 1, 5]))
def test_arbitrary_bytes_give_a_reply_or_one_line_error(answer, piece):
    first, _ = run(outcome(answer, piece, close=True, again=False))
    assert isinstance(first, bytes | MalformedResponse | ReplyLostError)
    assert "\n" not in str(first)


tokens = st.text("abcXYZ-_09!#~", min_size=1, max_size=8).map(str.encode)
values = st.text('abc XYZ;=,"\t09\xe9', max_size=12).map(
    lambda text: text.strip(" \t").encode("latin-1")
)
framed = st.lists(
    st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b";x", b';x="1"'])),
    max_size=6,
)


@st.composite
def replies(draw):
    """Draw a valid reply in one of the three framings, and whether its end is the end of the
    connection."""
    headers = {
        b"X-" + name: value
        for name, value in draw(st.dictionaries(tokens, values, max_size=4)).items()
    }
    head = b"".join(
        b"%s:%s%s \r\n" % (name, draw(st.sampled_from([b"", b" ", b"\t"])), headers[name])
        for name in headers
    )
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\n"]))
    begin = (
        interim
        + b"HTTP/1.1 %d %s\r\n" % (draw(st.sampled_from([200, 201, 400, 503])), draw(values))
        + head
    )
    chunks = draw(framed)
    body = b"".join(data for data, _ in chunks)
    form = draw(st.sampled_from(["length", "chunks", "close"]))
    if form == "chunks":
        sizes = b"".join(
            b"%x%s\r\n%s\r\n" % (len(data), extension, data) for data, extension in chunks
        )
        trailers = draw(st.sampled_from([b"", b"X-B: 2\r\n", b"X-B: 2\r\nX-C:\r\n"]))
        return (
            begin + b"Transfer-Encoding: chunked\r\n\r\n" + sizes + b"0\r\n" + trailers + b"\r\n",
            False,
        )
    length = b"Content-Length: %d\r\n" % len(body) if form == "length" else b""
    return begin + length + b"\r\n" + body, form == "close"


def post_with_standard_library(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("POST", parts.path, b"{}", {"Content-Length": "2"})
    reply = connection.getresponse()
    found = (
        reply.status,
        reply.read(),
        {name.lower(): value.strip(" \t") for name, value in reply.getheaders()},
    )
    connection.close()
    return found


@FUZZ
@given(replies(), st.sampled_from([None, 1, 7]))
def test_valid_replies_are_read_as_by_the_standard_library(reply, piece):
    answer, close = reply

    async def main():
        async with Raw(answer, answer, piece=piece, close=close) as server:
            network = Way()
            ours = await network.post(server.url)
            await network.close()
            theirs = await asyncio.to_thread(post_with_standard_library, server.url)
            return (ours.status, ours.body, ours.headers), theirs

    ours, theirs = run(main())
    assert ours == theirs
