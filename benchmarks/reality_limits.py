"""The figures of ``reality.py`` about providers whose reports of usage are wrong.

A server on loopback answers every request, and reports usage in one of 20 wrong ways. The model asks
40 sub-calls in each turn and never answers, so that every run ends at a limit. The server knows
which requests were in flight when it reported more than ever before. A run may exceed its limit by
what was reported for these, and by no more.

    python benchmarks/reality_limits.py [--quick]     print a table
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from figures import Figure, show
from reality_providers import SANDBOX, SCAFFOLD

from ramify import RLM, Limits
from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest
from ramify.clients.providers import PriceTable
from ramify.types.message import Usage

MODEL = "openai:gpt-4.1-mini"
MAX_REPLY_TOKENS = 500
MAX_TOKENS = 250_000
MAX_COST = 0.1
CELL = "```repl\nfound = llm_query_batched(['What is in line %d?' % i for i in range(40)])\n```"


class AskedRequest(NamedTuple):
    """A request as the server sees it."""

    number: int
    """Index in the order of arrival."""
    is_root: bool
    most_input: int
    """Upper bound on the tokens of its prompt."""


Lie = Callable[[AskedRequest], dict[str, Any]]


def usage(given: Any, produced: Any, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": given, "completion_tokens": produced, **more}


def reasoning(hidden: int) -> dict[str, Any]:
    """Hidden reasoning beside a reply of nine tokens."""
    return usage(9, 9 + hidden, completion_tokens_details={"reasoning_tokens": hidden})


def _random(asked: AskedRequest) -> dict[str, Any]:
    return usage(9, random.Random(asked.number).randint(1, 60_000))


LIES: dict[str, Lie] = {
    "a prompt of 100,000 tokens": lambda asked: usage(100_000, 9),
    "60,000 tokens of hidden reasoning": lambda asked: reasoning(60_000),
    "100 times the prompt": lambda asked: usage(100 * asked.most_input, 9),
    "ten times the longest reply": lambda asked: usage(9, 10 * MAX_REPLY_TOKENS),
    "zeros": lambda asked: usage(0, 0),
    "no prompt": lambda asked: usage(0, 9),
    "no reply": lambda asked: usage(9, 0),
    "1,000 tokens more each time": lambda asked: usage(9, 1_000 * (asked.number + 1)),
    "twice as much each time": lambda asked: usage(9, 2 ** min(asked.number, 19)),
    "a random number": _random,
    "a lie from the tenth request on": lambda asked: (
        usage(9, 9) if asked.number < 10 else usage(9, 20_000)
    ),
    "a lie in every fifth reply": lambda asked: usage(9, 9 if asked.number % 5 else 20_000),
    "a lie about the root alone": lambda asked: usage(90_000 if asked.is_root else 9, 9),
    "a lie about sub-calls alone": lambda asked: usage(9 if asked.is_root else 9_000, 9),
    "a total above its parts": lambda asked: usage(9, 9, total_tokens=60_000),
    "a prompt that was all stored": lambda asked: usage(
        50_000, 9, prompt_tokens_details={"cache_write_tokens": 50_000}
    ),
    "one token too many": lambda asked: usage(asked.most_input, MAX_REPLY_TOKENS + 1),
    "the whole window": lambda asked: usage(1_000_000, 1_000_000),
    "a million million tokens": lambda asked: usage(10**12, 9),
    "negative numbers": lambda asked: usage(-9, -9),
}
"""How the server reports usage."""


class LyingServer:
    """A chat completions server that reports usage by ``lie``, after ``delay_s``."""

    def __init__(self, lie: Lie, delay_s: float) -> None:
        self.allowed = Usage()
        """The most that may be spent beyond a limit."""
        self.num_asked = 0
        self.num_unknown = 0
        """Requests for which no usable usage was reported."""
        self._lie = lie
        self._delay_s = delay_s
        self._in_flight: dict[int, Usage] = {}
        self._largest = 0
        self._http = MockHttpServer(self._handle)

    async def __aenter__(self) -> str:
        await self._http.start()
        return f"{MODEL}@http://127.0.0.1:{self._http.port}/v1"

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    def _handle(self, exchange: PendingMockRequest) -> None:
        body = msgspec.json.decode(exchange.body)
        messages, most_output = body["messages"], body.get("max_tokens") or MAX_REPLY_TOKENS
        most_input = 64 + sum(16 + len(each["content"].encode()) for each in messages)
        is_root = messages[0]["role"] == "system"
        asked = AskedRequest(self.num_asked, is_root, most_input)
        self.num_asked += 1
        reported = self._lie(asked)
        self._in_flight[asked.number] = _counted(reported)
        self.num_unknown += self._in_flight[asked.number] == Usage()
        loop = asyncio.get_running_loop()
        text = CELL if is_root else "fine"
        loop.call_later(
            self._delay_s, self._answer, exchange, asked, most_input + most_output, text, reported
        )

    def _answer(
        self,
        exchange: PendingMockRequest,
        asked: AskedRequest,
        reserved: int,
        text: str,
        reported: dict[str, Any],
    ) -> None:
        tokens = self._in_flight[asked.number].total_tokens
        if tokens > max(reserved, self._largest):
            self._largest = tokens
            for each in self._in_flight.values():
                self.allowed += each
        del self._in_flight[asked.number]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"choices": [choice], "usage": reported, "model": "m"}
        exchange.send(200, msgspec.json.encode(body))


def _counted(reported: dict[str, Any]) -> Usage:
    """The tokens that a run books for a report, if it believes it."""
    given, produced = reported["prompt_tokens"], reported["completion_tokens"]
    produced = max(produced, reported.get("total_tokens", 0) - given)
    stored = reported.get("prompt_tokens_details", {}).get("cache_write_tokens", 0)
    is_possible = 0 < given <= 1_047_576 and 0 < produced <= 1_047_576
    return Usage(given, produced, cache_write_tokens=stored) if is_possible else Usage()


class LimitOutcome(NamedTuple):
    """How one run kept to its limits."""

    excess: float
    """Spending beyond the limit, as a part of it."""
    allowed: float
    """The most that it may be."""
    is_named: bool
    """Whether the record names the request and both numbers, if there was anything to name."""
    is_unknown_booked: bool
    """Whether replies without a usable report cost at least their longest reply."""


async def _outcome(lie: Lie, limit: str, concurrency: int) -> LimitOutcome:
    server = LyingServer(lie, 0.002)
    bounds: dict[str, Any] = {limit: MAX_TOKENS if limit == "max_tokens" else MAX_COST}
    limits = Limits(
        max_concurrency=concurrency, max_reply_tokens=MAX_REPLY_TOKENS, max_turns=60, **bounds
    )
    async with (
        server as model,
        RLM(model, limits=limits, scaffold=SCAFFOLD, sandbox=SANDBOX) as rlm,
    ):
        result = await rlm.start("text", "?")
    price = PriceTable.load().price(MODEL)
    assert price is not None
    if limit == "max_tokens":
        spent, allowed = result.usage.total_tokens / MAX_TOKENS, server.allowed.total_tokens
        allowed_part = allowed / MAX_TOKENS
    else:
        spent, allowed_part = (result.cost or 0.0) / MAX_COST, price.of(server.allowed) / MAX_COST
    notes = [text for text in result.trajectory.warnings if " reported " in text]
    is_named = not server.allowed.total_tokens or any(
        "call 0" in text and "turn" in text and "had reserved" in text for text in notes
    )
    least = server.num_unknown * MAX_REPLY_TOKENS
    return LimitOutcome(
        max(spent - 1 - 1e-9, 0.0), allowed_part, is_named, result.usage.total_tokens >= least
    )


def measure(quick: bool) -> list[Figure]:
    """Figures of runs whose server reports wrong usage."""
    concurrencies = (16,) if quick else (1, 4, 16, 64)
    cases = [
        (name, limit, concurrency)
        for name in LIES
        for limit in ("max_tokens", "max_cost")
        for concurrency in concurrencies
    ]
    outcomes = {case: asyncio.run(_outcome(LIES[case[0]], *case[1:])) for case in cases}
    over = [case for case, found in outcomes.items() if found.excess > found.allowed]
    unnamed = [case for case, found in outcomes.items() if not found.is_named]
    unbooked = [case for case, found in outcomes.items() if not found.is_unknown_booked]
    for what, wrong in (("over", over), ("unnamed", unnamed), ("not booked", unbooked)):
        for case in wrong:
            print(f"{what}:", *case, outcomes[case])
    steady = [
        found.excess
        for (name, _, concurrency), found in outcomes.items()
        if concurrency == min(concurrencies) and "window" not in name
    ]
    runs = f"{len(cases)} runs with {len(LIES)} kinds of wrong usage"
    return [
        Figure("kinds of wrong usage", len(LIES), "kinds", {}, least=20),
        Figure(f"{runs}: beyond what was in flight", len(over), "runs", {}, floor=0),
        Figure(f"{runs}: not named in the record", len(unnamed), "runs", {}, floor=0),
        Figure(f"{runs}: unknown usage booked too low", len(unbooked), "runs", {}, floor=0),
        Figure(
            f"largest excess over a limit at {min(concurrencies)} requests in flight",
            max(steady),
            "of the limit",
            {},
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs whose server reports wrong usage.")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    show(measure(parser.parse_args().quick))
