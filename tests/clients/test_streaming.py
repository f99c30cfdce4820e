"""Streamed replies: the same as whole ones, in pieces, and what happens if a stream breaks."""

import asyncio

import msgspec
import pytest

from ramify.clients.base import Request, Tool
from ramify.clients.event_stream import ServerSentEventParser
from ramify.clients.mock_http_server import MockHttpServer
from ramify.clients.model_config import Model
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import (
    MalformedResponse,
    ModelError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
)
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, ToolCall, Usage
from tests.clients.helpers import Books, request, run, run_skipping

encode = msgspec.json.encode

# --- the same reply, whole and as the events of each API ------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHAT = {
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "hello wörld",
                "reasoning_content": "hm, so",
                "tool_calls": [CALL],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
}


def chunk(finish=None, **delta):
    return {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call_part(id=None, name=None, arguments=""):
    return {"index": 0, "id": id, "function": {"name": name, "arguments": arguments}}


CHAT_EVENTS = [
    chunk(role="assistant", content=""),
    chunk(reasoning_content="hm, "),
    chunk(reasoning_content="so"),
    chunk(content="hello "),
    chunk(content="wörld"),
    chunk(tool_calls=[call_part("c1", "look")]),
    chunk(tool_calls=[call_part(arguments='{"at"')]),
    chunk(tool_calls=[call_part(arguments=": 1}")]),
    chunk("tool_calls"),
    {"model": "m", "choices": [], "usage": CHAT["usage"]},
]
RESPONSE = {
    "model": "m",
    "status": "completed",
    "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm, so"}]},
        {
            "type": "message",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hello wörld"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
    ],
    "usage": {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12},
}
RESPONSE_EVENTS = [
    {"type": "response.created", "response": {"status": "in_progress", "output": []}},
    {"type": "response.reasoning_summary_text.delta", "delta": "hm, "},
    {"type": "response.reasoning_summary_text.delta", "delta": "so"},
    {"type": "response.output_text.delta", "delta": "hello "},
    {"type": "response.output_text.delta", "delta": "wörld"},
    {"type": "response.function_call_arguments.delta", "delta": '{"at": 1}'},
    {"type": "response.completed", "response": RESPONSE},
]
THINKING = {"type": "thinking", "thinking": "hm, so", "signature": "s1"}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
MESSAGE = {
    "type": "message",
    "model": "m",
    "content": [THINKING, {"type": "text", "text": "hello wörld"}, USE],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 5, "output_tokens": 7},
}


def block(index, start, *deltas):
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


MESSAGE_EVENTS = [
    {
        "type": "message_start",
        "message": {**MESSAGE, "content": [], "stop_reason": None}
        | {"usage": {"input_tokens": 5, "output_tokens": 1}},
    },
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "hm, "},
        {"type": "thinking_delta", "thinking": "so"},
        {"type": "signature_delta", "signature": "s1"},
    ),
    {"type": "ping"},
    *block(
        1,
        {"type": "text", "text": ""},
        {"type": "text_delta", "text": "hello "},
        {"type": "text_delta", "text": "wörld"},
    ),
    *block(
        2,
        {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"at"'},
        {"type": "input_json_delta", "partial_json": ": 1}"},
    ),
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
]
APIS = {
    "chat": ("vllm:m@{}/v1", CHAT, CHAT_EVENTS),
    "responses": ("vllm:m@{}/v1/responses", RESPONSE, RESPONSE_EVENTS),
    "messages": ("anthropic:m@{}", MESSAGE, MESSAGE_EVENTS),
}
ERRORS = {
    "chat": {"error": {"message": "no more", "code": 429}},
    "responses": {"type": "error", "code": "rate_limit_exceeded", "message": "no more"},
    "messages": {"type": "error", "error": {"type": "overloaded_error", "message": "no more"}},
}


def stream_of(events, done=True):
    data = b"".join(
        b"event: %s\r\ndata: %s\r\n\r\n" % (str(event.get("type", "x")).encode(), encode(event))
        for event in events
    )
    return data + (b"data: [DONE]\n\n" if done else b"")


