"""A model whose replies a function gives."""

from __future__ import annotations

import asyncio

import pytest

import ramify
from ramify.clients.function_client import FunctionClient
from ramify.errors import ConfigError
from ramify.types.message import Message


def answered(reply) -> ramify.Result:
    with ramify.RLM(FunctionClient(reply, "expert:python"), sandbox="inprocess") as rlm:
        return rlm.completion("What is six times seven?")


def test_reply_may_be_a_text_a_message_or_awaited() -> None:
    async def slow(messages):
        await asyncio.sleep(0)
        return "42"

    replies = [lambda messages: "42", lambda messages: Message("assistant", "42"), slow]
    assert [answered(each).response for each in replies] == ["42", "42", "42"]


def test_tokens_are_a_quarter_of_the_characters() -> None:
    prompts: list[int] = []

    def reply(messages):
        prompts.append(sum((len(each.content) + 3) // 4 for each in messages))
        return "12345"

    usage = answered(reply).usage
    assert (usage.calls, usage.input_tokens, usage.output_tokens) == (1, sum(prompts), 2)


def test_error_of_the_function_is_the_callers() -> None:
    def reply(messages):
        return messages[7].content

    with pytest.raises(ConfigError, match=r"expert:python raised IndexError.*: fix the function"):
        answered(reply)
