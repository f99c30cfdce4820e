"""A catalogue of provider misbehaviours, each with the outcome that must follow.

Every behaviour is something that a server did, or may do, to a client: a reply that is cut,
filtered, empty or contradictory, broken JSON, an odd status, broken HTTP, a stream that stops. Each
one is served through four protocols (``reality_wire.py``), always or once, plain or over TLS. What
must follow is an ``Outcome``: how the run ends, and what is booked for each misbehaving reply.

    Behaviour("finish: null", …, RETRIED)
        always   the run is suspended, and every reply is booked at its upper bound
        once     the second reply is the answer; the first one is booked at its upper bound

    python benchmarks/reality_catalogue.py     write the table of docs/models.md

``TRUTH`` is the right answer. A reply that must not be believed contains a part of it, so a run
that believes one is seen. Not here: usage that lies (see ``reality_limits.py``).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reality_wire import (
    CLOSE,
    ELSEWHERE,
    EVENT_STREAM,
    LAST_CHUNK,
    MISSING,
    RESET,
    STALL,
    Body,
    Step,
    Wire,
    WireRequest,
    chunk,
    encode,
    event,
    http,
    said,
    stream_head,
    streamed,
)

TRUTH = "It is 42, as the second table says."
HALF = "It is 4"
MODELS_PAGE = Path(__file__).parents[1] / "docs/models.md"


class Outcome(NamedTuple):
    """What must follow from a behaviour that a server always shows."""

    end: str
    """``answer`` (TRUTH, exit code 0), ``suspended``, ``error``, or ``cut``: no whole answer, and
    the run says that it was cut."""
    booked: str
    """What is booked for each misbehaving reply: ``reported`` usage, its upper ``bound``, or
    ``nothing``."""
    is_retried: bool = False
    """True if the request is sent again, so one good reply later the run has its answer."""


RIGHT = Outcome("answer", "reported")
RIGHT_AT_MOST = Outcome("answer", "bound")
RETRIED = Outcome("suspended", "bound", is_retried=True)
RETRIED_FREE = Outcome("suspended", "nothing", is_retried=True)
WAITS = Outcome("suspended", "nothing")
REFUSED = Outcome("error", "nothing")
REFUSED_PAID = Outcome("error", "bound")
STOPPED = Outcome("error", "reported")
CUT = Outcome("cut", "reported")
EMPTY = Outcome("error", "reported", is_retried=True)

Outcomes = Outcome | Mapping[str, Outcome]
"""One outcome for all protocols, or one for each by its name; ``other`` is that of the rest."""
Answer = Callable[[Wire, WireRequest, str], Iterable[Step]]


class Behaviour(NamedTuple):
    """One way to answer a request."""

    name: str
    answer: Answer
    outcomes: Outcomes
    weaker: str = ""
    """Class of behaviours for which LiteLLM is weaker: a key of ``WEAKER``."""
    unasked: Outcome | None = None
    """Outcome if no stream was asked for."""
    closes: bool = False
    """True if ``LITELLM_OVER_TLS`` holds for the next request after it."""
    says: tuple[str, ...] = (TRUTH,)
    """Right answers. A character that is not valid may be replaced or written as an escape."""

    def outcome(self, wire: Wire, wants_stream: bool) -> Outcome:
        if self.weaker and wire.name == "litellm":
            return WEAKER[self.weaker].outcome
        if self.unasked is not None and not wants_stream:
            return self.unasked
        if isinstance(self.outcomes, Outcome):
            return self.outcomes
        return self.outcomes.get(wire.name, self.outcomes["other"])


class Weakness(NamedTuple):
    """Behaviours that have another outcome through LiteLLM."""

    sentence: str
    """What ``docs/models.md`` says about it."""
    outcome: Outcome


WEAKER: dict[str, Weakness] = {}
LITELLM_OVER_TLS = (
    "If a server closes a TLS connection at the end of an incomplete reply, one attempt more is booked "
    "at its upper bound than the server received: LiteLLM does not say whether it was sent."
)


# --- replies: the protocol holds, the content does not


def reply(
    name: str, make: Callable[[Wire, str], Body], outcomes: Outcomes, **more: Any
) -> Behaviour:
    """A reply that is well-formed JSON, or a well-formed stream."""
    return Behaviour(
        name, lambda wire, asked, text: said(wire, asked, make(wire, text)), outcomes, **more
    )


def _finish(name: str, reason: Any, outcomes: Outcomes = RETRIED, **more: Any) -> Behaviour:
    """``reason`` is a word of ``Wire.finishes`` or a value."""

    def make(wire: Wire, text: str) -> Body:
        word = wire.finishes.get(reason, reason) if isinstance(reason, str) else reason
        return wire.finish(wire.body(text), word)

    return reply(f"finish: {name}", make, outcomes, **more)


def _usage(
    name: str, usage: Callable[[Wire], Any], outcomes: Outcomes = RIGHT_AT_MOST, **more: Any
) -> Behaviour:
    def make(wire: Wire, text: str) -> Body:
        body = wire.body(text)
        found = usage(wire)
        if found is MISSING:
            del body["usage"]
        else:
            body["usage"] = found
        return body

    return reply(f"usage: {name}", make, outcomes, **more)


def _beside(name: str, fields: Body, outcomes: Outcomes, **more: Any) -> Behaviour:
    return reply(name, lambda wire, text: {**wire.body(text), **fields}, outcomes, **more)


def _second_first(wire: Wire, text: str) -> Body:
    first, second = wire.body(text), wire.body(HALF)
    if wire.name in ("responses", "messages"):
        return first
    choices = [{**second["choices"][0], "index": 1}, *first["choices"]]
    return {**first, "choices": choices}


def _without(name: str) -> Callable[[Wire, str], Body]:
    def make(wire: Wire, text: str) -> Body:
        body = wire.body(text)
        del body[name]
        return body

    return make


REPLIES = [
    _finish("null", None),
    _finish("missing", MISSING),
    _finish("empty", ""),
    _finish("a number", 7),
    _finish("true", True),
    _finish("a list", ["stop"]),
    _finish("unknown", "odd_reason"),
    _finish("aborted", "broken"),
    _finish("not over yet", "open"),
    _finish("length", "length", CUT),
    reply(
        "finish: length without text", lambda w, _: w.finish(w.body(""), w.finishes["length"]), CUT
    ),
    _finish("filtered", "filter", STOPPED),
    reply(
        "finish: filtered without text",
        lambda w, _: w.finish(w.body(""), w.finishes["filter"]),
        STOPPED,
    ),
    reply("text: a refusal", lambda w, _: w.refusal(), STOPPED),
    reply("text: empty", lambda w, _: w.body(""), EMPTY),
    reply("text: null", lambda w, _: w.body(None), EMPTY),
    reply("text: blank", lambda w, _: w.body(" \n "), EMPTY),
    reply("text: a number", lambda w, _: w.body(4), RETRIED),
    reply("text: true", lambda w, _: w.body(True), RETRIED),
    reply("text: an object", lambda w, t: w.body({"text": t}), RETRIED),
    reply("text: only reasoning", lambda w, t: w.reasoning(t), EMPTY),
    reply("text: a tool call that was not offered", lambda w, _: w.tool_call(None), EMPTY),
    reply("text: a tool call after words", lambda w, t: w.tool_call(t), EMPTY),
    reply(
        "choices: none", lambda w, t: w.parts(w.body(t), []), {"messages": EMPTY, "other": RETRIED}
    ),
    reply("choices: null", lambda w, t: w.parts(w.body(t), None), RETRIED),
    reply("choices: missing", lambda w, t: w.parts(w.body(t), MISSING), RETRIED),
    reply("choices: a text", lambda w, t: w.parts(w.body(t), t), RETRIED),
    reply("choices: a number", lambda w, t: w.parts(w.body(t), 7), RETRIED),
    reply("choices: null inside", lambda w, t: w.parts(w.body(t), [None]), RETRIED),
    reply(
        "choices: an empty object inside",
        lambda w, t: w.parts(w.body(t), [{}]),
        {"responses": EMPTY, "messages": EMPTY, "other": RETRIED},
    ),
    reply("choices: out of order by index", _second_first, RIGHT),
    _beside("error: beside a reply", {"error": {"message": "overloaded"}}, RETRIED),
    _beside("error: a text beside a reply", {"error": "overloaded"}, RETRIED),
    _beside(
        "error: of the kind 429 beside a reply",
        {"error": {"message": "slow", "code": 429}},
        RETRIED,
    ),
    _beside("error: null beside a reply", {"error": None}, RIGHT),
    _beside("error: empty beside a reply", {"error": {}}, RIGHT),
    _beside("fields: unknown ones", {"odd": {"deep": [1, {"a": None}]}, "another": 7}, RIGHT),
    _beside("fields: the model's name is a number", {"model": 7}, RIGHT),
    _beside("fields: the model's name is null", {"model": None}, RIGHT),
    reply("fields: no model", _without("model"), RIGHT),
    reply("fields: no id", _without("id"), RIGHT),
    _beside("fields: id is a number", {"id": 7}, RIGHT),
    _usage("missing", lambda w: MISSING),
    _usage("null", lambda w: None),
    _usage("a text", lambda w: "18", weaker="usage"),
    _usage("a list", lambda w: [9, 9], weaker="usage"),
    _usage("empty", lambda w: {}),
    _usage("negative prompt", lambda w: w.usage(-9, 9)),
    _usage("negative reply", lambda w: w.usage(9, -9)),
    _usage("texts", lambda w: w.usage("9", "9")),
    _usage("fractions", lambda w: w.usage(9.5, 9), weaker="usage"),
    _usage("true", lambda w: w.usage(True, True)),
    _usage("nulls", lambda w: w.usage(None, None)),
    _usage(
        "more cached than asked",
        lambda w: w.usage(9, 9, prompt_tokens_details={"cached_tokens": 500}),
        {"messages": RIGHT, "other": RIGHT_AT_MOST},
    ),
    _usage("longer than any window", lambda w: w.usage(9, 10**12)),
    _usage("a number of 30 digits", lambda w: w.usage(9, 10**30)),
    _usage("a cost that is negative", lambda w: w.usage(9, 9, cost=-1), RIGHT),
    _usage("a cost of 400 digits", lambda w: w.usage(9, 9, cost=10**400), RIGHT),
]


# --- bodies: HTTP holds, the body is not the API's


def body(
    name: str,
    make: Callable[[Wire, str], bytes],
    outcomes: Outcomes = RETRIED,
    kind: str = "application/json",
    **more: Any,
) -> Behaviour:
    """A body of a response with status 200. It is never a stream, whatever was asked for."""
    return Behaviour(
        f"body: {name}",
        lambda wire, asked, text: [http(make(wire, text), kind=kind)],
        outcomes,
        **more,
    )


def _json(wire: Wire, text: str) -> bytes:
    return encode(wire.body(text))


WEB_PAGE = b"<!doctype html><html><title>Welcome</title><body>Please log in</body></html>"
OTHER_API: dict[str, Any] = {
    "done": True,
    "message": {"role": "assistant", "content": HALF},
    "result": HALF,
}
BODIES = [
    body("a web page", lambda w, t: WEB_PAGE, RETRIED_FREE, "text/html", weaker="unparsed"),
    body("a web page named JSON", lambda w, t: WEB_PAGE, RETRIED_FREE, weaker="unparsed"),
    body(
        "XML",
        lambda w, t: b'<?xml version="1.0"?><reply>4</reply>',
        RETRIED_FREE,
        "text/xml",
        weaker="unparsed",
    ),
    body("empty", lambda w, t: b""),
    body("blank", lambda w, t: b" \n\n "),
    body("half of the JSON", lambda w, t: _json(w, t)[: len(_json(w, t)) // 2]),
    body("JSON without its end", lambda w, t: _json(w, t)[:-1]),
    body("JSON with more after it", lambda w, t: _json(w, t) + b'{"more": 1}'),
    body("the JSON twice", lambda w, t: _json(w, t) * 2),
    body("JSON inside JSON text", lambda w, t: encode(_json(w, t).decode())),
    body("null", lambda w, t: b"null"),
    body("a list", lambda w, t: b"[]"),
    body("the reply in a list", lambda w, t: b"[" + _json(w, t) + b"]"),
    body("a number", lambda w, t: b"42"),
    body("a text", lambda w, t: b'"It is 4"'),
    body("true", lambda w, t: b"true"),
    body("an empty object", lambda w, t: b"{}"),
    body("plain words", lambda w, t: b"It is 4", kind="text/plain"),
    body("NUL bytes", lambda w, t: bytes(64)),
    body("random bytes", lambda w, t: bytes(range(1, 256))),
    body("another API's reply", lambda w, t: encode(OTHER_API)),
    body("nested 100,000 deep", lambda w, t: b"[" * 100_000),
    body(
        "a field nested 100,000 deep", lambda w, t: _json(w, t)[:-1] + b', "odd": ' + b"[" * 100_000
    ),
    body(
        "a field nested 5,000 deep",
        lambda w, t: _json(w, t)[:-1] + b', "odd": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ),
    body("single quotes", lambda w, t: _json(w, t).replace(b'"', b"'")),
    body("in UTF-16", lambda w, t: _json(w, t).decode().encode("utf-16"), weaker="lenient"),
    body("a byte order mark before it", lambda w, t: b"\xef\xbb\xbf" + _json(w, t), RIGHT),
    body(
        "an invalid UTF-8 byte",
        lambda w, t: _json(w, t).replace(b"It is", b"It\xff is"),
        RIGHT,
        weaker="unparsed",
        says=(TRUTH.replace("It", "It\ufffd"),),
    ),
    body(
        "half of a surrogate pair",
        lambda w, t: _json(w, t).replace(b"It is", rb"It\ud800 is"),
        RIGHT,
        says=(TRUTH.replace("It", "It?"), TRUTH.replace("It", "It\\ud800")),
    ),
    body("NaN", lambda w, t: _json(w, t)[:-1] + b', "odd": NaN}', RIGHT),
    body("JSON named text", _json, RIGHT, "text/plain"),
    body("JSON without a content type", _json, RIGHT, ""),
    body(
        "an error without a reply",
        lambda w, t: encode({"error": {"message": "overloaded"}}),
        RETRIED_FREE,
    ),
    body(
        "an error with the code 401",
        lambda w, t: encode({"error": {"message": "no key", "code": 401}}),
        WAITS,
    ),
    body(
        "an error with the code 400",
        lambda w, t: encode({"error": {"message": "no", "code": 400}}),
        REFUSED,
    ),
    body(
        "an error with a code in words",
        lambda w, t: encode({"error": {"message": "no", "code": "overloaded"}}),
        RETRIED_FREE,
    ),
]


# --- statuses


def status(
    number: int,
    outcomes: Outcomes,
    what: str = "",
    payload: bytes = b"",
    headers: Mapping[str, str] = {},
    kind: str = "application/json",
    **more: Any,
) -> Behaviour:
    payload = payload or encode(
        {"type": "error", "error": {"type": "x", "message": f"it says {number}"}}
    )
    name = f"status {number}" + (f": {what}" if what else "")
    return Behaviour(
        name, lambda wire, asked, text: [http(payload, number, kind, headers)], outcomes, **more
    )


def _message(text: str) -> bytes:
    return encode({"error": {"message": text}})


QUOTA = _message("You exceeded your current quota, please check your plan and billing details")
SOON = {"retry-after": "1"}
STATUSES = [
    Behaviour("status 201 with a reply", lambda w, a, t: [http(_json(w, t), 201)], RIGHT),
    Behaviour("status 203 with a reply", lambda w, a, t: [http(_json(w, t), 203)], RIGHT),
    status(202, RETRIED, "a job that was accepted", encode({"job": 7})),
    Behaviour("status 204", lambda w, a, t: [b"HTTP/1.1 204 No Content\r\n\r\n"], RETRIED),
    *(
        status(n, REFUSED, "another address", headers={"Location": ELSEWHERE}, weaker="moved")
        for n in (301, 302, 307, 308)
    ),
    Behaviour(
        "status 304",
        lambda w, a, t: [b"HTTP/1.1 304 Not Modified\r\n\r\n"],
        REFUSED,
        weaker="unparsed",
    ),
    status(400, REFUSED),
    status(400, REFUSED, "deeply nested", b'{"error": ' + b"[" * 100_000),
    status(400, REFUSED, "a megabyte", _message("x" * 1_000_000)),
    status(400, REFUSED, "bytes", bytes(range(256))),
    status(400, REFUSED, "no body", b" "),
    status(
        400,
        REFUSED,
        "the prompt is too long",
        _message("This model's maximum context length is 8 tokens"),
    ),
    status(400, WAITS, "no credit", _message("Your credit balance is too low")),
    status(401, WAITS),
    status(402, WAITS),
    status(403, WAITS),
    status(404, REFUSED),
    status(405, REFUSED),
    status(408, RETRIED_FREE, weaker="failed"),
    status(409, REFUSED),
    status(413, REFUSED),
    status(418, REFUSED),
    status(422, REFUSED),
    status(425, RETRIED_FREE),
    status(429, RETRIED_FREE),
    status(429, RETRIED_FREE, "wait a second", headers=SOON),
    status(
        429,
        RETRIED_FREE,
        "wait until the year 3000000000",
        headers={"retry-after": "Fri, 31 Dec 3000000000 23:59:59 GMT"},
    ),
    status(429, RETRIED_FREE, "wait a negative time", headers={"retry-after": "-5"}),
    status(429, WAITS, "wait forever", headers={"retry-after": "1e999"}),
    status(429, WAITS, "wait 5,000 digits of seconds", headers={"retry-after": "9" * 5000}),
    status(429, WAITS, "no quota", QUOTA),
    status(429, RETRIED_FREE, "a list", b"[]"),
    status(431, REFUSED),
    status(451, REFUSED),
    status(500, RETRIED_FREE, weaker="failed"),
    status(500, RETRIED_FREE, "deeply nested", b'{"error": ' + b"[" * 100_000, weaker="failed"),
    status(500, RETRIED_FREE, "an error without words", encode({"error": None}), weaker="failed"),
    status(501, REFUSED, weaker="failed for good"),
    status(502, RETRIED_FREE, "a web page", WEB_PAGE, kind="text/html", weaker="failed"),
    status(503, RETRIED_FREE, weaker="failed"),
    status(503, RETRIED_FREE, "wait a second", headers=SOON, weaker="failed"),
    status(504, RETRIED),
    status(520, RETRIED_FREE, weaker="failed"),
    status(524, RETRIED),
    status(529, RETRIED_FREE, weaker="failed"),
    status(599, RETRIED_FREE, weaker="failed"),
]


# --- HTTP


def raw(
    name: str, make: Callable[[bytes], Iterable[Step]], outcomes: Outcomes = RETRIED, **more: Any
) -> Behaviour:
    """Steps of a server that does not keep to HTTP. ``make`` gets the reply's JSON."""
    return Behaviour(
        f"http: {name}", lambda wire, asked, text: make(_json(wire, text)), outcomes, **more
    )


JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def _head(*lines: bytes) -> bytes:
    return JSON_HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def _length(body: bytes, more: int = 0) -> bytes:
    return b"Content-Length: %d" % (len(body) + more)


def _packed(body: bytes, encoding: str) -> list[Step]:
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    return [http(packed, headers={"Content-Encoding": encoding})]


def _cut_after(body: bytes, action: Step) -> list[Step]:
    return [_head(_length(body)) + body[: len(body) // 2], action]


HTTP = [
    raw("closed before the reply", lambda b: [CLOSE]),
    raw("reset before the reply", lambda b: [RESET]),
    raw("closed in the status line", lambda b: [b"HTTP/1.1 20", CLOSE]),
    raw("closed in the headers", lambda b: [JSON_HEAD, CLOSE]),
    raw("closed in the body", lambda b: _cut_after(b, CLOSE)),
    raw("reset in the body", lambda b: _cut_after(b, RESET)),
    raw("silent before the reply", lambda b: [STALL]),
    raw("silent in the headers", lambda b: [JSON_HEAD, STALL]),
    raw("silent in the body", lambda b: _cut_after(b, STALL)),
    raw("a slow reply", lambda b: [_head(_length(b)), b[:9], 5.0, b[9:20], 5.0, b[20:]], RIGHT),
    raw(
        "a reply byte by byte",
        lambda b: [_head(_length(b)), *(b[i : i + 1] for i in range(len(b)))],
        RIGHT,
    ),
    raw("closed in a chunk", lambda b: [CHUNKED + chunk(b)[:30], CLOSE]),
    raw("closed before the last chunk", lambda b: [CHUNKED + chunk(b), CLOSE]),
    raw("a chunk of odd size", lambda b: [CHUNKED + b"zz\r\n" + b + b"\r\n" + LAST_CHUNK]),
    raw("a chunk of negative size", lambda b: [CHUNKED + b"-5\r\n" + b + b"\r\n" + LAST_CHUNK]),
    raw("a chunk longer than it says", lambda b: [CHUNKED + b"5\r\n" + b + b"\r\n" + LAST_CHUNK]),
    raw("chunks", lambda b: [CHUNKED, chunk(b[:9]), chunk(b[9:]), LAST_CHUNK], RIGHT),
    raw(
        "chunks with extensions and trailers",
        lambda b: [CHUNKED + b"%x;odd=1\r\n%s\r\n0\r\nX-Odd: 1\r\n\r\n" % (len(b), b)],
        RIGHT,
    ),
    raw("garbage", lambda b: [b"\x15\x03\x01\x00\x02\x02\x28 this is not HTTP\r\n\r\n", CLOSE]),
    raw("only a body", lambda b: [b, CLOSE]),
    raw("HTTP/2 frames", lambda b: [b"\x00\x00\x12\x04" + bytes(23), CLOSE]),
    raw("status abc", lambda b: [b"HTTP/1.1 abc OK\r\n\r\n", CLOSE]),
    raw(
        "no reason in the status line",
        lambda b: [b"HTTP/1.1 200\r\n" + _length(b) + b"\r\n\r\n" + b],
        RIGHT,
    ),
    raw(
        "HTTP/1.0 until the connection closes",
        lambda b: [b"HTTP/1.0 200 OK\r\n\r\n" + b, CLOSE],
        RIGHT,
    ),
    raw("no length until the connection closes", lambda b: [_head() + b, CLOSE], RIGHT),
    raw(
        "no length, and half of the body",
        lambda b: [_head() + b[: len(b) // 2], CLOSE],
        closes=True,
    ),
    raw(
        "both a length and chunks",
        lambda b: [_head(_length(b), b"Transfer-Encoding: chunked") + chunk(b) + LAST_CHUNK, CLOSE],
        weaker="lenient",
    ),
    raw("two lengths", lambda b: [_head(_length(b), _length(b, -9)) + b, CLOSE]),
    raw("a negative length", lambda b: [_head(b"Content-Length: -5") + b, CLOSE]),
    raw("a length in words", lambda b: [_head(b"Content-Length: many") + b, CLOSE]),
    raw("a length that is too large", lambda b: [_head(_length(b, 99)) + b, CLOSE]),
    raw("a length that is too small", lambda b: [_head(_length(b, -9)) + b, CLOSE], closes=True),
    raw(
        "a length of a terabyte",
        lambda b: [_head(b"Content-Length: 1000000000000") + b, CLOSE],
        REFUSED_PAID,
        weaker="unbounded",
    ),
    raw(
        "headers of a megabyte",
        lambda b: [JSON_HEAD + b"X-Odd: " + b"x" * 1_000_000 + b"\r\n\r\n", CLOSE],
    ),
    raw("a header without a colon", lambda b: [_head(b"odd line", _length(b)) + b, CLOSE]),
    raw("a header with a NUL", lambda b: [_head(b"X-Odd: a\0b", _length(b)) + b, CLOSE]),
    raw(
        "100 Continue before the reply",
        lambda b: [b"HTTP/1.1 100 Continue\r\n\r\n" + http(b)],
        RIGHT,
    ),
    raw(
        "early hints before the reply",
        lambda b: [b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + http(b)],
        RIGHT,
    ),
    raw(
        "another protocol (101)",
        lambda b: [
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: odd\r\nConnection: upgrade\r\n\r\n",
            CLOSE,
        ],
    ),
    raw(
        "the connection is to be closed",
        lambda b: [http(b, headers={"Connection": "close"}), CLOSE],
        RIGHT,
    ),
    raw(
        "a second reply that was not asked for",
        lambda b: [http(b) + http(b.replace(b"42", b"43"))],
        RIGHT,
    ),
    raw(
        "a late second reply that was not asked for",
        lambda b: [http(b), 0.5, http(b.replace(b"42", b"43"))],
        RIGHT,
    ),
    raw("gzip", lambda b: _packed(b, "gzip"), RIGHT),
    raw("deflate", lambda b: _packed(b, "deflate"), RIGHT),
    raw("gzip that is none", lambda b: [http(b, headers={"Content-Encoding": "gzip"})]),
    raw(
        "gzip that is cut",
        lambda b: [http(gzip.compress(b)[:-12], headers={"Content-Encoding": "gzip"})],
    ),
    raw(
        "another compression",
        lambda b: [http(b, headers={"Content-Encoding": "odd"})],
        REFUSED_PAID,
        weaker="lenient",
    ),
    raw(
        "gzip of 100 MB",
        lambda b: [http(BOMB, headers={"Content-Encoding": "gzip"})],
        REFUSED_PAID,
        weaker="unbounded",
    ),
    raw(
        "cookies and other headers",
        lambda b: [http(b, headers={"Set-Cookie": "a=b", "Alt-Svc": 'h3=":443"', "Server": "odd"})],
        RIGHT,
    ),
]
BOMB = gzip.compress(bytes(100_000_000), 1)


# --- streams


def stream(
    name: str, make: Callable[[list[bytes]], Iterable[Step]], outcomes: Outcomes, **more: Any
) -> Behaviour:
    """A stream of events. ``make`` gets the events of a whole reply. A client that did not ask for
    a stream gets it, too."""

    def answer(wire: Wire, asked: WireRequest, text: str) -> Iterable[Step]:
        return make(wire.events(wire.body(text)))

    more.setdefault("unasked", RETRIED)
    return Behaviour(f"stream: {name}", answer, outcomes, **more)


def _cut(events: list[bytes]) -> list[bytes]:
    """The events of the first half of a stream."""
    return events[: len(events) // 2]


def _in_bytes(events: list[bytes]) -> list[Step]:
    data = b"".join(events)
    return [stream_head(), *(chunk(data[i : i + 1]) for i in range(len(data))), LAST_CHUNK]


def _with_line_ends(events: list[bytes], end: bytes) -> list[Step]:
    return streamed([each.replace(b"\n", end) for each in events])


FAILED = {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}}
ERROR_EVENT = event(FAILED, "error")
LAST_IS_NEEDED = {"chat": RIGHT, "messages": RIGHT, "other": RETRIED}
STREAMS = [
    stream("whole", streamed, RIGHT),
    stream("byte by byte", _in_bytes, RIGHT),
    stream("in one piece", lambda e: [http(b"".join(e), kind=EVENT_STREAM)], RIGHT),
    stream(
        "until the connection closes",
        lambda e: [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", *e, CLOSE],
        RIGHT,
        closes=True,
    ),
    stream("ends in the middle", lambda e: streamed(_cut(e)), RETRIED),
    stream("closed in the middle", lambda e: [*streamed(_cut(e))[:-1], CLOSE], RETRIED),
    stream("reset in the middle", lambda e: [*streamed(_cut(e))[:-1], RESET], RETRIED),
    stream("silent in the middle", lambda e: [*streamed(_cut(e))[:-1], STALL], RETRIED),
    stream("silent before the first event", lambda e: [stream_head(), STALL], RETRIED),
    stream(
        "a pause in the middle",
        lambda e: [*streamed(_cut(e))[:-1], 9.0, *map(chunk, e[len(_cut(e)) :]), LAST_CHUNK],
        RIGHT,
    ),
    stream(
        "an event cut in two",
        lambda e: [*streamed(_cut(e))[:-1], chunk(e[len(_cut(e))][:20]), LAST_CHUNK],
        RETRIED,
    ),
    stream("no events", lambda e: streamed([]), RETRIED),
    stream(
        "only the last event", lambda e: streamed(e[-1:]), {"responses": RIGHT, "other": RETRIED}
    ),
    stream("without its last event", lambda e: streamed(e[:-1]), LAST_IS_NEEDED),
    stream("the last event twice", lambda e: streamed([*e, e[-1]]), RIGHT),
    stream("silent after the last event", lambda e: [*streamed(e)[:-1], STALL], RIGHT),
    stream("more after the last event", lambda e: streamed([*e, b"data: more\n\n"]), RIGHT),
    stream("an event without data", lambda e: streamed([e[0], b"event: ping\n\n", *e[1:]]), RIGHT),
    stream("an event with empty data", lambda e: streamed([e[0], b"data:\n\n", *e[1:]]), RIGHT),
    stream(
        "comments", lambda e: streamed([b": odd\n\n", *(each + b": ping\n\n" for each in e)]), RIGHT
    ),
    stream(
        "ids and retry times",
        lambda e: streamed([b"id: 1\nretry: 5\n" + each for each in e]),
        RIGHT,
    ),
    stream("unknown fields", lambda e: streamed([b"odd: 1\nodd\n" + each for each in e]), RIGHT),
    stream("CR LF", lambda e: _with_line_ends(e, b"\r\n"), RIGHT),
    stream(
        "no space after the colon",
        lambda e: streamed([each.replace(b"data: ", b"data:") for each in e]),
        RIGHT,
    ),
    stream("a byte order mark", lambda e: streamed([b"\xef\xbb\xbf" + e[0], *e[1:]]), RIGHT),
    stream(
        "an event of an unknown type",
        lambda e: streamed([e[0], event({"type": "odd", "choices": []}, "odd"), *e[1:]]),
        RIGHT,
    ),
    stream(
        "a garbage line",
        lambda e: streamed([*_cut(e), b"data: {odd\n\n", *e[len(_cut(e)) :]]),
        RETRIED,
    ),
    stream(
        "an event that is a list",
        lambda e: streamed([*_cut(e), event([7]), *e[len(_cut(e)) :]]),
        RETRIED,
    ),
    stream(
        "an event nested 100,000 deep",
        lambda e: streamed([*_cut(e), event(b"[" * 100_000), *e[len(_cut(e)) :]]),
        RETRIED,
    ),
    stream("an error before any text", lambda e: streamed([ERROR_EVENT]), RETRIED_FREE),
    stream("an error after text", lambda e: streamed([*_cut(e), ERROR_EVENT]), RETRIED),
    stream(
        "an error after text, and the rest",
        lambda e: streamed([*_cut(e), ERROR_EVENT, *e[len(_cut(e)) :]]),
        RETRIED,
    ),
    stream(
        "an event of 100 MB",
        lambda e: [stream_head(), *(chunk(b"x" * 1_000_000) for _ in range(100)), LAST_CHUNK],
        REFUSED_PAID,
        weaker="unbounded",
        unasked=REFUSED_PAID,
    ),
    stream(
        "named JSON",
        lambda e: [stream_head("application/json"), *map(chunk, e), LAST_CHUNK],
        RETRIED,
    ),
]

BEHAVIOURS: list[Behaviour] = [*REPLIES, *BODIES, *STATUSES, *HTTP, *STREAMS]

WEAKER |= {
    "unparsed": Weakness(
        "A web page in place of a reply, and a response with the status 408 or 5xx, are counted as a lost reply.",
        RETRIED,
    ),
    "failed": Weakness(
        "A web page in place of a reply, and a response with the status 408 or 5xx, are counted as a lost reply.",
        RETRIED,
    ),
    "failed for good": Weakness(
        "A web page in place of a reply, and a response with the status 408 or 5xx, are counted as a lost reply.",
        REFUSED_PAID,
    ),
    "usage": Weakness(
        "Usage that is not an object of whole numbers makes the reply unusable.", RETRIED
    ),
    "moved": Weakness("Redirects are followed, even to another host.", REFUSED),
    "lenient": Weakness(
        "Replies in UTF-16, with both a length and chunks, or with an unknown `Content-Encoding` are read.",
        RIGHT,
    ),
    "unbounded": Weakness("The length of replies is not limited, compressed or not.", RETRIED),
}


# --- the page

EFFECTS: dict[Outcome, str] = {
    RIGHT: "is used | as reported | has its answer",
    RIGHT_AT_MOST: "is used | at its upper bound | has its answer",
    RETRIED: "is asked for again | at its upper bound | is suspended",
    RETRIED_FREE: "is asked for again | not at all | is suspended",
    EMPTY: "is asked for again, twice | as reported | ends with an error",
    CUT: "is the last | as reported | ends as cut short",
    STOPPED: "is the last | as reported | ends with an error",
    WAITS: "is the last | not at all | is suspended",
    REFUSED: "is the last | not at all | ends with an error",
    REFUSED_PAID: "is the last | at its upper bound | ends with an error",
}
"""Outcome -> what happens to the reply | what is booked | what becomes of the run."""


def page() -> str:
    """The table of ``docs/models.md``: each outcome with the behaviours that have it."""
    lines = ["| the reply | booked | a run that gets no other reply | misbehaviours |"]
    lines.append("|---|---|---|---|")
    for outcome, effect in EFFECTS.items():
        names = [each.name for each in BEHAVIOURS if usual_effect(each) == outcome]
        lines.append(f"| {effect} | {_joined(names)} |")
    return "\n".join(lines)


def usual_effect(behaviour: Behaviour) -> Outcome:
    outcomes = behaviour.outcomes
    return outcomes if isinstance(outcomes, Outcome) else outcomes["other"]


def _joined(names: Iterable[str]) -> str:
    """``finish: null, missing; body: empty``"""
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, rest = name.partition(" " if name.startswith("status") else ": ")
        groups.setdefault(group, []).append(rest)
    return "; ".join(f"**{group}** {', '.join(rest)}" for group, rest in groups.items())


def written(text: str) -> str:
    """Return the text of the page with its table brought up to date."""
    begin, end = "<!-- begin misbehaviours -->\n", "<!-- end misbehaviours -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{page()}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    MODELS_PAGE.write_text(written(MODELS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
