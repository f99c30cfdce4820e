"""The packages of OpenAI and Anthropic work against the batch server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable

import anthropic
import openai
import pytest

from ramify import testing

KEY = "sk-0123456789"
Work = Callable[[testing.FakeBatchApiServer], Awaitable[None]]


def served(work: Work, script: object = None, **options: object) -> None:
    async def run() -> None:
        reply = script or (lambda messages: f"re: {messages[-1].content}")
        async with testing.FakeBatchApiServer(reply, **options) as server:
            await work(server)

    asyncio.run(run())


def lines_of(*texts: str) -> io.BytesIO:
    lines = [
        {
            "custom_id": f"r-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": text}]},
        }
        for number, text in enumerate(texts)
    ]
    return io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())


async def created(client: openai.AsyncOpenAI, *texts: str, **more: object) -> openai.types.Batch:
    file = await client.files.create(file=("a.jsonl", lines_of(*texts)), purpose="batch")
    assert (file.purpose, file.filename) == ("batch", "a.jsonl")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        **more,
    )


def test_the_package_of_openai_works_against_it() -> None:
    async def work(server: testing.FakeBatchApiServer) -> None:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=server.url) as client:
            batch = await created(client, "one", "two", metadata={"mine": "yes"})
            batch = await client.batches.retrieve(batch.id)
            assert (batch.status, batch.metadata) == ("completed", {"mine": "yes"})
            assert (batch.request_counts.completed, batch.request_counts.total) == (2, 2)
            content = await client.files.content(batch.output_file_id)
            found = {}
            for line in content.text.splitlines():
                entry = json.loads(line)
                body = openai.types.chat.ChatCompletion.model_validate(entry["response"]["body"])
                found[entry["custom_id"]] = body.choices[0].message.content
            assert found == {"r-0": "re: one", "r-1": "re: two"}
            others = [await created(client, "more") for _ in range(3)]
            listed = [each.id async for each in client.batches.list(limit=2)]
            assert listed == [each.id for each in reversed([batch, *others])]

    served(work)


def test_the_package_of_openai_sees_an_end_without_results() -> None:
    async def work(server: testing.FakeBatchApiServer) -> None:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=server.url) as client:
            first, second = await created(client, "one", "two"), None
            assert first.status == "in_progress"
            assert (await client.batches.cancel(first.id)).status == "cancelling"
            await server.finish("cancelled", num=1)
            first = await client.batches.retrieve(first.id)
            assert (first.status, first.request_counts.completed) == ("cancelled", 1)
            errors = (await client.files.content(first.error_file_id)).text
            assert json.loads(errors)["error"]["code"] == "batch_cancelled"
            second = await created(client, "one")
            server.refuse("model_not_found: no such model")
            second = await client.batches.retrieve(second.id)
            assert (second.status, second.errors.data[0].code) == ("failed", "model_not_found")
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve("batch_99")

    served(work, holds=True)


def test_the_package_of_anthropic_works_against_it() -> None:
    async def work(server: testing.FakeBatchApiServer) -> None:
        async with anthropic.AsyncAnthropic(api_key=KEY, base_url=server.root) as client:
            requests = [
                {
                    "custom_id": f"r-{number}",
                    "params": {
                        "model": "m",
                        "max_tokens": 99,
                        "messages": [{"role": "user", "content": text}],
                    },
                }
                for number, text in enumerate(("one", "bad", "three"))
            ]
            batch = await client.messages.batches.create(requests=requests)
            assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 3)
            await server.finish("expired", num=2)
            batch = await client.messages.batches.retrieve(batch.id)
            counts = batch.request_counts
            assert (counts.succeeded, counts.errored, counts.expired) == (1, 1, 1)
            found = {}
            async for entry in await client.messages.batches.results(batch.id):
                found[entry.custom_id] = entry.result
            assert found["r-0"].message.content[0].text == "re: one"
            assert found["r-1"].error.error.type == "invalid_request_error"
            assert found["r-2"].type == "expired"
            again = await client.messages.batches.create(requests=requests[:1])
            cancelling = await client.messages.batches.cancel(again.id)
            assert cancelling.processing_status == "canceling"
            listed = [each.id async for each in client.messages.batches.list(limit=1)]
            assert listed == [again.id, batch.id]
            with pytest.raises(anthropic.BadRequestError, match="custom_id"):
                await client.messages.batches.create(
                    requests=[{**requests[0], "custom_id": "not allowed"}]
                )

    def reply(messages: object) -> object:
        text = messages[-1].content
        return testing.refused(text="too hot") if text == "bad" else f"re: {text}"

    served(work, reply, holds=True)