class Streams:
    """A server that answers with given bodies: a dict as JSON, bytes as a stream of events in
    pieces of ``size``, (status, dict) as an error. ``drops`` closes the connection after a
    stream."""

    def __init__(self, *answers, size=None, drops=False, gap_s=0.0, poll_s=0.005):
        self.answers, self.asked = list(answers), []
        self.left = asyncio.Event()
        """Set when a client has closed a stream."""
        self._size, self._drops, self._gap_s = size, drops, gap_s
        self._poll_s = poll_s
        self._http = MockHttpServer(self._handle)
        self._tasks = set()

    async def __aenter__(self):
        await self._http.start()
        self.root = f"http://127.0.0.1:{self._http.port}"
        return self

    async def __aexit__(self, *exc):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    def _handle(self, exchange):
        self.asked.append(msgspec.json.decode(exchange.body))
        answer = self.answers.pop(0)
        if isinstance(answer, bytes):
            task = asyncio.ensure_future(self._stream(exchange, answer))
            self._tasks.add(task)
        else:
            status, body = answer if isinstance(answer, tuple) else (200, answer)
            exchange.send(status, encode(body))

    async def _stream(self, exchange, data):
        exchange.begin_streamed_response("text/event-stream; charset=utf-8")
        size = self._size or len(data) or 1
        for at in range(0, len(data), size):
            exchange.send_piece(data[at : at + size])
            await asyncio.sleep(self._gap_s)
            if not exchange.is_open:
                break
        if self._drops:
            exchange.drop()
        elif exchange.is_open and data.endswith(b"WAIT"):
            while exchange.is_open:
                await asyncio.sleep(self._poll_s)
        if exchange.is_open:
            exchange.end()
        else:
            self.left.set()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789abcdef")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


async def asked(api, server, times=1, stream=True, **options):
    """Send requests; return (replies or errors, pieces of the last one, its entries in a book)."""
    pool, outcomes = RateLimitedClientPool(max_attempts=1, **options), []
    client = pool.client_for_model(Model(APIS[api][0].format(server.root), stream=stream))
    for _ in range(times):
        pieces, books = [], Books()
        try:
            reply = await pool.ask(client, request(), books, on_piece=pieces.append)
            outcomes.append(msgspec.structs.replace(reply, seconds=0.0))
        except ModelError as error:
            outcomes.append(error)
    await pool.close()
    return outcomes, pieces, books


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize("api", APIS)
def test_streamed_reply_equals_the_whole_one(api, size):
    async def main():
        _, whole, events = APIS[api]
        async with Streams(whole, stream_of(events, api == "chat"), size=size) as server:
            return await asked(api, server, times=2)

    (whole, streamed), pieces, books = run(main())
    assert streamed == whole
    assert (streamed.message, streamed.usage) == (
        Message("assistant", "hello wörld", "hm, so", (ToolCall("c1", "look", '{"at": 1}'),))
        if api != "messages"
        else Message("assistant", "hello wörld", "hm, so", (ToolCall("c1", "look", '{"at":1}'),)),
        Usage(5, 7, calls=1),
    )
    assert "".join(piece.text for piece in pieces) == "hello wörld"
    assert "".join(piece.reasoning for piece in pieces) == "hm, so"
    assert books.kinds == ["settle"]


def test_connection_of_a_stream_is_used_again():
    async def main():
        async with ScriptedServer(lambda _: "hello", pieces=3) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.url})
            for _ in range(3):
                await pool.ask(pool.client("openai:m"), request(), Books())
            num = server.num_connections
            await pool.close()
            return num, [each.json["stream"] for each in server.requests]

    assert run(main()) == (1, [True] * 3)


@pytest.mark.parametrize("api", APIS)
def test_stream_can_be_switched_off(api):
    async def main():
        async with Streams(APIS[api][1]) as server:
            await asked(api, server, stream=False)
            return server.asked[0]

    assert not {"stream", "stream_options"} & set(run(main()))


