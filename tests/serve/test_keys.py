"""API keys: limits on concurrent requests and on total spend, also across restarts."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest

from ramify import Limits
from ramify.errors import ConfigError
from ramify.serve.api_keys import ApiKey, ServerApiKeys, read_keys
from tests.serve.serving import LONG, PRICE, asking, cell, serving, session, user


def spent(server: Any, name: str = "a") -> Any:
    return server.keys.callers[name].spent


def test_concurrent_requests_are_limited_per_key_and_server() -> None:
    async def test() -> None:
        going, go_on = asyncio.Event(), asyncio.Event()

        async def model(messages: Any) -> str:
            going.set()
            await go_on.wait()
            return "done"

        keys = {"a": ApiKey(key="one", max_runs=1), "b": ApiKey(key="two")}
        async with (
            serving(model, keys=keys, max_runs=2) as server,
            asking(server, "one") as a,
            asking(server, "two") as b,
        ):
            first = asyncio.ensure_future(
                a.chat.completions.create(model="m", messages=[user("x")])
            )
            await going.wait()
            with pytest.raises(
                openai.RateLimitError, match="this key already has 1 requests in progress"
            ) as caught:
                await a.chat.completions.create(model="m", messages=[user("x")])
            assert caught.value.code == "rate_limit_exceeded"
            assert caught.value.response.headers["retry-after"] == "1"
            other = asyncio.ensure_future(
                b.chat.completions.create(model="m", messages=[user("x")])
            )
            while server.num_runs < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError, match="2 requests are in progress"):
                await b.chat.completions.create(model="m", messages=[user("x")])
            go_on.set()
            assert [(await each).choices[0].message.content for each in (first, other)] == [
                "done",
                "done",
            ]

    asyncio.run(test())


def test_exhausted_key_budget_gives_partial_answer_then_refusal() -> None:
    """The run that reaches the budget ends within it; the next one is refused."""

    async def test() -> None:
        spender = session(
            *[cell("answer['content'] = 'so far'; llm_query('x' * 4000)")] * 100,
            direct=lambda _: "y" * 4000,
        )
        budget = 0.2
        limits = Limits(max_cost=5.0, max_reply_tokens=2000)
        keys = {"a": ApiKey(key="k", max_cost=budget)}
        async with (
            serving(spender, price=PRICE, limits=limits, keys=keys) as server,
            asking(server, "k") as client,
        ):
            stops = []

            async def until_refused() -> None:
                while True:
                    reply = await client.chat.completions.create(
                        model="m", messages=[user(LONG, "n?")]
                    )
                    stops.append(
                        (reply.model_extra["ramify"]["stop"], reply.choices[0].finish_reason)
                    )
                    assert spent(server).cost <= budget

            with pytest.raises(
                openai.RateLimitError, match="the rest of this key's budget is too small"
            ) as caught:
                await until_refused()
            assert caught.value.code == "insufficient_quota"
            assert set(stops) == {("max_cost", "length")}
            assert budget / 2 < spent(server).cost <= budget
            spent(server).cost = budget
            with pytest.raises(openai.RateLimitError, match=r"this key has spent its 0\.2 dollars"):
                await until_refused()

    asyncio.run(test())


def test_concurrent_runs_share_remaining_budget() -> None:
    async def test() -> None:
        going, go_on = asyncio.Event(), asyncio.Event()

        async def model(messages: Any) -> str:
            going.set()
            await go_on.wait()
            return "done"

        keys = {"a": ApiKey(key="k", max_tokens=30_000)}
        async with (
            serving(model, keys=keys, limits=Limits(max_tokens=20_000)) as server,
            asking(server, "k") as client,
        ):
            ask = client.chat.completions.create
            runs = [asyncio.ensure_future(ask(model="m", messages=[user("x")])) for _ in range(2)]
            while server.num_runs < 2:
                await asyncio.sleep(0.01)
            assert spent(server).held_tokens == 30_000
            with pytest.raises(
                openai.RateLimitError, match="held for runs in progress: try again later"
            ):
                await ask(model="m", messages=[user("x")])
            go_on.set()
            used = sum([(await each).usage.total_tokens for each in runs])
            assert (spent(server).tokens, spent(server).held_tokens, spent(server).runs) == (
                used,
                0,
                2,
            )

    asyncio.run(test())


def test_spend_survives_server_restart(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    keys = {"a": ApiKey(key="k", max_tokens=100_000)}
    (caller,) = ServerApiKeys(keys, path).callers.values()

    async def test() -> int:
        async with (
            serving(session(), keys=ServerApiKeys(keys, path)) as server,
            asking(server, "k") as client,
        ):
            reply = await client.chat.completions.create(model="m", messages=[user("x")])
            assert reply.usage is not None
            return reply.usage.total_tokens

    used = asyncio.run(test())
    again = ServerApiKeys(keys, path)
    assert again.callers["a"].spent.tokens == used
    again.callers["a"].reserve_budget(Limits())
    again.save_spending()  # as if the server were killed now: what it held counts as spent
    assert ServerApiKeys({}, path).callers == {}
    assert ServerApiKeys(keys, path).callers["a"].spent.tokens == 100_000
    assert path.stat().st_mode & 0o777 == 0o600
    assert b'"k"' not in path.read_bytes()
    assert caller.spent.tokens == 0


def test_key_file_is_parsed_and_validated(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    path.write_text(
        f'[alice]\nkey = "k"\nmax-runs = 4\nmax-cost = 20.0\n\n[bob]\nsha256 = "{digest}"\n'
    )
    keys = ServerApiKeys(read_keys(path))
    assert keys.bearer_keys is not None
    assert [keys.bearer_keys.caller_of_key(key) for key in ("secret", "k", "K")] == [
        "bob",
        "alice",
        None,
    ]
    assert (keys.caller_named("alice").key.max_runs, keys.caller_named("alice").key.max_cost) == (
        4,
        20.0,
    )
    wrong = {
        '[a]\nkey = "k"\nmax-run = 4\n': r"unknown field `max-run` .*: did you mean 'max-runs'\? known: key, max-c",
        "[a]\nmax-runs = 4\n": "key 'a': give either key or sha256",
        '[a]\nkey = "k"\n[b]\nkey = "k"\n': "two names have the same key",
        '[a]\nkey = "k"\nmax-cost = 0\n': "max-cost=0.0 allows nothing",
        '[a]\nsha256 = "12"\n': "64 hexadecimal digits",
        "[a\n": "not valid TOML",
    }
    for text, says in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            ServerApiKeys(read_keys(path))


def test_dollar_budget_needs_known_prices() -> None:
    async def test() -> None:
        with pytest.raises(
            ConfigError,
            match="key 'a': max-cost cannot be enforced, because scripted:test has no known price",
        ):
            async with serving(session(), keys={"a": ApiKey(key="k", max_cost=1.0)}):
                pass

    asyncio.run(test())
