"""Streams: every event of a run reaches its own client in order; a disconnect ends the run."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from ramify import Limits, ScriptedClient, Store
from ramify.serve.answer_request import RunProgressFormatter
from ramify.testing.scripted_client import refused
from ramify.testing.scripted_server import completion_body, completion_stream_chunks
from ramify.types.message import Message, Reply, Usage
from tests.serve.serving import (
    LONG,
    OPENING,
    PRICE,
    asking,
    cell,
    serving,
    session,
    session_of,
    user,
)

CLIENTS = 200


def progress_of(store: Store, run: str) -> str:
    """The progress text that a client should receive for a stored run."""
    progress = RunProgressFormatter()
    return "".join(progress.text_of(event) for event in store.events(run))


async def collect_stream(
    client: openai.AsyncOpenAI, number: int
) -> tuple[str, str, dict[str, Any], Any]:
    """(reasoning, content, the field ramify, usage) of one streamed answer."""
    reasoning, content, about, usage, ids = "", "", {}, None, set()
    stream = await client.chat.completions.create(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        messages=[user(LONG, f"client <{number}>")],
    )
    async for event in stream:
        ids.add(event.id)
        usage = event.usage or usage
        for choice in event.choices:
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
            content += choice.delta.content or ""
        about = (event.model_extra or {}).get("ramify", about)
    assert len(ids) == 1
    return reasoning, content, about, usage


def test_200_concurrent_streams_each_get_their_own_events(tmp_path: Path) -> None:
    """All are in the middle of their runs at the same time; none loses an event or gets
    another's."""

    async def test() -> None:
        all_here, waiting = asyncio.Event(), 0

        async def model(messages: Any) -> str:
            nonlocal waiting
            if not messages[0].content.startswith(OPENING):
                return f"re: {messages[-1].content}"
            number = int(re.search(r"client <(\d+)>", messages[1].content)[1])  # type: ignore[index]
            turn = sum(message.role == "assistant" for message in messages)
            if turn == 1:
                waiting += 1
                if waiting == CLIENTS:
                    all_here.set()
                await all_here.wait()
            return [
                f"thought {number}\n{cell(f'print({number} * 7)')}",
                cell(
                    f"r = llm_query_batched(['sub {number} {{}}'.format(i) for i in range(3)]); "
                    "print(r)"
                ),
                cell(f"FINAL('answer {number}')"),
            ][turn]

        store = Store(tmp_path)
        limits = Limits(max_concurrency=2 * CLIENTS)
        async with (
            serving(model, store=store, limits=limits, price=PRICE) as server,
            asking(server) as client,
        ):
            found = await asyncio.gather(
                *(collect_stream(client, number) for number in range(CLIENTS))
            )
            for number, (reasoning, content, about, usage) in enumerate(found):
                assert content == f"answer {number}"
                assert reasoning == progress_of(store, about["run"])
                assert f"thought {number}\n" in reasoning
                assert f"sub {number} 2" in reasoning
                run = store.load(about["run"])
                assert usage.total_tokens == run.usage.total_tokens
            assert len({about["run"] for _, _, about, _ in found}) == CLIENTS

    asyncio.run(test())


def test_client_disconnect_cancels_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        stuck = asyncio.Event()

        async def model(messages: Any) -> str:
            if not messages[0].content.startswith(OPENING):
                stuck.set()
                await asyncio.Event().wait()
            return cell("llm_query('wait')")

        store = Store(tmp_path)
        scripted = ScriptedClient(model)
        async with serving(scripted, store=store) as server, asking(server) as client:
            for stream in (True, False):
                stuck.clear()
                asked = asyncio.ensure_future(
                    client.chat.completions.create(
                        model="m", stream=stream, messages=[user(LONG, "n?")]
                    )
                )
                if stream:
                    async with await asked as events:
                        async for _ in events:  # the first one follows the answer of the model
                            break
                        await stuck.wait()
                else:
                    await stuck.wait()
                    asked.cancel()
                while server.num_runs or scripted.in_flight:
                    await asyncio.sleep(0.01)
            assert [run.stop for run in store.runs()] == ["cancelled"] * 2
            assert 'status="499"' in server.metrics.to_prometheus_text()

    asyncio.run(test())