def test_request_for_log_probabilities_is_not_streamed():
    async def main():
        async with ScriptedServer(["hello"]) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.url})
            ask = request()
            exact = msgspec.structs.replace(ask.sampling, logprobs=True)
            await pool.client("openai:m").complete(Request(ask.messages, exact))
            await pool.close()
            return server.requests[0].json

    assert "stream" not in run(main())


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "Unrecognized request argument supplied: stream_options"),
        (422, "streaming is not supported by this model"),
        (404, "stream: no such field"),
    ],
)
@pytest.mark.parametrize("api", APIS)
def test_server_that_refuses_streams_is_asked_without(api, status, text):
    async def main():
        whole = APIS[api][1]
        async with Streams((status, {"error": {"message": text}}), whole, whole) as server:
            outcomes, *_ = await asked(api, server, times=3)
            return outcomes, ["stream" in each for each in server.asked]

    (refused, *replies), streamed = run(main())
    assert (type(refused), refused.transient) == (RequestRefusedError, True)
    assert [reply.message.content for reply in replies] == ["hello wörld"] * 2
    assert streamed == [True, False, False]


def test_refusal_that_is_not_about_streams_changes_nothing():
    async def main():
        refusal = (400, {"error": {"message": "upstream says: no such tool"}})
        async with Streams(refusal, refusal) as server:
            await asked("chat", server, times=2)
            return [each["stream"] for each in server.asked]

    assert run(main()) == [True, True]


@pytest.mark.parametrize("api", APIS)
def test_server_whose_streams_count_no_tokens_is_asked_without(api):
    def uncounted(event):
        kept = {name: value for name, value in event.items() if name != "usage"}
        for name in ("message", "response"):
            if name in kept:
                kept[name] = uncounted(kept[name])
        return kept

    async def main():
        _, whole, events = APIS[api]
        stream = stream_of(map(uncounted, events), api == "chat")
        async with Streams(stream, whole) as server:
            outcomes, *_ = await asked(api, server, times=2)
            return outcomes, ["stream" in each for each in server.asked]

    (first, second), streamed = run(main())
    assert (first.message, first.usage.unknown_calls) == (second.message, 1)
    assert (second.usage, streamed) == (Usage(5, 7, calls=1), [True, False])


# --- streams that break ---------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [False, True], ids=["ends", "drops"])
@pytest.mark.parametrize("api", APIS)
def test_stream_that_ends_early_is_a_lost_reply(api, drops):
    """What had arrived was shown, and the attempt is booked in full."""

    async def main():
        events = APIS[api][2]
        texts = [at for at, event in enumerate(events) if "hello " in str(event)]
        async with Streams(stream_of(events[: texts[0] + 1], False), drops=drops) as server:
            return await asked(api, server)

    (error,), pieces, books = run(main())
    assert type(error) is ReplyLostError
    assert "before the reply was whole" in str(error)
    assert "127.0.0.1" in str(error)
    assert "".join(piece.text for piece in pieces) == "hello "
    assert books.kinds == ["forfeit"]


@pytest.mark.parametrize("api", APIS)
def test_error_within_a_stream_is_read_as_before_it(api):
    async def main():
        events = APIS[api][2][:5]
        async with Streams(stream_of([*events, ERRORS[api]], False)) as server:
            return await asked(api, server)

    (error,), _, books = run(main())
    assert type(error) is (ServerStatusError if api == "responses" else RateLimited)
    assert "no more" in str(error)
    assert (error.may_be_paid, books.kinds) == (True, ["forfeit"])


@pytest.mark.parametrize("event", [b"data: {\n\n", b"data: hello\n\n", b"data: [1]\n\n"])
@pytest.mark.parametrize("api", APIS)
def test_event_that_is_not_of_the_api_is_a_bad_reply(api, event):
    async def main():
        async with Streams(event) as server:
            return await asked(api, server)

    (error,), _, books = run(main())
    assert (type(error), books.kinds) == (MalformedResponse, ["forfeit"])
    assert "sent an event that is not a" in str(error)


