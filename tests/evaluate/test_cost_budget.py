"""A limit in dollars over all attempts of an evaluation."""

from __future__ import annotations

import asyncio
import random

import pytest

from ramify.errors import ConfigError
from ramify.evaluate.cost_budget import CostBudget


def test_sum_of_spent_and_held_never_exceeds_the_limit() -> None:
    """Random costs, eight workers: what is held beside what is spent stays below 10 dollars."""

    async def run(seed: int) -> tuple[float, float, int]:
        rng, budget = random.Random(seed), CostBudget(10.0, 1.5, spent=2.0)
        held: list[float] = []
        most = 0.0
        num = 0

        async def worker() -> None:
            nonlocal most, num
            while (dollars := await budget.reserve()) is not None:
                held.append(dollars)
                num += 1
                most = max(most, budget.spent + sum(held))
                await asyncio.sleep(rng.random() * 1e-3)
                held.remove(dollars)
                budget.settle(dollars, dollars * rng.random())

        await asyncio.gather(*(worker() for _ in range(8)))
        assert budget.is_used_up
        return most, budget.spent, num

    for seed in range(20):
        most, spent, num = asyncio.run(run(seed))
        assert most <= 10.0 + 1e-9
        assert 9.25 < spent <= 10.0
        assert num > 6


def test_attempt_waits_for_what_others_may_give_back() -> None:
    async def run() -> None:
        budget = CostBudget(3.0, 2.0)
        assert await budget.reserve() == 2.0
        waiting = asyncio.ensure_future(budget.reserve())
        await asyncio.sleep(0)
        assert not waiting.done()
        budget.settle(2.0, 0.5)
        assert await waiting == 2.0
        budget.settle(2.0, 1.0)
        assert await budget.reserve() == pytest.approx(1.5)  # the rest, with nothing else running
        budget.settle(1.5, 0.6)
        assert await budget.reserve() is None  # 0.9 are left, less than half of an attempt's limit

    asyncio.run(run())


def test_budget_that_allows_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a budget of \$0, with \$1 for one attempt"):
        CostBudget(0.0, 1.0)
