"""The metering endpoint: no caller passes its budget, and its counts are those of our journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from ramify import RLM, Price, ScriptedClient
from ramify.errors import ConfigError
from ramify.evaluate.systems.base import NO_LIMIT, MeteredModelAccess, TaskItemBudget
from ramify.serve.metering_proxy import MeteringProxy
from ramify.testing.reply_script import dropped, rate_limited, server_error, stalled
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.types.message import Usage

TALKATIVE = "word " * 50_000
PRICE = Price(input=1.0, output=10.0)


def talkative(**options: Any) -> ScriptedClient:
    """A model whose every reply is as long as it may be."""
    return ScriptedClient(lambda messages: TALKATIVE, **options)


@asynccontextmanager
async def caller(seat: MeteredModelAccess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=seat.base_url, api_key=seat.key, max_retries=0
    ) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, prompt: str = "hello", **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    return await client.chat.completions.create(model="any", messages=messages, **options)


def metered(
    model: ScriptedClient,
    work: Callable[[openai.AsyncOpenAI, MeteredModelAccess, MeteringProxy], Awaitable[Any]],
    seat_budget: TaskItemBudget | None = None,
    **options: Any,
) -> Any:
    """The result of ``work`` at a seat of a meter in front of ``model``."""

    async def run() -> Any:
        async with (
            MeteringProxy(model, **options) as meter,
            meter.open_account("item", seat_budget) as seat,
            caller(seat) as client,
        ):
            return await work(client, seat, meter)

    return asyncio.run(run())


def counts(usage: Usage) -> tuple[int, int, int]:
    return usage.calls, usage.input_tokens, usage.output_tokens


def test_a_reply_comes_with_the_usage_that_was_booked() -> None:
    model = ScriptedClient(["four", "five or six"])

    async def work(client: openai.AsyncOpenAI, seat: MeteredModelAccess, _: MeteringProxy) -> None:
        first = await ask(client, "twelve chars")
        assert (first.choices[0].message.content, first.model) == ("four", "test")
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 1)
        stream = await ask(client, "hi", stream=True, stream_options={"include_usage": True})
        parts = [part async for part in stream]
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert (text, parts[-1].usage.completion_tokens) == ("five or six", 3)
        assert counts(seat.usage) == counts(model.served) == (2, 4, 4)

    metered(model, work)


async def until_refused(client: openai.AsyncOpenAI, options: dict[str, Any]) -> str:
    """Ask until the meter refuses, and return its sentence."""

    async def ask_on() -> None:
        while True:
            reply = await ask(client, **options)
            if options.get("stream"):
                _ = [part async for part in reply]

    with pytest.raises(openai.APIStatusError) as refused:
        await ask_on()
    error: Any = refused.value.body
    assert (refused.value.status_code, error["code"]) == (402, "budget_exhausted")
    return str(error["message"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 10**9},
        {"max_completion_tokens": 2**40},
        {"stream": True},
        {"n": 5},
        {"n": 3, "stream": True, "max_tokens": 700},
        {"prompt": "x" * 900, "max_tokens": 777},
        {"prompt": "\u20ac" * 100, "max_tokens": 350},
    ],
    ids=["plain", "huge", "huge_new", "stream", "n", "n_stream", "long", "bytes"],
)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_no_caller_passes_its_budget_by_one_token(
    options: dict[str, Any], is_parallel: bool
) -> None:
    # With a latency, requests of a parallel caller are in flight at the same time.
    model = talkative(latency_s=0.002 if is_parallel else 0.0)
    budget = TaskItemBudget(max_tokens=20_011)

    async def work(client: openai.AsyncOpenAI, seat: MeteredModelAccess, _: MeteringProxy) -> None:
        asking = [until_refused(client, options) for _ in range(8 if is_parallel else 1)]
        sentences = await asyncio.gather(*asking)
        for sentence in sentences:
            assert "the budget of item is used up: " in sentence
            assert "of 20,011 tokens were used" in sentence
            assert sentence.endswith("answer with what you have")
        assert model.served.total_tokens == seat.usage.total_tokens <= 20_011
        bound = model.requests[-1].max_input_tokens()
        assert seat.usage.total_tokens > 20_011 - bound - 1, "what was left was used"
        assert seat.num_refused >= len(asking)
        assert (seat.refusal in sentences) or options.get("n")

    metered(model, work, budget)


def test_dollars_and_calls_are_limits_too() -> None:
    model = talkative(price=PRICE)
    generator = random.Random(5)

    async def dollars(
        client: openai.AsyncOpenAI, seat: MeteredModelAccess, _: MeteringProxy
    ) -> None:
        for _ in range(40):
            options = {"prompt": "x" * generator.randrange(2000), "max_tokens": 10**6}
            with contextlib.suppress(openai.APIStatusError):
                await ask(client, **options)
        assert "of $0.1234 were spent" in seat.refusal
        cost = PRICE.of(model.served)
        assert seat.cost == pytest.approx(cost, rel=1e-9)
        assert 0.12 < cost <= 0.1234 * (1 + 1e-9)

    metered(model, dollars, TaskItemBudget(max_cost=0.1234))

    async def calls(client: openai.AsyncOpenAI, seat: MeteredModelAccess, _: MeteringProxy) -> None:
        replies = await asyncio.gather(
            *(ask(client, n=2) for _ in range(4)), return_exceptions=True
        )
        assert seat.usage.calls == len(brief.requests) == 7
        assert sum(isinstance(reply, openai.APIStatusError) for reply in replies) == 1

    brief = ScriptedClient(lambda messages: "ok", latency_s=0.01)
    metered(brief, calls, TaskItemBudget(max_calls=7))


def test_a_prompt_is_counted_exactly_if_its_template_is_here() -> None:
    """Without a template, 64 tokens for a request and 16 for a message are reserved in addition."""
    model = ScriptedClient(lambda messages: "yes", ids=ScriptedByteTokenizer())

    async def work(client: openai.AsyncOpenAI, seat: MeteredModelAccess, _: MeteringProxy) -> None:
        await ask(client, "0123456789")
        ids = 1 + 10 + 1 + 1
        assert model.requests[0].sampling.max_tokens == 50 - ids

    metered(model, work, TaskItemBudget(max_tokens=50))


def test_the_count_is_that_of_our_journal() -> None:
    def reply(messages: Any) -> str:
        text = messages[-1].content
        if text.startswith("part"):
            return f"seen {len(text)}"
        if len(messages) < 3:
            return "```repl\nprint(llm_query_batched([f'part {i}' * 9 for i in range(7)]))\n```"
        return "```repl\nFINAL(llm_query('part of it'))\n```"

    model = ScriptedClient(reply, price=PRICE)

    async def run() -> None:
        async with MeteringProxy(model) as meter, meter.open_account("item") as seat:
            async with RLM(seat.as_model()) as rlm:
                result = await rlm.acompletion("a context " * 9, "What is in it?", direct=False)
            assert result.answer == "seen 10"
            assert counts(result.usage) == counts(seat.usage) == counts(model.served)
            assert seat.usage.calls == 10
            assert result.cost == pytest.approx(seat.cost)

    asyncio.run(run())


def test_failures_that_cost_nothing_are_retried_and_lost_replies_are_booked() -> None:
    model = ScriptedClient([rate_limited(0.01), server_error(502), "ok", dropped("lost"), "again"])

    async def work(client: openai.AsyncOpenAI, seat: MeteredModelAccess, _: MeteringProxy) -> None:
        assert (await ask(client)).choices[0].message.content == "ok"
        assert counts(seat.usage) == (1, 2, 1)
        with pytest.raises(openai.APIStatusError, match="closed before") as raised:
            await ask(client, max_tokens=100)
        assert raised.value.status_code == 504
        assert seat.usage.unknown_calls == 1
        bound = model.requests[-1].max_input_tokens() + 100
        assert seat.usage.total_tokens == 3 + bound
        assert "closed before" in seat.outage
        assert (await ask(client)).choices[0].message.content == "again"

    metered(model, work)


def test_an_ended_seat_cuts_off_its_requests_and_books_them() -> None:
    model = ScriptedClient([stalled(), "more"])

    async def work(
        client: openai.AsyncOpenAI, seat: MeteredModelAccess, meter: MeteringProxy
    ) -> None:
        async with meter.open_account("second") as second, caller(second) as other:
            waiting = asyncio.ensure_future(ask(other, max_tokens=10))
            while not model.in_flight:
                await asyncio.sleep(0.01)
        assert counts(second.usage) == (1, 64 + 16 + 5, 10)
        with pytest.raises(openai.APIConnectionError):
            await waiting
        with pytest.raises(openai.AuthenticationError, match="key of an open seat"):
            async with caller(second) as other:
                await ask(other)
        assert counts(seat.usage) == (0, 0, 0)
        assert "second" not in meter.seats
        async with meter.open_account("item") as another:
            assert another.name == "item (2)"

    metered(model, work)


def test_the_record_has_each_request_and_each_message_once(tmp_path: Path) -> None:
    record = tmp_path / "folder" / "meter.jsonl"

    async def work(
        client: openai.AsyncOpenAI, seat: MeteredModelAccess, meter: MeteringProxy
    ) -> None:
        await ask(client, "the long prompt", max_tokens=50)
        await ask(client, "the long prompt")
        with pytest.raises(openai.APIStatusError):
            await ask(client, "the long prompt" * 1000)
        text = record.read_text()
        assert seat.key not in text
        assert meter.key not in text

    metered(talkative(), work, TaskItemBudget(max_tokens=3000), record=record)
    assert record.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["message", "request", "request"] * 1 + [
        "message",
        "request",
    ]
    first, second, third = (line for line in lines if line["type"] == "request")
    assert first["messages"] == second["messages"] == [lines[0]["id"]]
    assert [first["number"], second["number"], third["number"]] == [1, 2, 3]
    assert (first["status"], first["max_tokens"], first["usage"]["output_tokens"]) == (200, 50, 50)
    assert second["max_tokens"] == 3000 - 54 - len("the long prompt") - 80
    assert third["status"] == 402
    assert third["usage"] == {}


def test_seats_are_opened_over_http() -> None:
    async def work(_: openai.AsyncOpenAI, seat: MeteredModelAccess, meter: MeteringProxy) -> None:
        owner = openai.AsyncOpenAI(
            base_url=meter.url.removesuffix("/v1"), api_key=meter.key, max_retries=0
        )
        async with owner:
            body = {"name": "a/b 1", "max_tokens": 5000}
            opened: Any = await owner.post("/seats", body=body, cast_to=object)
            assert opened["budget"] == {"max_calls": 3, "max_tokens": 5000}
            async with openai.AsyncOpenAI(
                base_url=opened["base_url"], api_key=opened["key"], max_retries=0
            ) as client:
                await ask(client)
                with pytest.raises(openai.PermissionDeniedError, match="cannot open or end seats"):
                    await client.post("/../seats", body={"name": "x"}, cast_to=object)
            listed: Any = await owner.get("/seats", cast_to=object)
            by_name = {row["name"]: row for row in listed["seats"]}
            assert set(by_name) == {"default", "item", "a/b 1"}
            assert by_name["a/b 1"]["requests"] == 1
            ended: Any = await owner.delete("/seats/a%2Fb%201", cast_to=object)
            assert ended["output_tokens"] == 1
            for wrong, message in (
                ({"name": "y", "max_token": 1}, "max_token"),
                ({"name": "y", "max_tokens": 0}, "max_tokens=0 allows nothing"),
                ({"name": "item"}, "has a seat 'item' already"),
            ):
                with pytest.raises(openai.BadRequestError, match=message):
                    await owner.post("/seats", body=wrong, cast_to=object)

    metered(
        ScriptedClient(lambda messages: "ok"), work, NO_LIMIT, budget=TaskItemBudget(max_calls=3)
    )


def test_a_limit_in_dollars_needs_a_price() -> None:
    async def run() -> None:
        async with MeteringProxy(talkative(), budget=TaskItemBudget(max_cost=1.0)):
            pass

    with pytest.raises(ConfigError, match="has no known price; limit calls or tokens"):
        asyncio.run(run())
