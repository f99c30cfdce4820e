"""Invalid requests get a 400 in OpenAI's format that names the field; other client errors get their
own 4xx status."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from typing import Any

import pytest

from tests.serve.serving import PRICE, file, serving, session, session_of, user

ASKED = [user("x")]
NESTED: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}}
BACK: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": r"(a)\1"}}}
HUGE: Any = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"enum": [*range(5000)]}},
}
TOOL: Any = {"type": "function", "function": {"name": "f"}}
WRONG_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}
OTHER = {"type": "function", "function": {"name": "g"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}

CHAT = [
    ({}, "messages", "missing required field"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "x"}, "messages", "Expected `array`, got `str`"),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role",
        "Invalid enum value 'robot'",
    ),
    (
        {"messages": [{"role": "usr", "content": "x"}]},
        "messages[0].role",
        "did you mean 'user'? known: assistant, developer",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got `int`"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", "no user message"),
    ({"messages": [user(" ")]}, "messages[0]", "empty"),
    ({"messages": [user("x", PICTURE)]}, "messages[0].content[1].type", "image_url"),
    (
        {"messages": [user("x", file("a.png", b"\x89PNG\r\n"))]},
        "messages[0].content[1].file.file_data",
        "is a picture: give its text",
    ),
    (
        {"messages": [user("x", file("a.parquet", b"PAR1"))]},
        "messages[0].content[1].file.file_data",
        "is a Parquet file, which only sql reads: send its rows as CSV or JSONL",
    ),
    (
        {"messages": [user("x", file("a.db", b"SQLite format 3\0"))]},
        "messages[0].content[1].file.file_data",
        "is an SQLite database, which only sql reads: send its rows as CSV or JSONL",
    ),
    (
        {"messages": [user("x", file("a", b"", head=""))]},
        "messages[0].content[1].file.file_data",
        "content of the file is missing",
    ),
    (
        {"messages": [user("x", {"type": "file", "file": {"file_data": "%"}})]},
        "messages[0].content[1].file.file_data",
        "64",
    ),
    (
        {"messages": [user("x", {"type": "file", "file": {"file_id": "f-1"}})]},
        "messages[0].content[1].file.file_data",
        "stores",
    ),
    ({"messages": ASKED, "n": 2}, "n", "n=2 is not supported"),
    ({"messages": ASKED, "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    (
        {"messages": ASKED, "tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "missing required",
    ),
    ({"messages": ASKED, "tools": [TOOL, TOOL]}, "tools", "a unique name"),
    ({"messages": ASKED, "tools": [WRONG_TOOL]}, "tools", "not valid"),
    (
        {"messages": ASKED, "tools": [TOOL], "tool_choice": "some"},
        "tool_choice",
        "'some' is not supported",
    ),
    ({"messages": ASKED, "tools": [TOOL], "tool_choice": OTHER}, "tool_choice", "unknown tool 'g'"),
    ({"messages": ASKED, "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"messages": ASKED, "functions": [{"name": "f"}]}, "functions", "not supported"),
    (
        {"messages": ASKED, "tools": [TOOL], "ramify": {"cite": True}},
        "ramify.cite",
        "cannot have citations",
    ),
    ({"messages": ASKED, "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"messages": ASKED, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"messages": ASKED, "temperature": 3}, "temperature", "from 0 to 2"),
    ({"messages": ASKED, "temperature": "warm"}, "temperature", "got `str`"),
    ({"messages": ASKED, "top_p": 0}, "top_p", "above 0"),
    ({"messages": ASKED, "response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    (
        {"messages": ASKED, "response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
        "schema is missing",
    ),
    (
        {"messages": ASKED, "response_format": NESTED},
        "response_format.json_schema.schema",
        "not valid",
    ),
    (
        {"messages": ASKED, "response_format": BACK},
        "response_format.json_schema.schema",
        "RE2 says 'invalid escape sequence: \\\\1': it has no backreferences",
    ),
    (
        {"messages": ASKED, "response_format": HUGE},
        "response_format.json_schema.schema",
        "give at most 5,000",
    ),
    ({"messages": ASKED, "ramify": {"limit": {}}}, "ramify.limit", "unknown field"),
    (
        {"messages": ASKED, "ramify": {"limits": {"max_cots": 1}}},
        "ramify.limits.max_cots",
        "unknown field `max_cots` (ramify.limits): did you mean 'max_cost'? known: max_calls, ",
    ),
    (
        {"messages": ASKED, "ramify": {"limits": {"max_calls": 1001}}},
        "ramify.limits.max_calls",
        "above the server's limit of 1000",
    ),
    (
        {"messages": ASKED, "ramify": {"limits": {"max_cost": 6}}},
        "ramify.limits.max_cost",
        "above the server's limit of 5",
    ),
    (
        {"messages": ASKED, "ramify": {"limits": {"max_turns": 0}}},
        "ramify.limits.max_turns",
        "allows nothing",
    ),
    (
        {"messages": ASKED, "ramify": {"depth": 2}},
        "ramify.limits.max_depth",
        "above the server's limit of 1",
    ),
    (
        {"messages": ASKED, "ramify": {"depth": 0, "limits": {"max_depth": 0}}},
        "ramify.depth",
        "give only one",
    ),
    ({"messages": ASKED, "ramify": {"cite": True}}, "ramify.cite", "context to cite"),
]
RESPONSES = [
    ({}, "input", "missing required field"),
    ({"input": []}, "input", "input is empty"),
    ({"input": [{"content": "x"}]}, "input[0].role", "no role"),
    ({"input": [{"type": "item_reference"}]}, "input[0].type", "item_reference"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "remove it"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": 3}}},
        "text.format.schema",
        "schema is missing",
    ),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_file", "file_url": "http://x/y"}]}
            ]
        },
        "input[0].content[0].file_data",
        "downloads none",
    ),
]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [("/chat/completions", CHAT), ("/responses", RESPONSES)],
    ids=["chat", "responses"],
)
def test_invalid_field_is_named_in_400_error(
    path: str, wrong: list[tuple[dict[str, Any], str, str]]
) -> None:
    async def test() -> None:
        async with serving(session(), price=PRICE) as server, session_of(server) as http:
            for body, param, says in wrong:
                async with http.post(f"{server.url}{path}", json={"model": "m", **body}) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["type"], error["param"]) == (
                        400,
                        "invalid_request_error",
                        param,
                    ), error
                    assert says in error["message"]
                    assert set(error) == {"message", "type", "code", "param"}
            assert server.num_runs == 0

    asyncio.run(test())


def test_invalid_bodies_get_4xx_errors() -> None:
    async def test() -> None:
        packed = base64.b64encode(gzip.compress(b" " * 40_000)).decode()
        bomb = {
            "messages": [
                user("x", {"type": "file", "file": {"filename": "a.gz", "file_data": packed}})
            ]
        }
        cases = [
            (b"{", {}, 400, "not valid JSON"),
            (b"[]", {}, 400, "Expected `object`"),
            (b'{"messages": [{"role": "user", "content": "\xff"}]}', {}, 400, "not valid JSON"),
            (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
            (b"x" * 5000, {}, 413, "the body has 5000 bytes or more, but the maximum is 4000"),
            (json.dumps(bomb).encode(), {}, 400, "is over the limit of 32,000 bytes"),
        ]
        async with (
            serving(session(), max_body_bytes=4000) as server,
            session_of(server) as http,
        ):
            for body, headers, status, says in cases:
                headers = {"Content-Type": "application/json", **headers}
                async with http.post(
                    f"{server.url}/chat/completions", data=body, headers=headers
                ) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["type"]) == (status, "invalid_request_error"), (
                        error
                    )
                    assert says in error["message"]
            async with http.get(f"{server.url}/chat/completions") as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (405, None)

    asyncio.run(test())