def test_failure_mid_stream_is_sent_as_last_event(tmp_path: Path) -> None:
    async def test() -> None:
        turns = iter([cell("print(1)"), refused(404, "no such model")])
        async with (
            serving(lambda _: next(turns), store=Store(tmp_path)) as server,
            asking(server) as client,
        ):
            stream = await client.chat.completions.create(
                model="m", stream=True, messages=[user(LONG, "n?")]
            )
            with pytest.raises(openai.APIError, match="the model failed") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "model_failed"
            assert Store(tmp_path).load(caught.value.body["run"]).stop == "error"

    asyncio.run(test())


def test_long_answer_is_split_into_short_sse_lines() -> None:
    async def test() -> None:
        async with (
            serving(session(cell("FINAL('ü' * 300_000)"))) as server,
            session_of(server) as http,
        ):
            body = {"messages": [user(LONG, "n?")], "stream": True}
            async with http.post(f"{server.url}/chat/completions", json=body) as answer:
                assert answer.content_type == "text/event-stream"
                lines = (await answer.read()).split(b"\n\n")
            assert max(map(len, lines)) < 1 << 16
            assert lines[-2] == b"data: [DONE]"
            assert (
                sum(line.decode().count("ü") for line in lines) == 300_000 + 1
            )  # the code says it once

    asyncio.run(test())


def test_idle_stream_is_kept_alive_by_comments() -> None:
    """By comments, which no client takes for events. A later failure is sent in the stream, because
    the status line is already out."""

    async def test() -> None:
        pinged = asyncio.Event()

        async def model(_: Any) -> Any:
            await pinged.wait()
            return refused(401, "wrong key")

        async with serving(model, ping_s=0.05) as server, session_of(server) as http:
            body = {"messages": [user(LONG, "n?")], "stream": True}
            async with http.post(f"{server.url}/chat/completions", json=body) as answer:
                assert answer.status == 200
                lines = []
                async for line in answer.content:
                    lines.append(line)
                    if line == b": waiting\n":
                        pinged.set()
            assert b'"role":"assistant"' in lines[0]
            assert b"model_failed" in lines[-4]
            assert lines[-2] == b"data: [DONE]\n"

    asyncio.run(test())


def test_unpaired_surrogates_are_escaped() -> None:
    async def test() -> None:
        odd = session(cell("print('a' + chr(0xD800))"), cell("FINAL('b' + chr(0xD800))"))
        async with serving(odd) as server, asking(server) as client:
            reasoning, content, *_ = await collect_stream(client, 1)
            assert "a\\ud800" in reasoning
            assert content == "b\\ud800"

    asyncio.run(test())


def test_reply_is_shown_while_it_arrives(tmp_path: Path) -> None:
    """The model waits in the middle of its first reply until the caller has seen its beginning."""

    async def test() -> None:
        seen = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length[1]))  # type: ignore[index]
            message = Message("assistant", f"let us look\n{cell('FINAL(42)')}")
            body = completion_body(Reply(message, Usage(9, 9, calls=1)), "m")
            chunks = completion_stream_chunks(body, 9, True)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for number, chunk in enumerate(chunks):
                writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                if number == 3:
                    await seen.wait()
            writer.write(b"data: [DONE]\n\n")
            writer.close()

        model = await asyncio.start_server(talk, "127.0.0.1", 0)
        name = f"vllm:m@http://127.0.0.1:{model.sockets[0].getsockname()[1]}/v1"
        store, reasoning, content = Store(tmp_path), "", ""
        async with serving(name, store=store) as server, asking(server) as client:
            stream = await client.chat.completions.create(
                model="m", stream=True, messages=[user(LONG, "n?")]
            )
            async for event in stream:
                if event.choices:
                    delta = event.choices[0].delta
                    reasoning += getattr(delta, "reasoning_content", None) or ""
                    content += delta.content or ""
                if "let" in reasoning:
                    seen.set()
        model.close()
        await model.wait_closed()
        assert content == "42"
        assert reasoning.count("let us look") == 1
        assert reasoning.startswith("turn 1\nlet us look\n```repl\nFINAL(42)\n```\n")

    asyncio.run(test())
