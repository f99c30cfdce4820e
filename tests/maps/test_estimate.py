"""Samples and what is extrapolated from them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import ramify
from ramify import testing
from ramify.maps.estimate import EstimatedAmount, MeasuredRowCost, estimate, extrapolate_total

PRICE = ramify.Price(input=1.0, output=2.0)


def test_a_line_through_the_sizes_gives_the_sum_without_error() -> None:
    """Costs of 1 + 2 * size: a sample of small ones says what the large ones cost."""
    sizes = [number % 10 for number in range(20)]
    amount = extrapolate_total([1 + 2 * size for size in sizes], sizes, 100, 100 * 50)
    assert amount.value == pytest.approx(100 * (1 + 2 * 50))
    assert (amount.low, amount.high) == (pytest.approx(amount.value), pytest.approx(amount.value))


def test_the_interval_of_a_mean_covers_the_sum_as_often_as_it_says() -> None:
    rng, hits = random.Random(1), 0
    for _ in range(400):
        values = [rng.expovariate(1.0) + 1 for _ in range(500)]
        sample = rng.sample(values, 40)
        amount = extrapolate_total(sample, [1] * 40, 500, 500)
        hits += amount.low <= sum(values) <= amount.high
    assert 0.88 <= hits / 400 <= 0.99


@pytest.mark.parametrize("num", [1, 3, 7])
def test_few_questions_give_no_interval(num: int) -> None:
    assert extrapolate_total([1.0] * num, [1] * num, 50, 50) == EstimatedAmount(50.0)
    rows = [MeasuredRowCost(10, 0.01, 2.0, 2.0, 0.0) for _ in range(num)]
    whole = estimate(rows, 50, 50, 500, 4, 0.1, is_priced=True)
    assert (whole.hours.low, whole.hours.high) == (None, None)
    assert whole.cost is not None
    assert (whole.cost.low, whole.cost.high) == (None, None)
    every = estimate(rows, num, num, 10 * num, 4, 0.1, is_priced=True)
    assert every.cost is not None
    assert every.cost.low == every.cost.high == pytest.approx(every.cost.value)


def test_time_of_the_cpu_has_no_interval() -> None:
    rows = [MeasuredRowCost(10, 0.0, 2.0, 2.0, float(number)) for number in range(10)]
    busy = estimate(rows, 1000, 1000, 10_000, 4, 3.0, is_priced=False).hours
    assert busy == EstimatedAmount(pytest.approx(1003 / 3600), None, None)


def test_the_rate_of_a_large_sample_gives_the_time() -> None:
    rows = [MeasuredRowCost(10, 0.01, 0.4, number / 50) for number in range(400)]
    whole = estimate(rows, 10_000, 9_000, 90_000, 20, 5.0, is_priced=True)
    assert whole.hours.value * 3600 == pytest.approx(9_000 / 50), "reading is done while it waits"
    assert whole.cost is not None
    assert whole.cost.value == pytest.approx(90.0)
    assert whole.workers_for_an_hour == 1
    busy = [MeasuredRowCost(10, 0.01, 0.4, number / 50, number / 50) for number in range(400)]
    whole = estimate(busy, 10_000, 9_000, 90_000, 20, 5.0, is_priced=True)
    assert whole.hours.value * 3600 == pytest.approx(9_000 / 50 + 5.0)


def test_a_small_sample_uses_the_replies_and_the_cpu() -> None:
    first = MeasuredRowCost(10, 0.0, 60.0, -1.0, 0.0, is_first=True)
    rows = [first, *(MeasuredRowCost(10, 0.0, 2.0, 2.0, number / 100) for number in range(10))]
    slow = estimate(rows, 1000, 1000, 10_000, 4, 0.1, is_priced=False)
    assert slow.hours.value * 3600 == pytest.approx(1000 * 2.0 / 4)
    rows = [first, *(MeasuredRowCost(10, 0.0, 2.0, 2.0, float(number)) for number in range(10))]
    busy = estimate(rows, 1000, 1000, 10_000, 4, 3.0, is_priced=False)
    assert busy.hours.value * 3600 == pytest.approx(1000 + 3)
    assert busy.cost is None


def test_a_sample_is_paid_once_and_predicts_the_cost_of_the_whole(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [{"text": f"{number} " + "word " * rng.randrange(2, 60)} for number in range(300)]
    rows += rows[:100]
    client = testing.ScriptedClient(lambda messages: "yes", price=PRICE)
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    tried = ramify.map("Is it?", rows, client, sample=40, store=store, out=out)
    assert len(tried.table) == 40
    assert not out.exists()
    whole = tried.estimate
    assert whole is not None
    assert (whole.num_rows, whole.num_questions) == (400, 300)
    asked = len(client.requests)
    done = ramify.map("Is it?", rows, client, store=store, out=out)
    assert len(client.requests) == 300
    assert done.num_known == 100 + asked
    assert done.cost is not None
    assert whole.cost is not None
    assert whole.cost.value == pytest.approx(done.cost, rel=0.1)
