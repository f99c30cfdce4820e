"""A policy served over HTTP, with our own client and with raw requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from ramify.clients.base import Request, Sampling, Tool
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError, RequestRefusedError
from ramify.http_server.access import ListenAddress
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy, from_config
from ramify.serve.policy_server import PolicyServer
from ramify.types.message import Message, Reply
from tests.inference.helpers import WINDOW, logits, policy
from tests.models.templates import tokenizer_of

USER = Message("user", "count rows of 'red'\nlen 812")


@asynccontextmanager
async def serving(
    made: Policy | None = None, **options: Any
) -> AsyncIterator[tuple[PolicyServer, LocalClient]]:
    client = LocalClient(made or policy(), slots=4)
    try:
        async with PolicyServer(client, name="mine", **options) as server:
            yield server, client
    finally:
        await client.close()


def session(server: PolicyServer) -> aiohttp.ClientSession:
    """A client that presents the server's key."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.key}"})


async def ask(
    server: PolicyServer, *messages: Message, key: str | None = None, **sampling: Any
) -> Reply:
    pool = RateLimitedClientPool(keys={"vllm": server.key if key is None else key})
    try:
        given = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": True, **sampling}
        client = pool.client(f"vllm:mine@{server.url}")
        return await client.complete(Request(messages or (USER,), Sampling(**given)))
    finally:
        await pool.close()


async def post(server: PolicyServer, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        session(server) as http,
        http.post(
            f"{server.url}/chat/completions",
            data=data,
            headers={"Content-Type": "application/json", **headers},
        ) as answer,
    ):
        return answer.status, await answer.json()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_served_replies_equal_engine_replies() -> None:
    async def test() -> None:
        async with serving() as (server, client):
            ours = await client.complete(Request((USER,), Sampling(12, 1.0, seed=7)))
            theirs = await ask(server)
            assert (theirs.prompt_ids, theirs.token_ids) == (ours.prompt_ids, ours.token_ids)
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
            assert (theirs.message, theirs.finish) == (ours.message, "length")
            assert (theirs.usage.input_tokens, theirs.usage.output_tokens) == (
                ours.usage.input_tokens,
                12,
            )

    run(test)


def test_next_turn_reuses_previous_token_ids() -> None:
    """Even if the sampled text would be tokenized differently."""

    async def test() -> None:
        async with serving() as (server, client):
            for seed in range(4):
                first = await ask(server, seed=seed)
                assert first.prompt_ids is not None
                assert first.token_ids is not None
                second = await ask(server, USER, first.message, Message("user", "17"), seed=seed)
                path = first.prompt_ids + first.token_ids
                assert second.prompt_ids is not None
                assert second.prompt_ids[: len(path)] == path
                assert second.usage.cached_tokens == len(path) - 1
            edited = Message("assistant", first.message.content + "!")
            afresh = await ask(server, USER, edited, Message("user", "17"))
            assert afresh.prompt_ids == tuple(
                client.policy.renderer.prompt([USER, edited, Message("user", "17")])
            )

    run(test)


async def events(
    server: PolicyServer, body: dict[str, Any], grows: threading.Event
) -> list[dict[str, Any]]:
    """Return the events of a stream; sets ``grows`` once some text has arrived."""
    found = []
    async with (
        session(server) as http,
        http.post(f"{server.url}/chat/completions", json=body) as answer,
    ):
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        async for line in answer.content:
            if line.strip():
                found.append(line.decode().removeprefix("data: ").strip())
            if b'"content":"' in line.replace(b'"content":""', b""):
                grows.set()
    assert found.pop() == "[DONE]"
    return [json.loads(each) for each in found]


def test_stream_adds_up_to_full_reply() -> None:
    async def test() -> None:
        async with serving() as (server, client):
            body = {
                "messages": [{"role": "user", "content": USER.content}],
                "max_tokens": 150,
                "seed": 7,
                "temperature": 1,
                "return_token_ids": True,
                "logprobs": True,
            }
            status, whole = await post(server, body)
            assert status == 200
            grows, steps = threading.Event(), itertools.count()

            def waits_in_the_middle(*_: object) -> None:
                if next(steps) == 60:
                    grows.wait(60)

            client.policy.model.get_submodule("model.norm").register_forward_hook(
                waits_in_the_middle
            )
            parts = await events(
                server, {**body, "stream": True, "stream_options": {"include_usage": True}}, grows
            )
            text = "".join(
                part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"]
            )
            assert text == whole["choices"][0]["message"]["content"]
            assert len(parts) > 4
            last, usage = parts[-2], parts[-1]
            assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
            assert last["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
            assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
            told = whole["choices"][0]["logprobs"]["content"]
            assert len(told) == whole["usage"]["completion_tokens"]
            assert all(
                each["bytes"] is None or bytes(each["bytes"]).decode() == each["token"]
                for each in told
            )

    run(test)


def test_client_disconnect_frees_the_slot() -> None:
    async def test() -> None:
        async with serving() as (server, client):
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 240,
                "seed": 1,
                "temperature": 1,
            }

            async def inside() -> int:
                return len(await client.run(lambda: list(client.engine)))

            for stream in (False, True):
                client.pause()  # so that the request is cancelled in the middle of its reply
                request = asyncio.ensure_future(post(server, {**body, "stream": stream}))
                while not await inside():
                    await asyncio.sleep(0)
                request.cancel()
                while not all(
                    each.cancelled for each in await client.run(lambda: list(client.engine))
                ):
                    await asyncio.sleep(0)
                client.resume()
                while await inside():
                    await asyncio.sleep(0)
                status, answer = await post(server, {**body, "max_tokens": 3})
                assert (status, answer["usage"]["completion_tokens"]) == (200, 3)

    run(test)


