"""Claude's client against a loopback server that speaks the messages API."""

import msgspec
import pytest

from ramify.clients.base import Price, Request, Sampling, Tool
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
    Unreachable,
)
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.clients.helpers import Books, Says, request, run

KEY = "sk-ant-0123456789abcdef"
CACHE = {"type": "ephemeral"}


def message_response(content, stop="end_turn", **usage):
    usage = {"input_tokens": 5, "output_tokens": 2, **usage}
    body = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }
    return 200, msgspec.json.encode(body), {}


def text(words, **rest):
    return {"type": "text", "text": words, **rest}


def exchange(asked, *answers):
    """Send ``asked`` to a server that gives ``answers``; return the replies or errors, the bodies
    that it received, and the whole requests."""
    left = list(answers)

    async def main():
        async with Says(lambda _: left.pop(0)) as server:
            pool = RateLimitedClientPool(
                keys={"anthropic": KEY}, base_urls={"anthropic": server.root}, max_attempts=1
            )
            client, outcomes = pool.client("anthropic:claude-x"), []
            for each in asked:
                try:
                    outcomes.append(await client.complete(each))
                except ModelError as error:
                    outcomes.append(error)
            await pool.close()
            return outcomes, server.asked

    outcomes, received = run(main())
    return outcomes, [msgspec.json.decode(each.body) for each in received], received


def test_minimal_request_body_and_reply():
    (reply,), (body,), (received,) = exchange([request()], message_response([text("hello")]))
    assert body == {
        "model": "claude-x",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": [text("hi there")]}],
        "stream": True,
    }
    assert received.path == "/v1/messages"
    assert received.headers["x-api-key"] == KEY
    assert received.headers["anthropic-version"] == "2023-06-01"
    assert msgspec.structs.replace(reply, seconds=0.0) == Reply(
        Message("assistant", "hello"), Usage(5, 2, calls=1), model="claude-x"
    )


def test_cache_control_marks_system_prompt_and_last_message():
    history = (
        Message("system", "be brief"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
    )
    _, (body,), _ = exchange([Request(history)], message_response([text("d")]))
    assert body["system"] == [text("be brief", cache_control=CACHE)]
    assert body["messages"] == [
        {"role": "user", "content": [text("a")]},
        {"role": "assistant", "content": [text("b")]},
        {"role": "user", "content": [text("c", cache_control=CACHE)]},
    ]


def test_first_turn_has_cache_control_only_with_affinity():
    _, bodies, _ = exchange(
        [request(), request(affinity="run-1")],
        message_response([text("x")]),
        message_response([text("x")]),
    )
    assert ["cache_control" in body["messages"][0]["content"][0] for body in bodies] == [
        False,
        True,
    ]


def test_cache_use_is_counted_and_priced():
    (reply,), *_ = exchange(
        [request()],
        message_response([text("x")], cache_read_input_tokens=100, cache_creation_input_tokens=10),
    )
    assert reply.usage == Usage(115, 2, cached_tokens=100, calls=1, cache_write_tokens=10)
    assert Price(1.0, 1.0, 0.1, 1.25).of(reply.usage) == pytest.approx((5 + 10 + 12.5 + 2) * 1e-6)


def test_request_with_every_option():
    closed = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    asked = Request(
        (Message("user", "a"),),
        Sampling(
            9,
            0.5,
            0.9,
            ("END",),
            seed=3,
            logprobs=True,
            extra={"thinking": {"type": "disabled"}},
            top_k=3,
        ),
        schema=closed,
        tools=(Tool("look", "looks", {"type": "object"}),),
    )
    _, (body,), _ = exchange([asked], message_response([text("x")]))
    assert body == {
        "model": "claude-x",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [text("a")]}],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop_sequences": ["END"],
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": closed}},
        "tools": [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
        "stream": True,
    }


def test_thinking_and_tool_calls_round_trip():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s1"}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}

    async def main():
        left = [
            message_response([thinking, text("let me see"), use], "tool_use"),
            message_response([text("done")]),
        ]
        async with Says(lambda _: left.pop(0)) as server:
            pool = RateLimitedClientPool(
                keys={"anthropic": KEY}, base_urls={"anthropic": server.root}
            )
            client = pool.client("anthropic:claude-x")
            first = await client.complete(request("go"))
            answer = Message("tool", "seen", tool_call_id="t1")
            await client.complete(
                Request((Message("user", "go"), first.message, answer, Message("user", "and?")))
            )
            await pool.close()
            return first, msgspec.json.decode(server.asked[1].body)["messages"][1:]

    first, turns = run(main())
    assert (first.message, first.finish) == (
        Message(
            "assistant",
            "let me see",
            reasoning="hm",
            tool_calls=(ToolCall("t1", "look", '{"at":1}'),),
        ),
        "tool_calls",
    )
    assert turns == [
        {"role": "assistant", "content": [thinking, text("let me see"), use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
                text("and?", cache_control=CACHE),
            ],
        },
    ]


