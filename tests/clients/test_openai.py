"""The OpenAI-compatible client over real HTTP: its requests, the replies it reads, and the error
for each bad answer."""

import msgspec
import pytest

from ramify.clients.base import Request, Sampling, Tool
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
)
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.clients.helpers import Books, Says, request, run, says

KEY = "sk-secret-0123456789"


def sent(asked, provider="vllm", *, key=KEY):
    """Send ``asked`` and return the request that the server received."""

    async def main():
        async with ScriptedServer(["ok"]) as server:
            pool = RateLimitedClientPool(
                base_urls={provider: server.url}, keys={provider: key} if key else None
            )
            await pool.ask(pool.client(f"{provider}:org/model"), asked, Books())
            await pool.close()
            return server.requests[0]

    return run(main())


def answer(body, status=200, **headers):
    """Return the reply or error for one answer of a server."""

    async def main():
        async with says(
            body if isinstance(body, bytes) else msgspec.json.encode(body), status, **headers
        ) as server:
            pool = RateLimitedClientPool(
                max_attempts=1, base_urls={"openai": server.root + "/v1"}, keys={"openai": KEY}
            )
            try:
                return await pool.client("openai:m").complete(request())
            except ModelError as error:
                return error
            finally:
                await pool.close()

    return run(main())


def choice(message, **rest):
    return {"choices": [{"message": message, "finish_reason": "stop", **rest}], "model": "m-1"}


def test_minimal_request_body_and_headers():
    received = sent(request())
    assert received.json == {
        "model": "org/model",
        "messages": [{"role": "user", "content": "hi there"}],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (received.path, received.headers["authorization"]) == (
        "/v1/chat/completions",
        f"Bearer {KEY}",
    )
    assert (received.headers["content-type"], received.headers["user-agent"]) == (
        "application/json",
        "ramify",
    )


def test_request_with_every_option():
    closed = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    call = ToolCall("c1", "look", '{"at": 1}')
    asked = Request(
        messages=(
            Message("system", "be brief"),
            Message("assistant", "", reasoning="hm", tool_calls=(call,)),
            Message("tool", "seen", tool_call_id="c1"),
        ),
        sampling=Sampling(9, 0.5, 0.9, ("END",), 7, True, {"top_k": 3}),
        schema=closed,
        tools=(Tool("look", "looks", {"type": "object"}),),
        affinity="run-1",
    )
    assert sent(asked).json == {
        "model": "org/model",
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"at": 1}'},
                    }
                ],
            },
            {"role": "tool", "content": "seen", "tool_call_id": "c1"},
        ],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["END"],
        "logprobs": True,
        "return_token_ids": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": closed, "strict": True},
        },
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "description": "looks",
                    "parameters": {"type": "object"},
                },
            }
        ],
        "top_k": 3,
    }


def test_open_schema_is_not_strict():
    body = sent(request(schema={"type": "object", "properties": {"n": {"type": "integer"}}})).json
    assert body["response_format"]["json_schema"]["strict"] is False


def test_top_k_is_sent_only_to_servers_that_support_it():
    asked = Request((Message("user", "hi"),), Sampling(9, top_k=3))
    assert [sent(asked, name).json.get("top_k") for name in ("vllm", "ollama", "openai")] == [
        3,
        3,
        None,
    ]


def test_openrouter_request_includes_earlier_reasoning():
    asked = Request((Message("assistant", "a", reasoning="hm"), Message("user", "b")))
    assert sent(asked, "openrouter").json["messages"][0] == {
        "role": "assistant",
        "content": "a",
        "reasoning": "hm",
    }


def test_invalid_unicode_in_request_is_replaced():
    assert sent(request("a\udc80b")).json["messages"][0]["content"] == "a\ufffdb"


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b"a\\ud800b", "a?b"),
        (b"a\xffb", "a\N{REPLACEMENT CHARACTER}b"),
        (b"a\\ud83d\\ude00b", "a😀b"),
    ],
)
def test_invalid_unicode_in_reply_is_replaced(raw, read):
    body = msgspec.json.encode(choice({"role": "assistant", "content": "TEXT"})).replace(
        b"TEXT", raw
    )
    for start in (b"", b"\xef\xbb\xbf"):
        assert answer(start + body).message.content == read


