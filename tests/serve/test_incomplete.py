"""Replies that were cut or filtered, as a caller of ``ramify serve`` sees them over each API."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from ramify.types.message import Message, Reply
from tests.serve.serving import LONG, asking, serving, session, user

CASES = [
    ("half of it", "length", "length", "half of it", "max_output_tokens"),
    ("half of it", "content_filter", "content_filter", "", "content_filter"),
]


@pytest.mark.parametrize(("text", "finish", "reason", "said", "incomplete"), CASES)
def test_cut_or_filtered_reply_is_reported_as_incomplete(
    text: str, finish: Any, reason: str, said: str, incomplete: str
) -> None:
    async def main() -> None:
        reply = Reply(Message("assistant", text), finish=finish)
        async with serving(session(direct=lambda _: reply)) as server, asking(server) as client:
            asked: dict[str, Any] = {"model": "mine", "messages": [user("Hello")]}
            choice = (await client.chat.completions.create(**asked)).choices[0]
            assert (choice.message.content, choice.finish_reason) == (said, reason)
            events = [
                event async for event in await client.chat.completions.create(**asked, stream=True)
            ]
            assert [e.choices[0].finish_reason for e in events if e.choices][-1] == reason
            assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == said
            response = await client.responses.create(model="mine", input="Hello")
            assert (response.status, response.output_text) == ("incomplete", said)
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == incomplete
            streamed = [
                event
                async for event in await client.responses.create(
                    model="mine", input="Hi", stream=True
                )
            ]
            assert streamed[-1].type == "response.incomplete"

    asyncio.run(main())


def test_replies_that_do_not_fit_response_format_are_a_failure_of_the_model() -> None:
    async def main() -> None:
        form = {"name": "f", "schema": {"type": "object", "required": ["a"]}}
        async with serving(session(direct=lambda _: "{}")) as server, asking(server) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="mine",
                    messages=[user("Hello")],
                    response_format={"type": "json_schema", "json_schema": form},  # type: ignore[typeddict-item]
                )
            assert isinstance(caught.value.body, dict)
            assert (caught.value.status_code, caught.value.body["code"]) == (502, "model_failed")
            assert "after 3 replies the value still does not fit its schema" in str(caught.value)

    asyncio.run(main())


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_run_without_an_answer_is_an_http_error(finish: Any) -> None:
    """Not an empty answer that looks whole: an agent would continue with it."""

    async def main() -> None:
        reply = Reply(Message("assistant", ""), finish=finish)
        async with serving(session(*[reply] * 9)) as server, asking(server) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="mine", messages=[user(LONG + "\n" + LONG, "How many?")]
                )
            assert caught.value.status_code == 502
            assert isinstance(caught.value.body, dict)
            assert caught.value.body["code"] == "model_failed"
            assert {"length": "cut at its limit", "stop": "neither code"}[finish] in str(
                caught.value
            )

    asyncio.run(main())
