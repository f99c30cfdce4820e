"""Whole runs over HTTP with the official ``openai`` client: chat completions from question to
answer."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ramify import Limits, ScriptedClient, Store
from ramify.serve.api_keys import ApiKey
from ramify.testing.scripted_client import refused
from tests.serve.serving import LONG, PRICE, asking, cell, file, serving, session, session_of, user

COUNT = session(
    "I look.\n" + cell("print(len(context))"),
    cell("FINAL(sum(int(l[-1]) for l in context.split()))"),
)


def run(test: Any) -> None:
    asyncio.run(test())


def test_short_conversation_is_answered_directly() -> None:
    async def test() -> None:
        async with serving(session()) as server, asking(server) as client:
            said = [
                {"role": "system", "content": "Be brief."},
                user("Hello"),
                {"role": "assistant", "content": "Hi."},
            ]
            reply = await client.chat.completions.create(
                model="gpt-5", messages=[*said, user("How are you?")]
            )
            asked = (
                "Instructions:\nBe brief.\n\nEarlier in this conversation:\nuser: "
                "Hello\nassistant: Hi.\n\n"
                "Now:\nHow are you?"
            )
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
                f"re: {asked}",
                "stop",
            )
            assert (reply.model, reply.object) == ("mine", "chat.completion")

    run(test)


def test_long_message_becomes_context_and_usage_counts_every_call() -> None:
    async def test() -> None:
        model = ScriptedClient(
            session(
                cell("n = llm_query('how many?')"),
                cell("FINAL(f'{n} {len(context)}')"),
                direct=lambda _: "7",
            )
        )
        async with serving(model) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m", messages=[user(LONG, "How many?")]
            )
            assert reply.choices[0].message.content == f"7 {len(LONG)}"
            assert reply.usage is not None
            served = model.served
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
                served.input_tokens,
                served.output_tokens,
            )
            assert reply.usage.total_tokens == served.total_tokens
            about = reply.model_extra["ramify"]
            assert (about["stop"], about["calls"], about["depth"]) == ("final", 3, 1)

    run(test)


def test_long_messages_and_files_are_named_in_context() -> None:
    async def test() -> None:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("in/a.txt", "red")
        model = ScriptedClient(
            session(cell("FINAL({name: len(text) for name, text in context.items()})"))
        )
        async with serving(model) as server, asking(server) as client:
            files = [file("rows.csv", b"a,b\n1,2\n"), file("b.zip", packed.getvalue(), head="")]
            said = [
                {"role": "system", "content": LONG},
                user("Read it."),
                user("How long?", *files),
            ]
            reply = await client.chat.completions.create(model="m", messages=said)
            assert json.loads(reply.choices[0].message.content) == {
                "b.zip/in/a.txt": 3,
                "message 1 (system)": len(LONG),
                "rows.csv": 8,
            }
            first = model.requests[0].messages[1].content
            assert (
                f"Instructions:\n[{len(LONG):,} characters, in `context['message 1 (system)']`]"
                in first
            )
            assert "Now:\nHow long?\n[the file rows.csv, in `context['rows.csv']`]" in first
            assert "'rows.csv': CSV: 2 columns a, b; 1 row" in first
            assert "sql" not in first

    run(test)


def test_very_long_message_can_be_searched() -> None:
    async def test() -> None:
        script = session(cell("FINAL([search('needle')[0]['place'], len(chunks()) > 1])"))
        async with serving(script) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m", messages=[user(LONG * 5 + "a needle", "Where is the needle?")]
            )
            assert json.loads(reply.choices[0].message.content or "") == ["line 20001", True]

    run(test)


def test_long_conversation_becomes_context() -> None:
    async def test() -> None:
        async with (
            serving(session(cell("FINAL(context.count('user: red'))"))) as server,
            asking(server) as client,
        ):
            said = [user("red " * 3000), {"role": "assistant", "content": "ok"}] * 3
            reply = await client.chat.completions.create(
                model="m", messages=[*said, user("How often?")]
            )
            assert reply.choices[0].message.content == "3"

    run(test)


def test_prompt_quotes_start_of_long_question() -> None:
    async def test() -> None:
        model = ScriptedClient(session(cell("FINAL(len(context))")))
        async with serving(model) as server, asking(server) as client:
            asked = f"Add up the numbers.\n{LONG}"
            reply = await client.chat.completions.create(model="m", messages=[user(asked)])
            assert reply.choices[0].message.content == str(len(asked))
            assert "It begins 'Add up the numbers." in model.requests[0].messages[1].content

    run(test)


def test_json_schema_answer_is_enforced() -> None:
    async def test() -> None:
        wrong_then_right = session(cell("FINAL({'n': 'many'})"), cell("FINAL({'n': 4})"))
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        format = {
            "type": "json_schema",
            "json_schema": {"name": "count", "schema": schema, "strict": True},
        }
        async with serving(wrong_then_right) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m", messages=[user(LONG, "n?")], response_format=format
            )
            assert json.loads(reply.choices[0].message.content) == {"n": 4}

    run(test)


def test_sampling_options_stop_and_max_tokens_are_applied() -> None:
    async def test() -> None:
        model = ScriptedClient(session(direct=lambda _: "one two three END four"))
        async with serving(model) as server, asking(server) as client:
            ask = client.chat.completions.create
            reply = await ask(
                model="m", messages=[user("x")], temperature=0.3, top_p=0.5, seed=4, stop=["END"]
            )
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
                "one two three ",
                "stop",
            )
            sampling = model.requests[0].sampling
            assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.3, 0.5, 4)
            reply = await ask(model="m", messages=[user("x")], max_tokens=2)
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
                "one two ",
                "length",
            )
            assert "at most 2 tokens" in model.requests[1].messages[-1].content

    run(test)


def test_reached_limit_returns_partial_answer_and_stop_reason() -> None:
    async def test() -> None:
        idle = session(*[cell("answer['content'] = 'so far 3'")] * 2, "FINAL(3 at least)")
        async with serving(idle) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m",
                messages=[user(LONG, "n?")],
                extra_body={"ramify": {"limits": {"max_turns": 2}}},
            )
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
                "3 at least",
                "length",
            )
            assert reply.model_extra["ramify"]["stop"] == "max_turns"

    run(test)


def test_request_can_tighten_limits_and_depth() -> None:
    async def test() -> None:
        deep = session(cell("FINAL(rlm_query('deeper'))"), direct=lambda _: "a plain call")
        async with serving(deep, limits=Limits(max_depth=2)) as server, asking(server) as client:
            reply = await client.chat.completions.create(
                model="m", messages=[user(LONG, "n?")], extra_body={"ramify": {"depth": 0}}
            )
            assert reply.choices[0].message.content == "a plain call"

    run(test)


@pytest.mark.parametrize(
    ("status", "answered", "code", "stop"),
    [(404, 502, "model_failed", "error"), (401, 503, "run_suspended", "suspended")],
)
def test_model_failure_returns_error_with_run_id(
    tmp_path: Path, status: int, answered: int, code: str, stop: str
) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        failing = session(direct=lambda _: refused(status, "no"))
        async with serving(failing, store=store) as server, asking(server) as client:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.chat.completions.create(
                        model="m", messages=[user("x")], stream=stream
                    )
                error = caught.value
                assert (error.status_code, error.code, error.type) == (
                    answered,
                    code,
                    "server_error",
                )
                run_id = error.body["run"]
                assert store.load(run_id).stop == stop
                assert error.response.headers["x-ramify-run"] == run_id
                assert error.response.headers["x-should-retry"] == "false"

    run(test)


def test_models_health_and_metrics_endpoints() -> None:
    async def test() -> None:
        async with serving(COUNT, price=PRICE) as server, asking(server) as client:
            assert [model.id async for model in client.models.list()] == ["mine"]
            assert (await client.models.retrieve("mine")).owned_by == "ramify"
            with pytest.raises(openai.NotFoundError, match="unknown model 'yours'"):
                await client.models.retrieve("yours")
            await client.chat.completions.create(model="m", messages=[user(LONG, "sum?")])
            base = server.url.removesuffix("/v1")
            async with session_of(server) as http:
                async with http.get(f"{base}/healthz") as answer:
                    assert (answer.status, await answer.json()) == (
                        200,
                        {"status": "ok", "runs": 0},
                    )
                async with http.get(f"{base}/metrics") as answer:
                    families = {
                        each.name: each
                        for each in text_string_to_metric_families(await answer.text())
                    }
                async with http.get(f"{base}/nowhere") as answer:
                    assert (answer.status, (await answer.json())["error"]["type"]) == (
                        404,
                        "invalid_request_error",
                    )
            runs = families["ramify_runs"].samples
            assert [(each.labels, each.value) for each in runs] == [({"stop": "final"}, 1)]
            assert families["ramify_model_calls"].samples[0].value == 2
            assert families["ramify_cost_dollars"].samples[0].value > 0
            counts = [
                each.value
                for each in families["ramify_run_seconds"].samples
                if each.name.endswith("_count")
            ]
            assert counts == [1]

    run(test)


def test_key_is_checked() -> None:
    async def test() -> None:
        async with serving(session(), keys={"a": ApiKey(key="right")}) as server:
            async with asking(server, "wrong") as client:
                with pytest.raises(
                    openai.AuthenticationError, match="wrong API key: send the server's key"
                ):
                    await client.models.list()
            async with asking(server, "right") as client:
                assert (await client.models.list()).data[0].id == "mine"

    run(test)


def test_drain_asks_running_requests_for_last_word() -> None:
    """Runs in progress are asked for their last word; new requests are refused."""

    async def test() -> None:
        going = asyncio.Event()

        async def slow(messages: Any) -> str:
            if "You are asked to finish" in messages[-1].content:
                return "FINAL(half)"
            going.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with serving(slow) as server, asking(server) as client:
            ask = client.chat.completions.create
            first = asyncio.ensure_future(ask(model="m", messages=[user(LONG, "n?")]))
            await going.wait()
            ending = asyncio.ensure_future(server.drain(0.2))
            await asyncio.sleep(0)
            with pytest.raises(
                openai.InternalServerError, match="the server is shutting down"
            ) as caught:
                await ask(model="m", messages=[user("x")])
            assert caught.value.status_code == 503
            reply = await first
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
                "half",
                "length",
            )
            assert reply.model_extra["ramify"]["stop"] == "cancelled"
            await ending

    run(test)


def test_run_that_ends_with_its_server_is_continued_by_the_next(tmp_path: Path) -> None:
    """Closed at once, or asked for a last word that it does not give: 503 with the run's id."""

    async def test(is_drained: bool) -> None:
        going, num_asked, is_back = asyncio.Event(), 0, False

        async def model(messages: Any) -> str:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                return cell("print(len(context))")
            if not is_back:
                going.set()
                await asyncio.Event().wait()
            return cell("FINAL('whole')")

        def server() -> Any:
            return serving(
                ScriptedClient(model),
                store=Store(tmp_path / str(is_drained)),
                keys={"a": ApiKey(key="one"), "b": ApiKey(key="two")},
            )

        question = {"model": "m", "messages": [user(LONG, "n?")]}
        async with server() as first, asking(first, "one") as client:
            asked = asyncio.ensure_future(client.chat.completions.create(**question))
            await going.wait()
            if is_drained:
                await first.drain(0.0, 0.1)
            await first.close()
            with pytest.raises(
                openai.InternalServerError, match="send the request again"
            ) as caught:
                await asked
            error = caught.value
            assert (error.status_code, error.code) == (503, "run_suspended")
            run_id = error.body["run"]  # type: ignore[index]
            assert error.response.headers["x-ramify-run"] == run_id
        is_back, before = True, num_asked
        async with server() as second:
            assert second.unfinished_runs() == [run_id]
            resume = {"ramify": {"resume": run_id}}
            async with asking(second, "two") as other:
                with pytest.raises(openai.NotFoundError, match="this key has no run"):
                    await other.chat.completions.create(**question, extra_body=resume)
            async with asking(second, "one") as client:
                reply = await client.chat.completions.create(**question, extra_body=resume)
                assert reply.choices[0].message.content == "whole"
                assert reply.model_extra["ramify"]["run"] == run_id
                assert num_asked == before + 1, "the first reply came from the record"
                with pytest.raises(openai.BadRequestError, match="has ended"):
                    await client.chat.completions.create(**question, extra_body=resume)
                wrong = {"ramify": {"resume": f"../{run_id}"}}
                with pytest.raises(openai.NotFoundError, match="this key has no run"):
                    await client.chat.completions.create(**question, extra_body=wrong)
            assert second.unfinished_runs() == []

    for is_drained in (False, True):
        run(partial(test, is_drained))


def test_close_fails_running_requests_with_503() -> None:
    async def test() -> None:
        going = asyncio.Event()

        async def stuck(_: Any) -> str:
            going.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with serving(stuck) as server, asking(server) as client:
            asked = asyncio.ensure_future(
                client.chat.completions.create(model="m", messages=[user("x")])
            )
            await going.wait()
            await server.close()
            with pytest.raises(
                openai.InternalServerError, match="the server stopped before the run had an answer"
            ) as caught:
                await asked
            assert caught.value.status_code == 503

    run(test)