def test_no_authorization_header_without_key():
    assert "authorization" not in sent(request(), key=None).headers


def test_reply_with_every_field_is_read():
    body = choice(
        {"content": "4", "reasoning_content": "2+2"},
        token_ids=[5, 6],
        logprobs={
            "content": [
                {"token": "4", "logprob": -0.5, "top_logprobs": []},
                {"token": "", "logprob": -0.25},
            ]
        },
    ) | {
        "prompt_token_ids": [1, 2, 3],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }
    reply = answer(body)
    assert msgspec.structs.replace(reply, seconds=0.0) == Reply(
        Message("assistant", "4", reasoning="2+2"),
        Usage(3, 2, 1, 1, 1),
        model="m-1",
        prompt_ids=(1, 2, 3),
        token_ids=(5, 6),
        logprobs=(-0.5, -0.25),
    )


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "message", "finish"),
    [
        (
            choice({"content": None, "reasoning": "hm"}),
            Message("assistant", "", reasoning="hm"),
            "stop",
        ),
        (choice({"content": "x"}, finish_reason="length"), Message("assistant", "x"), "length"),
        (choice({"content": "x"}, finish_reason="eos"), Message("assistant", "x"), "stop"),
        (
            {
                "choices": [
                    {"index": 1, "message": {"content": "second"}, "finish_reason": "length"},
                    {"index": 0, "message": {"content": "first"}, "finish_reason": "stop"},
                ]
            },
            Message("assistant", "first"),
            "stop",
        ),
        (choice({"content": "x"}) | {"error": {}}, Message("assistant", "x"), "stop"),
        (choice({"refusal": "I will not"}), Message("assistant", "I will not"), "content_filter"),
        (
            choice({"content": None, "tool_calls": [CALL]}, finish_reason="tool_calls"),
            Message("assistant", "", tool_calls=(ToolCall("c1", "f", "{}"),)),
            "tool_calls",
        ),
        (
            choice(
                {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                finish_reason="tool_calls",
            ),
            Message("assistant", "", tool_calls=(ToolCall("call_0", "f", '{"a":1}'),)),
            "tool_calls",
        ),
        (
            choice(
                {
                    "content": [
                        {"type": "thinking", "thinking": [{"text": "hm"}]},
                        {"type": "text", "text": "x"},
                    ]
                }
            ),
            Message("assistant", "x", reasoning="hm"),
            "stop",
        ),
    ],
    ids=[
        "null content",
        "length",
        "another word for the end",
        "choices out of order",
        "an empty error",
        "refusal",
        "tool call",
        "tool call as object",
        "parts",
    ],
)
def test_message_variants_are_read(body, message, finish):
    reply = answer(body)
    assert (reply.message, reply.finish) == (message, finish)


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (None, Usage()),
        ({"prompt_tokens": 5}, Usage()),
        ({"prompt_tokens": 5, "completion_tokens": 2}, Usage(5, 2, calls=1)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 17}, Usage(5, 12, calls=1)),
        (
            {"prompt_tokens": 5, "completion_tokens": 2, "prompt_cache_hit_tokens": 4},
            Usage(5, 2, 4, calls=1),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None},
            Usage(5, 2, calls=1),
        ),
    ],
    ids=["none", "half", "plain", "thinking in the total", "deepseek's cache", "null details"],
)
def test_usage_variants_are_read(usage, read):
    assert answer(choice({"content": "x"}) | {"usage": usage}).usage == read


def test_cost_reported_by_server_is_kept():
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.25}
    assert answer(choice({"content": "x"}) | {"usage": usage}).cost == 0.25


BAD = {"error": {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}}
LONG = {"error": {"message": "This model's maximum context length is 8 tokens"}}


