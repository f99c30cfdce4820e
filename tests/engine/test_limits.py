"""The ledger: no limit is exceeded, no request waits forever, and the held amount stays reserved."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.clients.base import Price
from ramify.engine.limits import Ledger, Limits, ResourceAmount, bound
from ramify.errors import ConfigError, LimitReached
from ramify.types.message import Usage
from ramify.types.trajectory import Stop


def test_limits_of_zero_are_refused_except_depth() -> None:
    assert Limits(max_depth=0).max_depth == 0
    for name in (
        "max_turns",
        "max_calls",
        "max_tokens",
        "max_cost",
        "max_seconds",
        "max_concurrency",
    ):
        with pytest.raises(ConfigError, match=f"limit {name}=0 allows nothing"):
            Limits(**{name: 0})
    with pytest.raises(ConfigError, match="max_depth=-1"):
        Limits(max_depth=-1)


def test_default_cost_limit_applies_only_with_prices() -> None:
    assert Ledger(Limits(), priced=True).limit.cost == 5.0
    assert Ledger(Limits(), priced=False).limit.cost == math.inf


def test_bound_uses_the_most_expensive_prompt_price() -> None:
    price = Price(input=1.0, output=2.0, cached=0.1, cache_write=1.25)
    assert bound(1_000_000, 500_000, price) == ResourceAmount(1, 1_500_000, 1.25 + 1.0)
    assert bound(10, 5, None) == ResourceAmount(1, 15, 0.0)


def test_request_waits_for_freed_budget_and_is_refused_when_none_can_be_freed() -> None:
    async def scenario() -> list[str]:
        ledger = Ledger(Limits(max_calls=2), priced=False)
        ledger.hold(ResourceAmount(calls=1))
        seen: list[str] = []

        async def ask(name: str) -> None:
            try:
                await ledger.reserve(ResourceAmount(calls=1))
                seen.append(f"{name} in")
            except LimitReached as reached:
                seen.append(f"{name} {reached.stop}")

        await ask("a")
        waiting = [asyncio.create_task(ask(name)) for name in "bc"]
        await asyncio.sleep(0)
        assert seen == ["a in"]
        ledger.free(ResourceAmount(calls=1))
        await asyncio.sleep(0)
        assert seen == ["a in", "b in"]
        ledger.settle(ResourceAmount(calls=1), Usage(calls=1), None)
        await asyncio.gather(*waiting)
        return seen

    assert asyncio.run(scenario()) == ["a in", "b in", "c max_calls"]


def test_a_cancelled_wait_leaves_no_reservation() -> None:
    async def scenario() -> ResourceAmount:
        ledger = Ledger(Limits(max_calls=1), priced=False)
        await ledger.reserve(ResourceAmount(1))
        waiting = asyncio.create_task(ledger.reserve(ResourceAmount(1)))
        await asyncio.sleep(0)
        ledger.free(ResourceAmount(1))  # admits the waiter, which is cancelled before it runs again
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return ledger.outstanding

    assert asyncio.run(scenario()) == ResourceAmount(0, 0, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_calls=st.integers(1, 12),
    max_tokens=st.integers(1, 400),
    max_cents=st.integers(1, 50),
    held=st.integers(0, 1),
)
def test_no_schedule_exceeds_a_limit(
    seed: int, max_calls: int, max_tokens: int, max_cents: int, held: int
) -> None:
    """Forty askers with random sizes, outcomes and timing: at every step spent + outstanding + held
    is within limits."""

    async def scenario() -> None:
        rng = random.Random(seed)
        limits = Limits(max_calls=max_calls, max_tokens=max_tokens, max_cost=max_cents / 100)
        ledger = Ledger(limits, priced=True)
        ledger.hold(ResourceAmount(held, 5 * held, 0.001 * held))

        def check() -> None:
            total = ledger.spent.plus(ledger.outstanding).plus(ledger.held)
            assert total.calls <= max_calls
            assert total.tokens <= max_tokens
            assert total.cost <= max_cents / 100 * (1 + 1e-6)

        async def asker() -> bool:
            amount = ResourceAmount(1, rng.randint(1, 60), rng.random() / 20)
            try:
                await ledger.reserve(amount)
            except LimitReached as reached:
                return Stop(reached.stop).is_truncated()
            check()
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                ledger.free(amount)
            else:
                used = rng.randint(0, amount.tokens)
                ledger.settle(amount, Usage(input_tokens=used, calls=1), amount.cost * rng.random())
            check()
            return True

        assert all(await asyncio.wait_for(asyncio.gather(*(asker() for _ in range(40))), 100))
        assert ledger.outstanding.calls == 0
        assert ledger.outstanding.tokens == 0

    asyncio.run(scenario())