def test_empty_messages_are_omitted():
    asked = Request((Message("user", "a"), Message("assistant", ""), Message("user", "b")))
    _, (body,), _ = exchange([asked], message_response([text("x")]))
    assert body["messages"] == [
        {"role": "user", "content": [text("a"), text("b", cache_control=CACHE)]}
    ]


@pytest.mark.parametrize(
    ("stop", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("refusal", "content_filter"),
    ],
)
def test_stop_reason_maps_to_finish_reason(stop, finish):
    (reply,), *_ = exchange([request()], message_response([text("x")], stop))
    assert reply.finish == finish


def error_body(kind, message):
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (
            (401, error_body("authentication_error", f"bad {KEY}"), {}),
            RequestRefusedError,
            "401: bad *** (authentication_error); check the key in ANTHROPIC_API_KEY",
        ),
        (
            (400, error_body("x", "prompt is too long: 9 tokens > 8 maximum"), {}),
            RequestRefusedError,
            "shorten the prompt",
        ),
        ((429, error_body("x", "slow down"), {"retry-after": "7"}), RateLimited, "429: slow down"),
        ((529, error_body("overloaded_error", "Overloaded"), {}), RateLimited, "529: Overloaded"),
        ((500, error_body("x", "fell over"), {}), ServerStatusError, "500: fell over"),
        (
            (200, b"<html>", {"content-type": "text/html"}),
            MalformedResponse,
            "text/html instead of JSON",
        ),
        ((200, b"{}", {}), MalformedResponse, "is it a messages endpoint?"),
        (
            message_response([text("x")], None),
            MalformedResponse,
            "the unknown finish reason None: it may be incomplete",
        ),
        (
            message_response([text("x")], "x"),
            MalformedResponse,
            "the unknown finish reason 'x': it may be",
        ),
    ],
)
def test_bad_response_raises_matching_error(answer, error, says):
    (got,), *_ = exchange([request()], answer)
    assert type(got) is error
    assert says in str(got)
    assert KEY not in str(got)
    if answer[0] == 429:
        assert got.retry_after_s == 7.0


def test_schema_is_dropped_after_model_refuses_it():
    closed = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    refusal = (400, error_body("x", "output_config: not supported by this model"), {})
    (first, second), (_, body), _ = exchange(
        [request(schema=closed)] * 2, refusal, message_response([text("x")])
    )
    assert (type(first), first.transient, second.message.content, "output_config" in body) == (
        RequestRefusedError,
        True,
        "x",
        False,
    )


def test_connection_failures_raise_matching_error():
    async def main():
        async with Says(lambda each: each.drop() or (200, b"", {})) as server:
            pool = RateLimitedClientPool(
                keys={"anthropic": KEY}, base_urls={"anthropic": server.root}, max_attempts=1
            )
            client, kinds = pool.client("anthropic:claude-x"), []
            with pytest.raises(ReplyLostError, match="broke before the reply was whole"):
                await pool.ask(client, request(), Books())
        with pytest.raises(Unreachable, match="cannot reach"):
            await pool.ask(client, request(), Books())
        await pool.close()
        return kinds

    run(main())


def test_missing_key_is_reported(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="anthropic:m: no API key: set ANTHROPIC_API_KEY"):
        RateLimitedClientPool().client("anthropic:m")


@pytest.mark.parametrize(
    ("stop", "finish", "stopped_by"),
    [
        ("max_tokens", "length", ""),
        ("model_context_window_exceeded", "length", ""),
        ("refusal", "content_filter", "refusal"),
    ],
)
def test_incomplete_reply_has_its_finish_reason(stop, finish, stopped_by):
    (reply,), *_ = exchange([request()], message_response([text("half")], stop))
    assert (reply.message.content, reply.finish, reply.filter) == ("half", finish, stopped_by)


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": -5},
        {"cache_read_input_tokens": -9},
        {"output_tokens": None},
        {"input_tokens": 4.5},
    ],
    ids=str,
)
def test_impossible_usage_counts_as_unknown(usage):
    (reply,), *_ = exchange([request()], message_response([text("x")], **usage))
    assert (reply.message.content, reply.usage) == ("x", Usage())