def test_engine_failure_mid_stream_is_sent_as_last_event() -> None:
    async def test() -> None:
        async with serving() as (server, client):
            grows, steps = threading.Event(), 0

            def fails(*_: object) -> None:
                nonlocal steps
                steps += 1
                if steps == 60:
                    grows.wait(60)
                    raise ZeroDivisionError("broken")

            client.policy.model.get_submodule("model.norm").register_forward_hook(fails)
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 200,
                "seed": 1,
                "temperature": 1,
            }
            found = await events(server, {**body, "stream": True}, grows)
            assert "the engine failed: ZeroDivisionError: broken" in found[-1]["error"]["message"]
            steps = 59
            status, answer = await post(server, body)
            assert (status, answer["error"]["type"]) == (503, "server_error")

    run(test)


def test_configured_key_is_required() -> None:
    async def test() -> None:
        async with serving(key="secret") as (server, _):
            assert (await ask(server, key="secret")).usage.output_tokens == 12
            for key in ("", "wrong"):
                with pytest.raises(RequestRefusedError, match="401"):
                    await ask(server, key=key)
            async with (
                session(server) as http,
                http.get(f"{server.url.removesuffix('/v1')}/health") as answer,
            ):
                said = await answer.json()
                told = (said["status"], said["version"], said["in_flight"])
                assert (answer.status, *told) == (200, "ok", 0, 0)

    run(test)


def test_server_that_takes_weights_always_needs_a_key() -> None:
    async def test() -> None:
        client = LocalClient(policy())
        assert PolicyServer(client, name="x", address=ListenAddress(is_open=True)).key == ""
        assert PolicyServer(client, name="x", address=ListenAddress()).key.startswith("rk-")
        with pytest.raises(
            ConfigError, match=r"always needs a key, .*: remove --open-to-this-machine"
        ):
            PolicyServer(
                client, name="x", address=ListenAddress(is_open=True), weight_transfer=True
            )
        await client.close()

    run(test)


def test_models_endpoint_and_unknown_path() -> None:
    async def test() -> None:
        async with serving() as (server, _), session(server) as http:
            async with http.get(f"{server.url}/models") as answer:
                assert (await answer.json())["data"][0] == {
                    "id": "mine",
                    "object": "model",
                    "owned_by": "ramify",
                    "max_model_len": WINDOW,
                }
            async with http.get(f"{server.url}/nowhere") as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (
                    404,
                    "invalid_request_error",
                )

    run(test)


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of}}


GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "says", "code"),
    [
        (b"{", "not a request for a chat completion", None),
        (b'{"messages": [], "metadata": %s}' % (b"[" * 9000 + b"]" * 9000), "too deeply", None),
        ({"messages": "x"}, "not a request for a chat completion", None),
        ({"messages": []}, "messages is empty", None),
        ({**GOOD, "n": 300}, "n=300 must be", None),
        ({**GOOD, "frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported", None),
        ({**GOOD, "response_format": {"type": "xml"}}, "response_format=", None),
        ({**GOOD, "response_format": schema({"type": 5})}, "the JSON schema is not valid", None),
        ({**GOOD, "max_tokens": 0}, "max_tokens is 0", None),
        ({**GOOD, "temperature": -1}, "temperature=-1", None),
        ({**GOOD, "top_p": 0}, "top_p=0", None),
        ({**GOOD, "messages": [{"role": "system", "content": "x"}]}, "no system message", None),
        (
            {**GOOD, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url is not supported",
            None,
        ),
        (
            {**GOOD, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "remove native tools",
            None,
        ),
        (
            {**GOOD, "messages": [{"role": "user", "content": "1234567890" * 40}]},
            "the window",
            "context_length_exceeded",
        ),
    ],
)
def test_invalid_request_is_refused_with_reason(body: Any, says: str, code: str | None) -> None:
    async def test() -> None:
        async with serving() as (server, _):
            for stream in (False, True):
                given = {**body, "stream": stream} if isinstance(body, dict) else body
                status, answer = await post(server, given)
                assert (status, answer["error"]["code"]) == (400, code)
                assert says in answer["error"]["message"]

    run(test)


def test_many_replies_in_progress_are_refused_until_some_have_ended() -> None:
    async def test() -> None:
        async with serving(max_replies=3, weight_transfer=True) as (server, _):
            for stream in (False, True):
                status, answer = await post(server, {**GOOD, "n": 4, "stream": stream})
                assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
            root = server.url.removesuffix("/v1")
            async with session(server) as http:
                (await http.post(f"{root}/sleep", json={})).raise_for_status()
                waiting = [asyncio.create_task(post(server, GOOD)) for _ in range(4)]
                done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                (refused,) = (each.result() for each in done)
                assert refused[0] == 429
                assert "3 replies are in progress" in refused[1]["error"]["message"]
                (await http.post(f"{root}/wake_up", json={})).raise_for_status()
            assert [(await each)[0] for each in others] == [200] * 3
            assert (await post(server, {**GOOD, "n": 3}))[0] == 200

    run(test)


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e300])
def test_extreme_temperature_has_finite_logprobs(temperature: float) -> None:
    async def test() -> None:
        async with serving() as (server, _):
            reply = await ask(server, temperature=temperature, max_tokens=4)
            assert reply.logprobs is not None
            assert all(math.isfinite(each) for each in reply.logprobs)

    run(test)


