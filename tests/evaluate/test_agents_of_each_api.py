"""Agents with tools and reasoning, by the clients that the makers of the APIs publish: one that
sends back what it got extends one call, with the ids that were sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from ramify import RLM
from ramify.engine.external_conversations import RunModelClient
from ramify.evaluate.agent_model_server import AgentModelAccess, AgentModelServer
from ramify.tasks.base import RolloutInitialState
from tests.engine.template_client import TemplateClient

Agent = Callable[[str, str], Awaitable[None]]
"""(base URL, key) -> plays two tool calls and an answer."""
ARGUMENTS = {"path": "données/b.txt", "lines": [1, 2], "deep": True}
SCRIPT = (
    "<think>\nWhere?\n</think>\n\nLooking.\n<tool_call>\n"
    f'{{"name": "look", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>',
    '<think>\nNext.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    "<think>\nDone.\n</think>\n\nIt is red. ",
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


async def by_chat(url: str, key: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    talk: list[Any] = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Red?"}]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for _ in SCRIPT:
            reply = await client.chat.completions.create(model="m", messages=talk, tools=tools)
            message = reply.choices[0].message
            talk.append(message.model_dump())
            talk += [
                {"role": "tool", "tool_call_id": call.id, "content": "red"}
                for call in message.tool_calls or ()
            ]


async def by_responses(url: str, key: str) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    items: list[Any] = [{"role": "user", "content": "Red?"}]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for _ in SCRIPT:
            response = await client.responses.create(
                model="m", instructions="Look.", input=items, tools=tools
            )
            items += [item.model_dump() for item in response.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "red"}
                for item in response.output
                if item.type == "function_call"
            ]


async def by_messages(url: str, key: str) -> None:
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    talk: list[Any] = [{"role": "user", "content": "Red?"}]
    base_url = url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0) as client:
        for _ in SCRIPT:
            reply = await client.messages.create(
                model="m", max_tokens=999, system="Look.", messages=talk, tools=tools
            )
            talk.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "red"}
                for block in reply.content
                if block.type == "tool_use"
            ]
            talk.append({"role": "user", "content": results})


@pytest.mark.parametrize("agent", [by_chat, by_responses, by_messages])
def test_what_a_client_got_and_sends_back_is_never_tokenized_again(agent: Agent) -> None:
    texts = iter(SCRIPT)
    client = TemplateClient(lambda messages: next(texts))

    async def run() -> Any:
        async with RLM(client) as rlm, AgentModelServer() as endpoint:

            async def conduct(conversations: RunModelClient) -> None:
                with endpoint.temporary_seat_key(AgentModelAccess(conversations, "agent")) as key:
                    await agent(endpoint.url(), key)

            return await rlm.start(RolloutInitialState(conduct=conduct), "play")

    result = asyncio.run(run())
    assert result.error is None, result.error
    (call,) = result.trajectory.calls
    assert [turn.reply.token_ids for turn in call.turns] == [sampled for _, sampled in client.log]
    path, (prompt, sampled) = result.trajectory.path(call), client.log[-1]
    assert path.ids == (*prompt, *sampled)
    assert sum(path.sampled) == sum(len(sampled) for _, sampled in client.log)