def test_stream_without_its_end_marker_counts_if_the_reply_is_whole():
    async def main():
        async with Streams(stream_of(CHAT_EVENTS, done=False)[:-2]) as server:
            return (await asked("chat", server))[0][0].message.content

    assert run(main()) == "hello wörld"


def test_reply_may_take_longer_than_the_time_out():
    """Twenty minutes of stream, with a piece every six seconds, and a time-out of ten minutes."""

    async def main():
        async with ScriptedServer(["word " * 200], pieces=200, piece_s=6.0) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.url}, timeout_s=600)
            began = asyncio.get_running_loop().time()
            reply = await pool.ask(pool.client("openai:m"), request("x", 999), Books())
            await pool.close()
            return reply.message.content, asyncio.get_running_loop().time() - began

    content, seconds = run_skipping(main())
    assert content == "word " * 200
    assert seconds > 1200


@pytest.mark.parametrize("api", APIS)
def test_stream_that_stops_is_given_up(api):
    async def main():
        events = APIS[api][2][:-2]
        stream = stream_of(events, False) + b": WAIT"
        async with Streams(stream, poll_s=60.0) as server:
            return await asked(api, server, timeout_s=600)

    (error,), _, books = run_skipping(main())
    assert type(error) is ReplyLostError
    assert "the reply stopped after 17 characters, and nothing arrived for 600 s" in str(error)
    assert "stream=False" in str(error)
    assert "127.0.0.1" in str(error)
    assert books.kinds == ["forfeit"]


def test_stream_of_mere_signs_of_life_has_an_end():
    async def main():
        async with Streams(b": ping\n\n" * 10_000, size=9, gap_s=5.0) as server:
            began = asyncio.get_running_loop().time()
            (error,), *_ = await asked("chat", server, timeout_s=10)
            return error, asyncio.get_running_loop().time() - began

    error, seconds = run_skipping(main())
    assert type(error) is ReplyLostError
    assert 60 <= seconds < 90


def test_cancelled_request_closes_its_stream():
    """The server stops generating, so that the rest costs nothing."""

    async def main():
        async with Streams(stream_of(CHAT_EVENTS[:4], False) + b": WAIT") as server:
            pool, books, arrived = RateLimitedClientPool(), Books(), asyncio.Event()
            client = pool.client(f"vllm:m@{server.root}/v1")
            asking = asyncio.create_task(
                pool.ask(client, request(), books, on_piece=lambda _: arrived.set())
            )
            await arrived.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.left.wait()
            await pool.close()
            return books.kinds

    assert run(main()) == ["forfeit"]


# --- the form of events ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: a\n\ndata:b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"event: x\nid: 1\ndata: a\ndata: b\n: c\n\n", [b"a\nb"]),
        (b": ping\n\n: ping\n\n", []),
        (b"data: a\n\ndata: b", [b"a", b"b"]),
        (b"data:  a\n\n", [b" a"]),
        (b"\n\n\n", []),
        (b"data:\n\ndata: \n\n", []),
    ],
)
def test_events_are_split_wherever_they_are_cut(data, events, size):
    stream = ServerSentEventParser(100)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [
        event for piece in pieces for event in stream.feed(piece)
    ] + stream.flush_last_event() == events


def test_endless_event_is_refused():
    stream = ServerSentEventParser(100)
    stream.feed(b"data: " + b"x" * 50)
    with pytest.raises(MalformedResponse, match="longer than 100 bytes"):
        stream.feed(b"x" * 50)


def test_tools_are_sent_beside_the_stream():
    async def main():
        async with Streams(CHAT) as server:
            pool = RateLimitedClientPool()
            client = pool.client(f"vllm:m@{server.root}/v1")
            tool = Tool("look", "looks", {"type": "object"})
            await client.complete(Request((Message("user", "hi"),), tools=(tool,)))
            await pool.close()
            return server.asked[0]

    sent = run(main())
    assert (sent["stream"], sent["tools"][0]["function"]["name"]) == (True, "look")