def test_reply_that_does_not_match_its_schema_is_an_error() -> None:
    async def test() -> None:
        async with serving() as (server, _):
            ends = list("abcdefghijklmnopqrstuvwxyz0123456789<|>")
            body = {**GOOD, "stop": ends, "max_tokens": 99, "seed": 1, "temperature": 1}
            status, free = await post(server, body)
            assert (status, free["choices"][0]["finish_reason"]) == (200, "stop")
            given = {**body, "response_format": schema({"type": "object"})}
            status, answer = await post(server, given)
            assert (status, answer["error"]["code"]) == (400, "json_validate_failed")
            text = free["choices"][0]["message"]["content"]
            assert answer["error"]["failed_generation"] == text

    run(test)


def test_replies_of_one_request_differ_by_their_seeds() -> None:
    """Reply i is the one of seed + i, whole or streamed."""

    async def test() -> None:
        async with serving() as (server, _):
            body = {**GOOD, "max_tokens": 8, "seed": 7, "temperature": 1, "return_token_ids": True}
            _, together = await post(server, {**body, "n": 3})
            apart = [(await post(server, {**body, "seed": 7 + i}))[1] for i in range(3)]
            expected = [each["choices"][0]["token_ids"] for each in apart]
            assert [each["token_ids"] for each in together["choices"]] == expected
            assert len({*map(tuple, expected)}) == 3
            parts = await events(server, {**body, "n": 3, "stream": True}, threading.Event())
            choices = [choice for part in parts for choice in part["choices"]]
            ids = {each["index"]: each["token_ids"] for each in choices if "token_ids" in each}
            assert [ids[index] for index in range(3)] == expected
            assert together["usage"]["completion_tokens"] == 24

    run(test)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"temperature": 1, "top_k": 2}])
def test_likeliest_tokens_are_those_of_the_distribution_that_was_drawn_from(
    options: dict[str, Any],
) -> None:
    async def test() -> None:
        async with serving() as (server, client):
            given = {"max_tokens": 3, "seed": 7, "return_token_ids": True, **options}
            _, answer = await post(server, {**GOOD, **given, "logprobs": True, "top_logprobs": 3})
            ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
            temperature, top_k = given["temperature"], given.get("top_k", 0)
            scaled = logits(client.policy, ids) / temperature
            num_prompt = len(answer["prompt_token_ids"])
            for index, entry in enumerate(answer["choices"][0]["logprobs"]["content"]):
                expected = scaled[num_prompt + index - 1].log_softmax(-1).topk(top_k or 3).values
                expected = expected - expected.logsumexp(-1) if top_k else expected
                found = [each["logprob"] for each in entry["top_logprobs"]]
                assert found == pytest.approx(expected.tolist(), abs=1e-4)
                assert entry["logprob"] in found or not top_k

    run(test)


def test_options_without_effect_are_accepted() -> None:
    async def test() -> None:
        async with serving() as (server, _):
            more = {
                "n": 1,
                "seed": 1,
                "frequency_penalty": 0,
                "user": "me",
                "metadata": {},
                "top_logprobs": None,
                "tool_choice": "auto",
            }
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            status, answer = await post(
                server, {**GOOD, **more, "messages": [{"role": "user", "content": parts}]}
            )
            assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
            status, answer = await post(server, GOOD, **{"Content-Type": "text/plain"})
            assert (status, "application/json" in answer["error"]["message"]) == (415, True)

    run(test)


def test_native_tools_are_rendered_by_chat_template() -> None:
    async def test() -> None:
        made = policy()
        chat = from_config(
            made.config.__class__.from_dict({**made.config.to_dict(), "vocab_size": 310}),
            tokenizer_of("qwen3"),
            0,
        )
        async with serving(chat) as (server, _):
            pool = RateLimitedClientPool(keys={"vllm": server.key})
            client = pool.client(f"vllm:mine@{server.url}")
            tool = Tool("look", "Look.", {"type": "object", "properties": {}})
            request = Request((USER,), Sampling(5, 1.0, seed=1, logprobs=True), tools=(tool,))
            reply = await client.complete(request)
            assert reply.prompt_ids == tuple(chat.renderer.prompt([USER], [tool]))
            await pool.close()

    run(test)