@pytest.mark.parametrize(
    ("body", "status", "error", "says"),
    [
        (
            b"<!doctype html><p>hi",
            200,
            MalformedResponse,
            "answered application/json instead of JSON; check the base URL",
        ),
        (b"not json", 200, MalformedResponse, "that is not a chat completion"),
        (b'{"choices": "no"}', 200, MalformedResponse, "that is not a chat completion"),
        (b"{}", 200, MalformedResponse, "sent a reply without choices"),
        (
            choice({"content": "x"}, finish_reason=None),
            200,
            MalformedResponse,
            "the unknown finish reason None",
        ),
        (
            choice({"content": "x"}, finish_reason="odd"),
            200,
            MalformedResponse,
            "the unknown finish reason 'odd'",
        ),
        (
            choice({"content": "x"}, finish_reason=""),
            200,
            MalformedResponse,
            "the unknown finish reason ''",
        ),
        (
            choice({"content": "x"}, finish_reason=7),
            200,
            MalformedResponse,
            "that is not a chat completion",
        ),
        (
            {"choices": [{"message": {"content": "x"}}]},
            200,
            MalformedResponse,
            "without a finish reason",
        ),
        (b"", 200, MalformedResponse, "that is not a chat completion"),
        (
            choice({"content": "x"}) | {"error": {"message": "upstream fell over"}},
            200,
            ServerStatusError,
            "500: upstream fell over",
        ),
        (
            {"error": {"message": "upstream fell over", "code": 502}},
            200,
            ServerStatusError,
            "502: upstream fell over",
        ),
        (
            choice({"content": "x"}, token_ids=[1], logprobs={"content": []}),
            200,
            MalformedResponse,
            "1 token ids but 0 logprobs",
        ),
        (
            BAD,
            401,
            RequestRefusedError,
            "401: Incorrect API key provided: *** (invalid_api_key); check the key in "
            "OPENAI_API_KEY",
        ),
        (LONG, 400, RequestRefusedError, "shorten the prompt or name a model with a larger window"),
        (
            {"error": {"message": "You exceeded your current quota"}},
            429,
            RequestRefusedError,
            "no quota left",
        ),
        ({"error": {"message": "Slow down"}}, 429, RateLimited, "429: Slow down"),
        (
            {"error": {"message": "who are you?"}},
            401,
            RequestRefusedError,
            "check the key in OPENAI_API_KEY",
        ),
        (b"<html>", 404, RequestRefusedError, "404: a web page"),
        (
            b"<html><Title>\n502 Bad &amp; Gateway</Title><body>nginx</body></html>",
            502,
            ServerStatusError,
            '502: a web page "502 Bad & Gateway"',
        ),
        (b"<title></title><p>", 403, RequestRefusedError, "403: a web page; check the key"),
        (
            {"detail": "Not Found"},
            404,
            RequestRefusedError,
            "404: Not Found; check the base URL: most end in /v1",
        ),
        (
            b"404 page not found",
            404,
            RequestRefusedError,
            "not found; check the base URL: most end in /v1",
        ),
        (
            {"error": {"message": "The model 'm' does not exist"}},
            404,
            RequestRefusedError,
            "not exist",
        ),
        (
            b"",
            407,
            RequestRefusedError,
            "407; the proxy of the environment wants a user and password",
        ),
        ({"detail": [{"msg": "field required"}]}, 422, RequestRefusedError, "422: field required"),
        ([{"error": {"message": "bad"}}], 400, RequestRefusedError, "400: bad"),
        (b"oops", 500, ServerStatusError, "500: oops"),
        (b"", 504, ReplyLostError, "504; a gateway gave up waiting"),
    ],
)
def test_bad_response_raises_matching_error(body, status, error, says):
    got = answer(body, status)
    assert type(got) is error
    assert says in str(got)
    assert "127.0.0.1" in str(got)
    assert KEY not in str(got)
    assert "\n" not in str(got)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_deeply_nested_body_is_a_model_error(status):
    body = b'{"error": ' + b"[" * 100_000
    error = answer(body, status)
    assert isinstance(
        error, {200: MalformedResponse, 400: RequestRefusedError, 500: ServerStatusError}[status]
    )
    assert "\n" not in str(error)
    assert len(str(error)) < 600


