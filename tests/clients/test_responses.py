"""OpenAI's responses API over a loopback server: bodies, replies, and every way to be incomplete."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.clients.base import Request, Sampling, Tool
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import MalformedResponse, ModelError, ServerStatusError
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.clients.helpers import Books, Says, request, run

TEXT = {"type": "message", "content": [{"type": "output_text", "text": "hello"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
USAGE = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}


def body(*output: Any, status: Any = "completed", **more: Any) -> dict[str, Any]:
    return {"status": status, "output": list(output), "usage": USAGE, "model": "m-1", **more}


def asked(answer: Any, given: Request) -> tuple[Reply | ModelError, dict[str, Any], str]:
    """Return the reply or error, the body that was sent, and its path."""

    async def main() -> tuple[Reply | ModelError, dict[str, Any], str]:
        async with Says(lambda _: (200, msgspec.json.encode(answer), {})) as server:
            pool = RateLimitedClientPool(max_attempts=1, keys={"openai": "key-0123456789"})
            client = pool.client(f"openai:m@{server.root}/v1/responses")
            try:
                outcome: Reply | ModelError = await pool.ask(client, given, Books())
            except ModelError as error:
                outcome = error
            await pool.close()
            return outcome, msgspec.json.decode(server.asked[0].body), server.asked[0].path

    return run(main())


def test_request_with_tools_and_its_reply() -> None:
    messages = (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a", tool_calls=(ToolCall("c1", "f", "{}"),)),
        Message("tool", "t", tool_call_id="c1"),
    )
    schema = {"type": "integer"}
    tools = (Tool("f", "does", {"type": "object"}),)
    sampling = Sampling(64, 0.5, extra={"reasoning": {"effort": "low"}})
    reply, sent, path = asked(body(TEXT, CALL), Request(messages, sampling, schema, tools))
    assert path == "/v1/responses"
    assert sent == {
        "model": "m",
        "input": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "t"},
        ],
        "max_output_tokens": 64,
        "store": False,
        "stream": True,
        "temperature": 0.5,
        "text": {
            "format": {"type": "json_schema", "name": "answer", "strict": True, "schema": schema}
        },
        "tools": [
            {
                "type": "function",
                "strict": False,
                "name": "f",
                "description": "does",
                "parameters": {"type": "object"},
            }
        ],
        "reasoning": {"effort": "low"},
    }
    assert isinstance(reply, Reply)
    assert reply.message == Message("assistant", "hello", tool_calls=(ToolCall("c1", "f", "{}"),))
    assert (reply.finish, reply.usage) == ("tool_calls", Usage(5, 2, 3, calls=1))


REFUSAL = {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("answer", "finish", "stopped_by"),
    [
        (body(THOUGHT, TEXT), "stop", ""),
        (
            body(TEXT, status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
            "length",
            "",
        ),
        (
            body(TEXT, status="incomplete", incomplete_details={"reason": "content_filter"}),
            "content_filter",
            "content_filter",
        ),
        (body(REFUSAL), "content_filter", "refusal"),
    ],
)
def test_reply_status_maps_to_finish_reason(answer: Any, finish: str, stopped_by: str) -> None:
    reply, *_ = asked(answer, request())
    assert isinstance(reply, Reply)
    assert (reply.finish, reply.filter) == (finish, stopped_by)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (
            body(TEXT, status="in_progress"),
            MalformedResponse,
            "status 'in_progress' : it may be incomplete",
        ),
        (body(TEXT, status=None), MalformedResponse, "status None"),
        (body({**TEXT, "status": "incomplete"}), MalformedResponse, "it may be incomplete"),
        (body(), MalformedResponse, "is it a responses endpoint?"),
        (body({"type": "message", "content": "x"}), MalformedResponse, "not a list of parts"),
        (body(TEXT, status="failed"), ServerStatusError, "status 'failed'"),
        ({"error": {"message": "fell over", "code": 502}}, ServerStatusError, "502: fell over"),
        ([], MalformedResponse, "not a response"),
    ],
)
def test_bad_response_raises_matching_error(
    answer: Any, error: type[ModelError], says: str
) -> None:
    outcome, *_ = asked(answer, request())
    assert type(outcome) is error
    assert says in str(outcome)
