"""The three APIs of one model, with the clients that their makers publish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from ramify.errors import RateLimited
from ramify.types.message import Message, ToolCall
from tests.serve.scripted_model import CALL, KEY, ScriptedModel, serving

HI: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"line": {"type": "integer"}}}
TOOL = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
CHAT_TOOLS: Any = [{"type": "function", "function": {**TOOL, "strict": True}}]
RESPONSE_TOOLS: Any = [{"type": "function", **TOOL}]
CLAUDE_TOOLS: Any = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
ARGUMENTS = '{"line": 1, "b": "\u00fc"}'


@asynccontextmanager
async def chat(model: ScriptedModel, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def claude(model: ScriptedModel, key: str = KEY) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serving(model) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


# --- chat completions


def test_chat_completion_has_n_choices_with_logprobs_and_ids() -> None:
    async def test() -> None:
        model = ScriptedModel("a{index}")
        async with chat(model) as client:
            found = await client.chat.completions.create(
                model="any",
                messages=HI,
                n=3,
                logprobs=True,
                top_logprobs=2,
                extra_body={"return_token_ids": True},
            )
        assert [each.message.content for each in found.choices] == ["a0", "a1", "a2"]
        assert [each.index for each in found.choices] == [0, 1, 2]
        content = found.choices[1].logprobs.content  # type: ignore[union-attr]
        assert content is not None
        assert [(each.token, each.logprob) for each in content] == [("a", -0.5), ("1", -0.5)]
        assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
            ("a", -0.5),
            ("b", -1.5),
        ]
        assert found.choices[2].model_extra == {"token_ids": [97, 50]}
        assert found.model_extra == {"prompt_token_ids": [1, 2, 3]}
        assert found.usage is not None
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (2, 6)

    run(test)


def test_streamed_choices_arrive_side_by_side() -> None:
    async def test() -> None:
        async with chat(ScriptedModel("<think>\nn{index}\n</think>\n\nsay {index}")) as client:
            texts, thoughts, finishes = ["", ""], ["", ""], {}
            stream = await client.chat.completions.create(
                model="any",
                messages=HI,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for part in stream:
                for choice in part.choices:
                    extra = choice.delta.model_extra or {}
                    texts[choice.index] += choice.delta.content or ""
                    thoughts[choice.index] += extra.get("reasoning_content", "")
                    if choice.finish_reason:
                        finishes[choice.index] = choice.finish_reason
                last = part
        assert texts == ["say 0", "say 1"]
        assert thoughts == ["n0", "n1"]
        assert finishes == {0: "stop", 1: "stop"}
        assert last.usage is not None
        assert last.usage.completion_tokens == 2 * len("<think>\nn0\n</think>\n\nsay 0")

    run(test)


@pytest.mark.parametrize("streams", [False, True])
def test_chat_tool_call_and_its_result_come_back_as_the_model_wrote_them(streams: bool) -> None:
    async def test() -> None:
        model = ScriptedModel(f"Looking.\n{CALL}\n{CALL}", "done")
        async with chat(model) as client:
            given: Any = {"model": "any", "messages": HI, "tools": CHAT_TOOLS}
            if streams:
                async with client.chat.completions.stream(**given) as stream:
                    choice = (await stream.get_final_completion()).choices[0]
            else:
                choice = (await client.chat.completions.create(**given)).choices[0]
            calls = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Looking."
            assert calls is not None
            assert len({call.id for call in calls}) == 2
            assert [call.function.arguments for call in calls] == [ARGUMENTS] * 2  # type: ignore[union-attr]
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": f"red {index}"}
                for index, call in enumerate(calls)
            ]
            reply = {
                "role": "assistant",
                "content": choice.message.content,
                "tool_calls": [
                    {"id": call.id, "type": "function", "function": call.function.model_dump()}  # type: ignore[union-attr]
                    for call in calls
                ],
            }
            await client.chat.completions.create(
                model="any", messages=[*HI, reply, *results], tools=CHAT_TOOLS
            )
        assert model.requests[1].messages == (
            Message("user", "hi"),
            Message(
                "assistant",
                "Looking.",
                None,
                (ToolCall("call_0", "look", ARGUMENTS), ToolCall("call_1", "look", ARGUMENTS)),
            ),
            Message("tool", "red 0", tool_call_id="call_0"),
            Message("tool", "red 1", tool_call_id="call_1"),
        )

    run(test)


@pytest.mark.parametrize(
    ("choice", "says", "problem"),
    [
        ("auto", CALL, ""),
        ("auto", "no", ""),
        ("none", "no", ""),
        ("none", CALL, "forbids tool calls"),
        ("required", CALL, ""),
        ("required", "no", "did not call a tool"),
        ({"type": "function", "function": {"name": "look"}}, CALL, ""),
        ({"type": "function", "function": {"name": "look"}}, "no", "did not call look"),
        ({"type": "function", "function": {"name": "find"}}, CALL, "not one of the tools"),
        ("sometimes", CALL, "is not supported"),
    ],
)
def test_tool_choice_is_checked(choice: Any, says: str, problem: str) -> None:
    async def test() -> None:
        async with chat(ScriptedModel(says)) as client:
            given: Any = {"model": "any", "messages": HI, "tools": CHAT_TOOLS}
            if not problem:
                await client.chat.completions.create(**given, tool_choice=choice)
                return
            with pytest.raises(openai.BadRequestError, match=problem) as caught:
                await client.chat.completions.create(**given, tool_choice=choice)
            if caught.value.code == "tool_use_failed":
                content = "" if says == CALL else says
                assert caught.value.body["failed_generation"] == content  # type: ignore[index]
            with pytest.raises(openai.APIError, match=problem):
                async with client.chat.completions.stream(**given, tool_choice=choice) as stream:
                    await stream.get_final_completion()

    run(test)


def test_parallel_calls_can_be_switched_off() -> None:
    async def test() -> None:
        async with chat(ScriptedModel(f"{CALL}\n{CALL}")) as client:
            with pytest.raises(openai.BadRequestError, match="called 2 tools"):
                await client.chat.completions.create(
                    model="any", messages=HI, tools=CHAT_TOOLS, parallel_tool_calls=False
                )
        named = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
        async with claude(ScriptedModel(f"{CALL}\n{CALL}")) as other:
            with pytest.raises(anthropic.BadRequestError, match="called 2 tools"):
                await other.messages.create(
                    model="any",
                    messages=HI,
                    max_tokens=900,
                    tools=CLAUDE_TOOLS,
                    tool_choice=named,  # type: ignore[arg-type]
                )

    run(test)


# --- responses


@pytest.mark.parametrize("streams", [False, True])
def test_response_items_come_back_as_one_message(streams: bool) -> None:
    async def test() -> None:
        model = ScriptedModel(f"<think>\nhm\n</think>\n\nLooking.\n{CALL}", "done")
        async with chat(model) as client:
            given: Any = {"model": "any", "input": "hi", "tools": RESPONSE_TOOLS, "store": False}
            kinds = []
            if streams:
                async with client.responses.stream(**given) as stream:
                    async for event in stream:
                        kinds.append(event.type)
                    found: Any = await stream.get_final_response()
            else:
                found = await client.responses.create(**given)
            assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
            assert found.output_text == "Looking."
            call = found.output[2]
            assert (call.name, call.arguments) == ("look", ARGUMENTS)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "red"}
            items = [item.model_dump(exclude_unset=True) for item in found.output]
            for item in items:  # added by the client's parser
                item.pop("parsed_arguments", None)
            await client.responses.create(
                model="any",
                input=[*HI, *items, result],
                tools=RESPONSE_TOOLS,
                instructions="Be brief.",
            )
        if streams:
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            assert kinds.count("response.output_item.added") == 3
            assert kinds.count("response.output_item.done") == 3
            assert "response.reasoning_text.done" in kinds
        call_ = ToolCall("call_0", "look", ARGUMENTS)
        assert model.requests[1].messages == (
            Message("system", "Be brief."),
            Message("user", "hi"),
            Message("assistant", "Looking.", "hm", (call_,)),
            Message("tool", "red", tool_call_id="call_0"),
        )

    run(test)


def test_response_has_logprobs_if_included() -> None:
    async def test() -> None:
        async with chat(ScriptedModel("ab")) as client:
            given: Any = {"model": "any", "input": "hi", "top_logprobs": 1}
            found = await client.responses.create(**given, include=["message.output_text.logprobs"])
            part: Any = found.output[0].content[0]  # type: ignore[union-attr]
            assert [(each.token, each.logprob) for each in part.logprobs] == [
                ("a", -0.5),
                ("b", -0.5),
            ]
            assert part.logprobs[0].top_logprobs[0].token == "a"
            assert found.usage is not None
            assert found.usage.input_tokens_details.cached_tokens == 2

    run(test)


def test_previous_response_is_continued() -> None:
    async def test() -> None:
        model = ScriptedModel("one", "two", "three")
        async with chat(model) as client:
            first = await client.responses.create(model="any", input="a", instructions="Sing.")
            second = await client.responses.create(
                model="any", input="b", previous_response_id=first.id
            )
            assert (await client.responses.retrieve(second.id)).output_text == "two"
            unstored = await client.responses.create(
                model="any", input="c", previous_response_id=second.id, store=False
            )
            with pytest.raises(openai.BadRequestError, match="no response has the id") as caught:
                await client.responses.create(
                    model="any", input="d", previous_response_id=unstored.id
                )
            assert caught.value.code == "previous_response_not_found"
            await client.responses.delete(second.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(second.id)
        assert [each.content for each in model.requests[0].messages] == ["Sing.", "a"]
        assert [each.content for each in model.requests[1].messages] == ["a", "one", "b"]
        said = [each.content for each in model.requests[2].messages]
        assert said == ["a", "one", "b", "two", "c"]

    run(test)


def test_cut_response_is_incomplete() -> None:
    async def test() -> None:
        async with chat(ScriptedModel("abcdef")) as client:
            found = await client.responses.create(model="any", input="hi", max_output_tokens=3)
            assert found.status == "incomplete"
            assert found.incomplete_details is not None
            assert found.incomplete_details.reason == "max_output_tokens"
            async with client.responses.stream(
                model="any", input="hi", max_output_tokens=3
            ) as stream:
                kinds = [event.type async for event in stream]
            assert kinds[-1] == "response.incomplete"

    run(test)


# --- messages


@pytest.mark.parametrize("streams", [False, True])
def test_message_blocks_come_back_as_one_message(streams: bool) -> None:
    async def test() -> None:
        model = ScriptedModel(f"<think>\nhm\n</think>\n\nLooking.\n{CALL}", "done")
        async with claude(model) as client:
            given: Any = {"model": "any", "max_tokens": 900, "tools": CLAUDE_TOOLS}
            given["system"] = [{"type": "text", "text": "A."}, {"type": "text", "text": "B."}]
            if streams:
                async with client.messages.stream(**given, messages=HI) as stream:
                    found: Any = await stream.get_final_message()
            else:
                found = await client.messages.create(**given, messages=HI)
            assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
            assert found.stop_reason == "tool_use"
            assert found.content[2].input == json.loads(ARGUMENTS)
            assert (found.usage.input_tokens, found.usage.cache_read_input_tokens) == (6, 2)
            result = {
                "type": "tool_result",
                "tool_use_id": found.content[2].id,
                "content": [{"type": "text", "text": "red"}],
            }
            blocks = [block.model_dump(exclude_unset=True) for block in found.content]
            reply = {"role": "assistant", "content": blocks}
            more = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
            await client.messages.create(**given, messages=[*HI, reply, more])
        assert model.requests[1].messages == (
            Message("system", "A.\n\nB."),
            Message("user", "hi"),
            Message("assistant", "Looking.", "hm", (ToolCall("call_0", "look", ARGUMENTS),)),
            Message("tool", "red", tool_call_id="call_0"),
            Message("user", "And?"),
        )

    run(test)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "stop", "reason"),
    [
        (900, None, ("end_turn", None, "one; two")),
        (3, None, ("max_tokens", None, "one")),
        (900, ["!", "; "], ("stop_sequence", "; ", "one")),
    ],
)
def test_message_names_its_stop_reason(
    max_tokens: int, stop: Any, reason: tuple[str, str | None, str], streams: bool
) -> None:
    async def test() -> None:
        async with claude(ScriptedModel("one; two")) as client:
            given: Any = {"model": "any", "max_tokens": max_tokens, "messages": HI}
            if stop:
                given["stop_sequences"] = stop
            if streams:
                async with client.messages.stream(**given) as stream:
                    found: Any = await stream.get_final_message()
            else:
                found = await client.messages.create(**given)
            text = found.content[0].text
            assert (found.stop_reason, found.stop_sequence, text) == reason

    run(test)


EMPTY_THOUGHT = "<think>\n\n</think>\n\nyes"


@pytest.mark.parametrize("streams", [False, True])
def test_empty_thinking_stays_thinking(streams: bool) -> None:
    """Otherwise the reply that comes back would differ from the one that was sampled."""

    async def test() -> None:
        model = ScriptedModel(EMPTY_THOUGHT)
        async with chat(model) as client:
            given: Any = {"model": "any", "messages": HI, "stream": streams}
            found: Any = await client.chat.completions.create(**given)
            if streams:
                deltas = [each.choices[0].delta.model_extra async for each in found]
                assert {"reasoning_content": ""} in deltas
            else:
                assert found.choices[0].message.model_extra == {"reasoning_content": ""}
            if streams:
                async with client.responses.stream(model="any", input="hi") as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(model="any", input="hi")
            assert [item.type for item in response.output] == ["reasoning", "message"]
        async with claude(model) as other:
            if streams:
                async with other.messages.stream(model="any", max_tokens=99, messages=HI) as blocks:
                    message: Any = await blocks.get_final_message()
            else:
                message = await other.messages.create(model="any", max_tokens=99, messages=HI)
            assert [block.type for block in message.content] == ["thinking", "text"]

    run(test)


def test_tokens_of_a_message_are_counted() -> None:
    async def test() -> None:
        async with claude(ScriptedModel("x")) as client:
            counted = await client.messages.count_tokens(model="any", system="abc", messages=HI)
            assert counted.input_tokens == 5
            listed = await client.models.list()
            assert [each.id for each in listed.data] == ["scripted"]

    run(test)


# --- errors


def test_prompt_beyond_the_window_is_the_error_of_each_api() -> None:
    async def test() -> None:
        long: Any = [{"role": "user", "content": "x" * 2000}]
        async with chat(ScriptedModel("x")) as client:
            for asked in (
                client.chat.completions.create(model="any", messages=long),
                client.responses.create(model="any", input=long),
            ):
                with pytest.raises(openai.BadRequestError) as caught:
                    await asked
                assert caught.value.code == "context_length_exceeded"
        async with claude(ScriptedModel("x")) as other:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as refused:
                await other.messages.create(model="any", max_tokens=9, messages=long)
            error: Any = refused.value.body
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")

    run(test)


def test_wrong_key_busy_model_and_unknown_path() -> None:
    async def test() -> None:
        async with chat(ScriptedModel("x"), key="rk-wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="any", messages=HI)
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model="any", input="hi")
        async with claude(ScriptedModel("x"), key="rk-wrong") as other:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await other.messages.create(model="any", max_tokens=9, messages=HI)
            assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        async with chat(ScriptedModel(RateLimited("busy", 3.0))) as client:
            with pytest.raises(openai.RateLimitError, match="busy") as limited:
                await client.chat.completions.create(model="any", messages=HI)
            assert limited.value.response.headers["retry-after"] == "3"
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="any", input="x")
        async with claude(ScriptedModel(RateLimited("busy"))) as other:
            with pytest.raises(anthropic.RateLimitError, match="busy"):
                await other.messages.create(model="any", max_tokens=9, messages=HI)
            with pytest.raises(anthropic.NotFoundError) as missing:
                await other.models.retrieve("any")
            assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]

    run(test)


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("chat/completions", {"messages": HI, "logit_bias": {"5": 1}}, "logit_bias="),
        ("chat/completions", {"messages": HI, "n": 200}, "n=200"),
        ("chat/completions", {"messages": HI, "top_logprobs": 2}, "needs logprobs"),
        ("chat/completions", {"messages": HI, "response_format": {"type": "x"}}, "response_format"),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 21}, "from 0 to"),
        ("responses", {"input": "hi", "truncation": "auto"}, "truncation='auto'"),
        ("responses", {"input": "hi", "background": True}, "background=True"),
        ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "'web_search'"),
        ("responses", {"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ("responses", {"input": []}, "input is empty"),
        ("messages", {"messages": HI}, "max_tokens is missing"),
        ("messages", {"messages": [*HI, {"role": "assistant", "content": "I"}]}, "last message"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ("messages", {"messages": HI, "tools": [{"type": "bash_x", "name": "b"}]}, "'bash_x'"),
        ("messages", {"messages": HI, "container": "c"}, "container='c'"),
        ("messages", {"messages": 5}, "not a request for a message"),
    ],
)
def test_unsupported_field_is_refused_by_name(path: str, fields: Any, says: str) -> None:
    async def test() -> None:
        async with chat(ScriptedModel("x")) as client:
            body = fields
            if path == "messages" and "missing" not in says:
                body = {"max_tokens": 9, **fields}
            with pytest.raises(openai.BadRequestError, match=says):
                await client.post(f"/{path}", body=body, cast_to=object)

    run(test)


def test_likeliest_tokens_that_a_model_does_not_report_are_refused() -> None:
    async def test() -> None:
        async with chat(ScriptedModel("x", reports_top=False)) as client:
            with pytest.raises(openai.BadRequestError, match="reports only the sampled tokens"):
                await client.chat.completions.create(
                    model="any", messages=HI, logprobs=True, top_logprobs=1
                )

    run(test)
