"""Tools of the caller: a run requests tool calls, the caller makes them, and its next request is
answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import agents
import pytest

from ramify import ScriptedClient
from tests.serve.serving import LONG, asking, cell, serving, session, user

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CLOCK = {"name": "get_time"}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {**each, "strict": True}} for each in (WEATHER, CLOCK)
]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": True, **each} for each in (WEATHER, CLOCK)]


def calls(*wanted: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(
        {"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in wanted]}
    )


PARIS = calls(("get_weather", {"city": "Paris"}))


def tool_calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]


def test_tool_call_is_requested_and_its_result_used() -> None:
    async def test() -> None:
        model = ScriptedClient(
            lambda messages: "Rain." if "17 degrees" in messages[-1].content else PARIS
        )
        async with serving(model) as server, asking(server) as client:
            said: list[Any] = [user("What is the weather in Paris?")]
            first = await client.chat.completions.create(model="m", messages=said, tools=CHAT_TOOLS)
            (choice,) = first.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert tool_calls_of(choice.message) == [("get_weather", {"city": "Paris"})]
            (call,) = choice.message.tool_calls or ()
            said += [
                choice.message,
                {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"},
            ]
            second = await client.chat.completions.create(
                model="m", messages=said, tools=CHAT_TOOLS
            )
            assert (second.choices[0].message.content, second.choices[0].finish_reason) == (
                "Rain.",
                "stop",
            )
            prompt = model.requests[1].messages[-1].content
            assert 'assistant: (called get_weather({"city":"Paris"}))' in prompt
            assert "tool: (result of get_weather)\n17 degrees" in prompt
            assert model.requests[0].schema is None  # no provider can enforce it

    asyncio.run(test())


def test_session_may_end_with_tool_calls_or_text() -> None:
    async def test() -> None:
        wanted = calls(("get_weather", {"city": "Rome"}), ("get_time", {}))
        async with (
            serving(session(cell("n = len(context)"), cell(f"FINAL({wanted})"))) as server,
            asking(server) as client,
        ):
            reply = await client.chat.completions.create(
                model="m", messages=[user(LONG, "And?")], tools=CHAT_TOOLS
            )
            assert tool_calls_of(reply.choices[0].message) == [
                ("get_weather", {"city": "Rome"}),
                ("get_time", {}),
            ]
        async with (
            serving(session(cell("FINAL(len(context))"))) as server,
            asking(server) as client,
        ):
            reply = await client.chat.completions.create(
                model="m", messages=[user(LONG, "n?")], tools=CHAT_TOOLS
            )
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
                str(len(LONG)),
                "stop",
            )

    asyncio.run(test())


def test_tool_calls_are_streamed() -> None:
    async def test() -> None:
        async with serving(session(direct=lambda _: PARIS)) as server, asking(server) as client:
            async with client.chat.completions.stream(
                model="m", messages=[user("?")], tools=CHAT_TOOLS
            ) as stream:
                reply = await stream.get_final_completion()
            assert reply.choices[0].finish_reason == "tool_calls"
            assert tool_calls_of(reply.choices[0].message) == [("get_weather", {"city": "Paris"})]
            async with client.responses.stream(
                model="m", input="?", tools=RESPONSE_TOOLS
            ) as events:
                kinds = [event.type async for event in events]
                response = await events.get_final_response()
            assert "response.function_call_arguments.delta" in kinds
            (item,) = [each for each in response.output if each.type == "function_call"]
            assert (item.name, json.loads(item.arguments), response.status) == (
                "get_weather",
                {"city": "Paris"},
                "completed",
            )

    asyncio.run(test())


def test_invalid_arguments_are_retried_and_tool_choice_is_enforced() -> None:
    async def test() -> None:
        replies = iter(
            [calls(("get_weather", {"town": "Paris"})), calls(("get_waether", {})), PARIS]
        )
        async with serving(lambda _: next(replies)) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m", messages=[user("?")], tools=CHAT_TOOLS
            )
            assert tool_calls_of(reply.choices[0].message) == [("get_weather", {"city": "Paris"})]
        two = calls(("get_time", {}), ("get_time", {}))
        replies = iter(["Just text.", two, calls(("get_time", {}))])
        async with serving(lambda _: next(replies)) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m",
                messages=[user("?")],
                tools=CHAT_TOOLS,
                parallel_tool_calls=False,
                tool_choice={"type": "function", "function": {"name": "get_time"}},
            )
            assert tool_calls_of(reply.choices[0].message) == [("get_time", {})]
        model = ScriptedClient(session())
        async with serving(model) as server, asking(server) as client:
            await client.chat.completions.create(
                model="m", messages=[user("?")], tools=CHAT_TOOLS, tool_choice="none"
            )
            assert model.requests[0].messages[-1].content == "?"

    asyncio.run(test())


def test_tools_combine_with_response_format() -> None:
    async def test() -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        replies = iter(["no number", '{"n": 3}', PARIS])
        async with serving(lambda _: next(replies)) as server, asking(server) as client:
            given: Any = {
                "model": "m",
                "messages": [user("?")],
                "tools": CHAT_TOOLS,
                "response_format": wanted,
            }
            value = await client.chat.completions.create(**given)
            assert value.choices[0].message.content == '{"n":3}'
            call = await client.chat.completions.create(**given)
            assert call.choices[0].finish_reason == "tool_calls"

    asyncio.run(test())


@pytest.fixture
def tracing_disabled() -> Iterator[None]:
    agents.set_tracing_disabled(True)  # otherwise it uploads traces to OpenAI
    yield
    agents.set_tracing_disabled(False)


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"17 degrees in {city}"


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.usefixtures("tracing_disabled")
def test_agents_library_runs_a_tool(kind: Any) -> None:
    """OpenAI's agents library makes the call and sends its result."""

    async def test() -> None:
        def script(messages: Any) -> str:
            return "It is mild." if "17 degrees in Paris" in messages[-1].content else PARIS

        async with serving(script) as server, asking(server) as client:
            agent = agents.Agent(
                name="A", model=kind(model="any", openai_client=client), tools=[get_weather]
            )
            result = await agents.Runner.run(agent, "What is the weather in Paris?")
            assert result.final_output == "It is mild."
            assert [type(item).__name__ for item in result.new_items] == [
                "ToolCallItem",
                "ToolCallOutputItem",
                "MessageOutputItem",
            ]

    asyncio.run(test())
