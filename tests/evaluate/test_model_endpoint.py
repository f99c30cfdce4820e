"""The endpoint of runs, with the clients that the makers of the APIs publish: what an agent sends
becomes turns of its run, whichever API it uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from ramify import RLM, ScriptedClient
from ramify.engine.external_conversations import RunModelClient
from ramify.evaluate.agent_model_server import KEY_HEADER, AgentModelAccess, AgentModelServer
from ramify.inference.local.local_client import LocalClient
from ramify.tasks.base import RolloutInitialState
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.types.message import Message
from tests.inference.helpers import policy

Agent = Callable[[str, str], Awaitable[Any]]
"""(base URL, key) -> what the agent returns."""


def played(agent: Agent, client: Any = None) -> Any:
    """The result of a run whose requests come from ``agent``."""
    client = client or ScriptedClient(
        lambda messages: f"re: {messages[-1].content}", ids=ScriptedByteTokenizer()
    )

    async def run() -> Any:
        async with RLM(client) as rlm, AgentModelServer() as endpoint:

            async def conduct(conversations: RunModelClient) -> Any:
                with endpoint.temporary_seat_key(AgentModelAccess(conversations, "agent")) as key:
                    return await agent(endpoint.url(), key)

            return await rlm.start(RolloutInitialState(conduct=conduct), "play")

    return asyncio.run(run())


async def by_chat(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        talk: Any = [{"role": "user", "content": "a"}]
        first = await client.chat.completions.create(model="any", messages=talk)
        talk += [first.choices[0].message.model_dump(exclude_none=True)]
        talk += [{"role": "user", "content": "b"}]
        async with client.chat.completions.stream(model="any", messages=talk) as stream:
            await stream.get_final_completion()


async def by_responses(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        first = await client.responses.create(model="any", input="a")
        async with client.responses.stream(
            model="any", input="b", previous_response_id=first.id
        ) as stream:
            await stream.get_final_response()


async def by_messages(url: str, key: str) -> None:
    base_url = url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0) as client:
        talk: Any = [{"role": "user", "content": "a"}]
        first = await client.messages.create(model="any", max_tokens=99, messages=talk)
        talk += [{"role": "assistant", "content": first.content}]
        talk += [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
        async with client.messages.stream(model="any", max_tokens=99, messages=talk) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize("agent", [by_chat, by_responses, by_messages])
def test_every_api_gives_the_same_tree(agent: Agent) -> None:
    (call,) = played(agent).trajectory.calls
    assert [[each.content for each in turn.prompt] for turn in call.turns] == [["a"], ["b"]]
    assert [turn.reply.message.content for turn in call.turns] == ["re: a", "re: b"]
    assert [bytes(turn.reply.token_ids[:-1]) for turn in call.turns] == [b"re: a", b"re: b"]
    assert call.turns[1].reused == 2
    assert call.turns[1].reply.logprobs == (-0.5,) * len("re: b.")


def test_client_decides_length_and_number_but_not_temperature() -> None:
    async def agent(url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            return await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "x"}],
                n=2,
                max_tokens=5,
                temperature=0.1,
                logprobs=True,
                top_logprobs=2,
                extra_body={"return_token_ids": True},
            )

    client = LocalClient(policy())
    result = played(agent, client)
    asyncio.run(client.close())
    found = result.answer
    calls = result.trajectory.calls
    assert len(calls) == 2
    for choice, call in zip(found.choices, calls, strict=True):
        num_tokens = len(call.turns[0].reply.token_ids)  # fewer if the policy ended its reply
        assert num_tokens == 5 if choice.finish_reason == "length" else num_tokens < 5
        assert tuple(choice.model_extra["token_ids"]) == call.turns[0].reply.token_ids
        content = choice.logprobs.content
        assert [each.logprob for each in content] == list(call.turns[0].reply.logprobs)
        assert all(each.token and len(each.top_logprobs) == 2 for each in content)


def test_ended_and_unknown_keys_are_refused() -> None:
    async def run() -> None:
        async with RLM(ScriptedClient(["x"])) as rlm, AgentModelServer() as endpoint:

            async def conduct(conversations: RunModelClient) -> str:
                with endpoint.temporary_seat_key(AgentModelAccess(conversations, "agent")) as key:
                    return key

            ended = (await rlm.start(RolloutInitialState(conduct=conduct), "play")).answer
            for key in (ended, "rk-unknown"):
                with pytest.raises(openai.AuthenticationError, match="no running rollout"):
                    await by_chat(endpoint.url(), key)
                with pytest.raises(openai.AuthenticationError, match="no running rollout"):
                    await by_responses(endpoint.url(), key)
                with pytest.raises(anthropic.AuthenticationError, match="no running rollout"):
                    await by_messages(endpoint.url(), key)

    asyncio.run(run())


def test_key_that_is_no_ascii_text_is_a_wrong_key() -> None:
    async def run() -> None:
        headers = {KEY_HEADER: "é", "Authorization": "Bearer é"}
        async with AgentModelServer() as endpoint, aiohttp.ClientSession(headers=headers) as http:
            for path in ("/models", "/responses/resp_1"):
                async with http.get(endpoint.url() + path) as answer:
                    assert answer.status == 401

    asyncio.run(run())


def test_responses_of_one_rollout_are_unknown_to_another() -> None:
    async def run() -> None:
        async with RLM(ScriptedClient(lambda messages: "x")) as rlm, AgentModelServer() as endpoint:

            async def conduct(conversations: RunModelClient) -> str:
                with (
                    endpoint.temporary_seat_key(AgentModelAccess(conversations, "a")) as mine,
                    endpoint.temporary_seat_key(AgentModelAccess(conversations, "b")) as theirs,
                ):
                    clients = [
                        openai.AsyncOpenAI(base_url=endpoint.url(), api_key=key, max_retries=0)
                        for key in (mine, theirs)
                    ]
                    first = await clients[0].responses.create(model="any", input="a")
                    for ask in (
                        clients[1].responses.create(
                            model="any", input="b", previous_response_id=first.id
                        ),
                        clients[1].responses.retrieve(first.id),
                    ):
                        with pytest.raises(openai.APIStatusError, match="no response has the id"):
                            await ask
                    for client in clients:
                        await client.close()
                return "done"

            assert (await rlm.start(RolloutInitialState(conduct=conduct), "play")).answer == "done"

    asyncio.run(run())


def test_tokens_can_be_counted_where_the_tokenizer_is() -> None:
    async def agent(url: str, key: str) -> Any:
        base_url = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=key) as client:
            try:
                counted = await client.messages.count_tokens(
                    model="any", messages=[{"role": "user", "content": "x"}]
                )
            except anthropic.BadRequestError as error:
                return error.message
            return counted.input_tokens

    client = LocalClient(policy())
    assert played(agent, client).answer == len(
        client.policy.renderer.prompt([Message("user", "x")])
    )
    asyncio.run(client.close())
    assert "cannot be counted here" in played(agent, ScriptedClient(["x"])).answer