@pytest.mark.parametrize(
    "when",
    [
        "Fri, 31 Dec 3000000000 23:59:59 GMT",
        "3000000000-12-31T23:59:59Z",
        "9999-12-31T23:59:59-23:59",
        "9" * 5000,
        "1e999",
        "nan",
        "P1D",
    ],
)
def test_impossible_retry_after_is_a_rate_limit(when):
    error = answer({"error": {"message": "slow down"}}, 429, retry_after=when)
    assert isinstance(error, RateLimited)
    assert error.retry_after_s is None or error.retry_after_s >= 0


@pytest.mark.parametrize(
    ("body", "is_paid"),
    [
        ({"error": {"message": "overloaded"}}, False),
        ({"error": {"message": "overloaded"}, "usage": {"prompt_tokens": 9}}, True),
        (choice({"content": "x"}) | {"error": {"message": "overloaded"}}, True),
        (choice({"content": "x"}) | {"error": {"message": "no", "code": 400}}, True),
        (choice({"content": "x"}, finish_reason=None), True),
    ],
)
def test_unusable_reply_is_booked_if_the_model_may_have_worked(body, is_paid):
    assert answer(body).may_be_paid is is_paid


def test_prompt_too_long_is_distinguished_from_other_refusals():
    assert (answer(LONG, 400).too_long, answer(BAD, 401).too_long) == (True, False)


def test_redirect_error_names_target():
    error = answer(b"", 301, location="https://example.org/v1")
    assert "moved to https://example.org/v1; use that as the base URL" in str(error)


@pytest.mark.parametrize(
    ("headers", "wait"),
    [({"retry_after": "2"}, 2.0), ({"retry_after_ms": "150"}, 0.15), ({}, None)],
)
def test_retry_after_headers_are_read(headers, wait):
    assert answer(b"{}", 429, **headers).retry_after_s == wait


def test_max_completion_tokens_is_sent_after_max_tokens_is_refused():
    def tell(exchange):
        if "max_tokens" in msgspec.json.decode(exchange.body):
            said = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
            return 400, msgspec.json.encode({"error": {"message": said}}), {}
        return 200, msgspec.json.encode(choice({"content": "x"})), {}

    async def main():
        async with Says(tell) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.root})
            for _ in range(2):
                await pool.ask(pool.client("openai:m"), request(), Books())
            await pool.close()
            return ["max_tokens" in msgspec.json.decode(each.body) for each in server.asked]

    assert run(main()) == [True, False, False]


def test_key_is_not_in_repr():
    async def main():
        pool = RateLimitedClientPool(keys={"openai": KEY})
        client = pool.client("openai:m")
        return repr(client) + repr(vars(client))

    assert KEY not in run(main())


def test_key_with_spaces_is_refused():
    with pytest.raises(ConfigError, match="OPENAI_API_KEY contains spaces"):
        RateLimitedClientPool(keys={"openai": "my key"}).client("openai:m")


def test_url_in_model_name_appears_once_in_error():
    async def main(name, **providers):
        async with says(b'{"detail": "no such field"}', 422) as server:
            pool = RateLimitedClientPool(
                max_attempts=1, base_urls=dict.fromkeys(providers, server.root)
            )
            try:
                with pytest.raises(RequestRefusedError) as caught:
                    await pool.client(name.format(url=server.root)).complete(request())
                return str(caught.value).replace(server.root, "URL")
            finally:
                await pool.close()

    assert run(main("vllm:m@{url}")) == "vllm:m@URL answered 422: no such field"
    assert (
        run(main("vllm:m", vllm=True))
        == "vllm:m at URL/chat/completions answered 422: no such field"
    )


def test_web_page_instead_of_api_is_refused_without_retry():
    """Not retried: a page for "not found" or "method not allowed" will not change."""
    for status in (404, 405, 501):
        error = answer(b"<html><h1>Nope</h1></html>", status, content_type="text/html")
        assert isinstance(error, RequestRefusedError)
        assert not error.transient
        assert str(error).endswith(
            f"answered {status}: a web page; check the base URL: most end in /v1"
        )
    assert isinstance(
        answer(b"<html>Bad gateway</html>", 502, content_type="text/html"), ServerStatusError
    )
