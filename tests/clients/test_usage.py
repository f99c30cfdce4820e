"""Impossible usage figures are settled at their upper bound, so that no limit is exceeded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.testing.scripted_client import ScriptedClient
from ramify.types.message import Message, Reply, Usage
from tests.clients.helpers import Books, request, run, says

MOST = request().max_usage()
FAIR = {"prompt_tokens": 5, "completion_tokens": 2}
IMPOSSIBLE = {
    "more cached than given": FAIR | {"prompt_tokens_details": {"cached_tokens": 500}},
    "more cached, as deepseek says it": FAIR | {"prompt_cache_hit_tokens": 500},
    "more stored than given": FAIR | {"prompt_tokens_details": {"cache_write_tokens": 6}},
    "cached and stored together": FAIR
    | {"prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 3}},
    "negative cached": FAIR | {"prompt_tokens_details": {"cached_tokens": -5}},
    "negative prompt": FAIR | {"prompt_tokens": -5},
    "negative reply": FAIR | {"completion_tokens": -2},
    "negative total": FAIR | {"total_tokens": -7},
    "negative thinking": FAIR | {"completion_tokens_details": {"reasoning_tokens": -1}},
    "a fraction": FAIR | {"prompt_tokens": 4.5},
    "a truth value": FAIR | {"prompt_tokens": True},
    "text": FAIR | {"completion_tokens": "2"},
    "a list": [5, 2],
    "no reply, and a total below the prompt": {"prompt_tokens": 5, "total_tokens": 3},
    "missing": None,
    "huge": FAIR | {"completion_tokens": 10**18},
    "huge as a float": FAIR | {"prompt_tokens": 1e30},
}
POSSIBLE = {
    "total below its parts": (FAIR | {"total_tokens": 1}, Usage(5, 2, calls=1)),
    "thinking beside the reply": (
        FAIR | {"reasoning_tokens": 9},
        Usage(5, 11, reasoning_tokens=9, calls=1),
    ),
    "whole floats": ({"prompt_tokens": 5.0, "completion_tokens": 2.0}, Usage(5, 2, calls=1)),
    "all of it cached": (
        FAIR | {"prompt_tokens_details": {"cached_tokens": 5}},
        Usage(5, 2, 5, calls=1),
    ),
    "details of another form": (FAIR | {"prompt_tokens_details": [1]}, Usage(5, 2, calls=1)),
}


def settle_reply(body: bytes) -> tuple[Usage, float | None, str]:
    """Settle one reply of a server and return its usage, cost and text."""

    async def main() -> tuple[Usage, float | None, str]:
        async with says(body) as server:
            pool, books = (
                RateLimitedClientPool(
                    base_urls={"openai": server.root}, keys={"openai": "k-12345"}
                ),
                Books(),
            )
            reply = await pool.ask(pool.client("openai:m"), request(), books)
            await pool.close()
            assert books.kinds == ["settle"]
            return books.usage, books.cost, reply.message.content

    found: tuple[Usage, float | None, str] = run(main())
    return found


def completion_with_usage(usage: Any) -> bytes:
    choice = {"message": {"content": "x"}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [choice], "usage": usage})


@pytest.mark.parametrize("usage", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_usage_is_settled_at_upper_bound(usage: Any) -> None:
    assert settle_reply(completion_with_usage(usage)) == (MOST, None, "x")


@pytest.mark.parametrize(("usage", "read"), POSSIBLE.values(), ids=POSSIBLE)
def test_unusual_but_possible_usage_is_read(usage: Any, read: Usage) -> None:
    assert settle_reply(completion_with_usage(usage)) == (read, None, "x")


def test_nan_usage_and_cost_do_not_lose_the_reply() -> None:
    body = (
        completion_with_usage(FAIR | {"cost": 1})
        .replace(b'"prompt_tokens":5', b'"prompt_tokens":NaN')
        .replace(b":1}", b":NaN}")
    )
    assert b"NaN" in body
    assert settle_reply(body) == (MOST, None, "x")


@pytest.mark.parametrize("cost", [-1.0, True, "0.5", None])
def test_invalid_cost_is_ignored(cost: Any) -> None:
    assert settle_reply(completion_with_usage(FAIR | {"cost": cost})) == (
        Usage(5, 2, calls=1),
        None,
        "x",
    )


def test_impossible_usage_of_custom_client_is_settled_at_upper_bound() -> None:
    async def main() -> list[Usage]:
        odd = [
            Usage(5, 2, 500, calls=1),
            Usage(-5, 2, calls=1),
            Usage(5, 2, reasoning_tokens=3, calls=1),
        ]
        client = ScriptedClient([Reply(Message("assistant", "x"), each) for each in odd])
        return [(await RateLimitedClientPool().ask(client, request(), Books())).usage for _ in odd]

    assert run(main()) == [MOST] * 3
