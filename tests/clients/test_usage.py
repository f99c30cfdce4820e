"""Usage figures that cannot be: each is booked at its upper bound, so that no limit is passed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.clients.pool import ClientPool
from ramify.clients.scripted import ScriptedClient
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


def booked(body: bytes) -> tuple[Usage, float | None, str]:
    """What one reply of a server is booked as: usage, cost, and its text."""

    async def main() -> tuple[Usage, float | None, str]:
        async with says(body) as server:
            pool, books = (
                ClientPool(base_urls={"openai": server.root}, keys={"openai": "k-12345"}),
                Books(),
            )
            reply = await pool.ask(pool.client("openai:m"), request(), books)
            await pool.close()
            assert books.kinds == ["settle"]
            return books.usage, books.cost, reply.message.content

    found: tuple[Usage, float | None, str] = run(main())
    return found


def sent(usage: Any) -> bytes:
    choice = {"message": {"content": "x"}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [choice], "usage": usage})


@pytest.mark.parametrize("usage", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_is_booked_at_the_upper_bound(usage: Any) -> None:
    assert booked(sent(usage)) == (MOST, None, "x")


@pytest.mark.parametrize(("usage", "read"), POSSIBLE.values(), ids=POSSIBLE)
def test_what_can_be_is_read(usage: Any, read: Usage) -> None:
    assert booked(sent(usage)) == (read, None, "x")


def test_no_number_at_all_costs_no_reply() -> None:
    body = (
        sent(FAIR | {"cost": 1})
        .replace(b'"prompt_tokens":5', b'"prompt_tokens":NaN')
        .replace(b":1}", b":NaN}")
    )
    assert b"NaN" in body
    assert booked(body) == (MOST, None, "x")


@pytest.mark.parametrize("cost", [-1.0, True, "0.5", None])
def test_a_cost_that_is_no_amount_is_left_out(cost: Any) -> None:
    assert booked(sent(FAIR | {"cost": cost})) == (Usage(5, 2, calls=1), None, "x")


def test_a_client_of_ones_own_is_not_believed_either() -> None:
    async def main() -> list[Usage]:
        odd = [
            Usage(5, 2, 500, calls=1),
            Usage(-5, 2, calls=1),
            Usage(5, 2, reasoning_tokens=3, calls=1),
        ]
        client = ScriptedClient([Reply(Message("assistant", "x"), each) for each in odd])
        return [(await ClientPool().ask(client, request(), Books())).usage for _ in odd]

    assert run(main()) == [MOST] * 3
