"""The ledger: no limit is exceeded, no request waits forever, and the held amount stays reserved."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.clients.base import Price
from ramify.engine.limits import (
    BudgetAmount,
    BudgetLedger,
    BudgetReservation,
    Limits,
    ReservationOverrun,
    max_request_amount,
)
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


def test_documented_defaults() -> None:
    assert msgspec.to_builtins(Limits()) == {
        "max_turns": 30,
        "max_depth": 1,
        "max_calls": 1000,
        "max_tokens": 20_000_000,
        "max_cost": None,
        "max_seconds": 1800.0,
        "max_concurrency": 64,
        "max_children": 64,
        "max_reply_tokens": 8192,
        "max_sub_reply_tokens": None,
        "max_reasoning_tokens": None,
        "patience_s": 600.0,
        "stall_s": 30.0,
    }
    with pytest.raises(AttributeError):
        Limits().max_turns = 31  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given_limits", "error"),
    [
        ({"max_turns": True}, "Limits: max_turns=True is a bool: give a whole number"),
        ({"max_cost": "5"}, "Limits: max_cost='5' is a str: give a number"),
        ({"max_turn": 5}, "unknown keyword 'max_turn' of Limits: did you mean 'max_turns'"),
        ({"max_seconds": 0.0}, "limit max_seconds=0.0 allows nothing: give a positive number"),
        ({"max_seconds": math.nan}, "limit max_seconds=nan allows nothing"),
        ({"max_calls": 0}, "limit max_calls=0 allows nothing: give a positive number, or omit it"),
        ({"max_depth": -1}, "limit max_depth=-1 allows nothing: 0 allows only the root"),
        ({"max_reasoning_tokens": -1}, "limit max_reasoning_tokens=-1 allows nothing"),
    ],
)
def test_a_wrong_limit_is_named(given_limits: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Limits(**given_limits)
    assert str(raised.value).startswith(error)


def test_smallest_limits() -> None:
    ones = ("max_turns", "max_calls", "max_tokens", "max_concurrency", "max_children")
    assert Limits(**dict.fromkeys(ones, 1)).max_calls == 1
    assert Limits(max_seconds=1e-9, max_cost=1e-300, max_reasoning_tokens=0).max_cost == 1e-300


def test_a_stored_limit_of_another_name_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `max_turn`"):
        msgspec.convert({"max_turn": 5}, Limits)


def test_what_is_kept_for_the_last_word() -> None:
    assert [Limits(max_seconds=s).last_word_s for s in (100, 300, 310)] == [10.0, 30.0, 30.0]
    assert [Limits(max_reply_tokens=n).last_word_tokens for n in (99, 8192)] == [99, 4096]
    assert Limits().retry_patience_s(None) == Limits().retry_patience_s(Stop.DEADLINE) == 600.0
    assert Limits().retry_patience_s(Stop.CANCELLED) == 10.0
    assert Limits(patience_s=3.0).retry_patience_s(Stop.CANCELLED) == 3.0
    assert 0 < Limits(patience_s=0).retry_patience_s() < 1e-6  # 0 would count attempts


def test_default_cost_limit_applies_only_with_prices() -> None:
    assert BudgetLedger(Limits(), priced=True).limit.cost == 5.0
    assert BudgetLedger(Limits(), priced=False).limit.cost == math.inf


def test_bound_uses_the_most_expensive_prompt_price() -> None:
    price = Price(input=1.0, output=2.0, cached=0.1, cache_write=1.25)
    assert max_request_amount(1_000_000, 500_000, price) == BudgetAmount(1, 1_500_000, 1.25 + 1.0)
    assert max_request_amount(10, 5, None) == BudgetAmount(1, 15, 0.0)


def test_request_waits_for_freed_budget_and_is_refused_when_none_can_be_freed() -> None:
    async def scenario() -> list[str]:
        ledger = BudgetLedger(Limits(max_calls=2), priced=False)
        ledger.reserve_final_answer(BudgetAmount(calls=1))
        seen: list[str] = []

        async def ask(name: str) -> None:
            try:
                await ledger.reserve(BudgetAmount(calls=1))
                seen.append(f"{name} in")
            except LimitReached as reached:
                seen.append(f"{name} {reached.stop}")

        await ask("a")
        waiting = [asyncio.create_task(ask(name)) for name in "bc"]
        await asyncio.sleep(0)
        assert seen == ["a in"]
        ledger.release(BudgetAmount(calls=1))
        await asyncio.sleep(0)
        assert seen == ["a in", "b in"]
        ledger.settle(BudgetAmount(calls=1), Usage(calls=1), None)
        await asyncio.gather(*waiting)
        return seen

    assert asyncio.run(scenario()) == ["a in", "b in", "c max_calls"]


def test_a_cancelled_wait_leaves_no_reservation() -> None:
    async def scenario() -> BudgetAmount:
        ledger = BudgetLedger(Limits(max_calls=1), priced=False)
        await ledger.reserve(BudgetAmount(1))
        waiting = asyncio.create_task(ledger.reserve(BudgetAmount(1)))
        await asyncio.sleep(0)
        ledger.release(
            BudgetAmount(1)
        )  # admits the waiter, which is cancelled before it runs again
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return ledger.outstanding

    assert asyncio.run(scenario()) == BudgetAmount(0, 0, 0.0)


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
        ledger = BudgetLedger(limits, priced=True)
        ledger.reserve_final_answer(BudgetAmount(held, 5 * held, 0.001 * held))

        def check() -> None:
            total = ledger.spent.plus(ledger.outstanding).plus(ledger.held)
            assert total.calls <= max_calls
            assert total.tokens <= max_tokens
            assert total.cost <= max_cents / 100 * (1 + 1e-6)

        async def asker() -> bool:
            amount = BudgetAmount(1, rng.randint(1, 60), rng.random() / 20)
            try:
                await ledger.reserve(amount)
            except LimitReached as reached:
                return Stop(reached.stop).is_truncated()
            check()
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                ledger.release(amount)
            else:
                used = rng.randint(0, amount.tokens)
                ledger.settle(amount, Usage(input_tokens=used, calls=1), amount.cost * rng.random())
            check()
            return True

        assert all(await asyncio.wait_for(asyncio.gather(*(asker() for _ in range(40))), 100))
        assert ledger.outstanding.calls == 0
        assert ledger.outstanding.tokens == 0

    asyncio.run(scenario())


def test_a_large_reservation_is_not_overtaken() -> None:
    async def main() -> None:
        ledger, order = BudgetLedger(Limits(max_calls=10), priced=False), []

        async def reserve(num: int) -> None:
            await ledger.reserve(BudgetAmount(num))
            order.append(num)

        await ledger.reserve(BudgetAmount(6))
        large, small = (asyncio.create_task(reserve(num)) for num in (5, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []
        ledger.release(BudgetAmount(6))
        await asyncio.gather(large, small)
        assert order == [5, 1]

    asyncio.run(main())


def test_a_reservation_that_was_made_before_a_report_is_made_again() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(max_tokens=1_000), priced=False)
        first, second = (
            BudgetReservation(ledger, "m", Usage(10, 10, calls=1), None) for _ in range(2)
        )
        await first.reserve()
        await second.reserve()
        assert second.confirm_or_release()
        text = first.settle(Usage(10, 890, calls=1), None, "call 0")
        assert text == "m reported 900 tokens for call 0, which had reserved 20 tokens"
        assert not second.confirm_or_release()
        with pytest.raises(LimitReached):
            await second.reserve()
        assert (ledger.outstanding, ledger.spent.tokens) == (BudgetAmount(), 900)

    asyncio.run(main())


def test_nothing_is_admitted_before_requests_in_flight_are_settled() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(), priced=False)
        first, sent, third = (
            BudgetReservation(ledger, "m", Usage(10, 10, calls=1), None) for _ in "abc"
        )
        await first.reserve()
        await sent.reserve()
        first.settle(Usage(10, 500, calls=1), None, "call 0")
        waiting = asyncio.create_task(third.reserve())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert ledger.outstanding.tokens == 20
        sent.settle(Usage(10, 300, calls=1), None, "call 1")
        await waiting
        assert ledger.outstanding.tokens == 10 + 10 + 490
        assert third.confirm_or_release()

    asyncio.run(main())


def test_a_waiting_request_reserves_as_much_as_was_reported_while_it_waited() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(), priced=False)
        first, sent, third = (
            BudgetReservation(ledger, "m", Usage(10, 10, calls=1), None) for _ in "abc"
        )
        await first.reserve()
        await sent.reserve()
        first.settle(Usage(10, 500, calls=1), None, "call 0")
        waiting = asyncio.create_task(third.reserve())
        await asyncio.sleep(0)
        sent.settle(Usage(10, 700, calls=1), None, "call 1")
        await waiting
        assert ledger.outstanding == third.amount == BudgetAmount(1, 10 + 10 + 690)

    asyncio.run(main())


def test_a_waiter_that_is_refused_and_cancelled_at_once_returns_nothing() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(max_calls=3), priced=False)
        await ledger.reserve(BudgetAmount(2))
        waiting = asyncio.create_task(ledger.reserve(BudgetAmount(2)))
        await asyncio.sleep(0)
        ledger.charge(Usage(calls=2), None)  # refuses the waiter, which is then cancelled
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert ledger.outstanding == BudgetAmount(2)

    asyncio.run(main())


def test_a_billionth_above_a_limit_is_rounding() -> None:
    ledger = BudgetLedger(Limits(max_cost=0.3), priced=True)
    most = 0.3 * (1 + 1e-9)
    assert ledger.limit_exceeded_by(BudgetAmount(cost=most)) is None
    assert ledger.limit_exceeded_by(BudgetAmount(cost=math.nextafter(most, 1))) is Stop.MAX_COST
    reserved = BudgetAmount(1, 20, 0.3)
    assert not ledger.is_over_reservation(reserved, Usage(1, 1), most)
    assert ledger.is_over_reservation(reserved, Usage(1, 1), math.nextafter(most, 1))


def test_a_limit_may_be_used_up_and_rounding_is_tolerated() -> None:
    ledger = BudgetLedger(Limits(max_calls=3, max_tokens=30, max_cost=0.3), priced=True)
    for _ in range(3):
        assert ledger.limit_exceeded_by(BudgetAmount(1, 10, 0.1)) is None
        ledger.charge(Usage(4, 6, calls=1), 0.1)  # three times 0.1 is a little more than 0.3
    assert ledger.spent.cost > 0.3
    assert ledger.limit_exceeded_by(BudgetAmount()) is None
    assert ledger.limit_exceeded_by(BudgetAmount(calls=1)) is Stop.MAX_CALLS
    assert ledger.limit_exceeded_by(BudgetAmount(tokens=1)) is Stop.MAX_TOKENS
    assert ledger.limit_exceeded_by(BudgetAmount(cost=1e-6)) is Stop.MAX_COST
    assert ledger.usage_by_limit() == [
        ("calls", 3, 3),
        ("tokens", 30, 30),
        ("dollars", ledger.spent.cost, 0.3),
    ]


def test_spending_is_summed_with_and_without_prices() -> None:
    ledger = BudgetLedger(Limits(), priced=False)
    assert (ledger.cost, ledger.usage, ledger.held, ledger.is_draining) == (
        None,
        Usage(),
        BudgetAmount(),
        False,
    )
    ledger.charge(Usage(1, 2, calls=1), None)
    assert (ledger.cost, ledger.spent) == (None, BudgetAmount(1, 3, 0.0))
    ledger.charge(Usage(1, 2, calls=1), 0.5)
    ledger.charge(Usage(1, 2, calls=1), 0.25)
    assert (ledger.cost, ledger.usage.calls) == (0.75, 3)
    assert ledger.usage_by_limit() == [("calls", 3, 1000), ("tokens", 9, 20_000_000)]
    assert BudgetLedger(Limits(), priced=True).cost == 0.0


def test_a_hold_replaces_the_one_before_if_it_fits() -> None:
    ledger = BudgetLedger(Limits(max_calls=10, max_tokens=100), priced=False)
    ledger.charge(Usage(50, calls=5), None)
    assert ledger.reserve_final_answer(BudgetAmount(1, 40)) is None
    assert ledger.calls_left() == 4
    assert ledger.reserve_final_answer(BudgetAmount(1, 50)) is None
    assert ledger.reserve_final_answer(BudgetAmount(1, 51)) is Stop.MAX_TOKENS
    assert ledger.held == BudgetAmount(1, 50)
    assert ledger.reserve_final_answer(BudgetAmount(6, 0)) is Stop.MAX_CALLS
    assert ledger.refusals == {
        Stop.MAX_TOKENS: "the next request, with its prompt, may take 51 tokens, and 50 of 100 "
        "were left: raise max_tokens",
        Stop.MAX_CALLS: "5 of 10 requests were used, and one is kept for the final reply: raise "
        "max_calls",
    }


def test_refusals_name_both_numbers() -> None:
    async def refused(ledger: BudgetLedger, amount: BudgetAmount) -> tuple[str, str]:
        with pytest.raises(LimitReached) as raised:
            await ledger.reserve(amount)
        return str(raised.value), ledger.refusals[Stop(raised.value.stop)]

    async def main() -> None:
        held = BudgetLedger(Limits(max_tokens=1_000), priced=False)
        held.reserve_final_answer(BudgetAmount(1, 600))
        held.charge(Usage(500, calls=1), None)  # it had been reserved before the hold
        assert "and 0 of 1,000 were left" in (await refused(held, BudgetAmount(1, 1)))[1]
        held = BudgetLedger(Limits(max_cost=1.0), priced=True)
        held.reserve_final_answer(BudgetAmount(1, 0, 0.75))
        held.charge(Usage(calls=1), 0.5)
        assert "and $0 of $1 were left" in (await refused(held, BudgetAmount(1, 0, 0.1)))[1]
        ledger = BudgetLedger(Limits(max_calls=2, max_tokens=1_000, max_cost=0.5), priced=True)
        ledger.charge(Usage(300, calls=1), 0.125)
        assert await refused(ledger, BudgetAmount(1, 800, 0.0)) == (
            "the run's limit of 1,000 tokens is reached",
            "the next request, with its prompt, may take 800 tokens, and 700 of 1,000 were left: "
            "raise max_tokens",
        )
        assert await refused(ledger, BudgetAmount(1, 1, 0.4)) == (
            "the run's limit of $0.5 is reached",
            "the next request, with its prompt, may cost $0.4, and $0.375 of $0.5 were left: raise "
            "max_cost",
        )
        assert await refused(ledger, BudgetAmount(2, 1, 0.1)) == (
            "the run's limit of 2 calls is reached",
            "1 of 2 requests were used: raise max_calls",
        )
        ledger.last_excess = "m reported much"
        ledger.charge(Usage(700, calls=1), 0.375)
        assert (await refused(ledger, BudgetAmount(0, 1)))[1].endswith(
            "and 0 of 1,000 were left: raise max_tokens"
        )
        assert (await refused(ledger, BudgetAmount(0, 0, 0.1)))[1].startswith(
            "the next request, with its prompt, may cost $0.1, and $0 of $0.5 were left"
        )
        ledger.charge(Usage(1), 0.1)
        assert await refused(ledger, BudgetAmount(0, 1)) == (
            "the run's limit of 1,000 tokens is reached",
            "1,001 of 1,000 tokens were used, because m reported much",
        )
        ledger = BudgetLedger(Limits(max_cost=0.5), priced=True)
        ledger.last_excess = "m reported much"
        ledger.charge(Usage(1), 0.75)
        assert await refused(ledger, BudgetAmount(1, 1)) == (
            "the run's limit of $0.5 is reached",
            "$0.75 of $0.5 were spent, because m reported much",
        )

    asyncio.run(main())


def test_cancelled_waiters_are_passed_over() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(max_calls=2), priced=False)
        await ledger.reserve(BudgetAmount(2))
        first, second = (asyncio.create_task(ledger.reserve(BudgetAmount(2))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        ledger.release(BudgetAmount(2))
        await asyncio.wait_for(second, 60)
        assert ledger.outstanding == BudgetAmount(2)
        ledger.release(BudgetAmount(2))
        await ledger.reserve(BudgetAmount(1))  # at once: no other request waits

    asyncio.run(main())


def test_a_smaller_request_goes_on_when_the_large_one_before_it_is_cancelled() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(max_calls=3), priced=False)
        await ledger.reserve(BudgetAmount(2))
        large, small = (asyncio.create_task(ledger.reserve(BudgetAmount(n))) for n in (2, 1))
        await asyncio.sleep(0)
        assert not small.done()  # in order: the large one first
        large.cancel()
        await asyncio.wait_for(small, 60)  # nothing is released meanwhile
        assert ledger.outstanding == BudgetAmount(3)

    asyncio.run(main())


def test_the_largest_report_of_each_kind_is_kept() -> None:
    """(most, reported, cost) one after the other -> the bound of the next request."""
    most = Usage(100, 50, calls=1)
    excess = ReservationOverrun().updated_with_usage(most, Usage(400, 10), 0.5)
    assert excess == ReservationOverrun(400, 10, 300, 0, 0.5)
    excess = excess.updated_with_usage(most, Usage(20, 80), 0.25)
    assert excess == ReservationOverrun(400, 80, 300, 30, 0.5)
    assert excess.padded_max_usage(Usage(10, 10, calls=1)) == Usage(400, 80, calls=1)
    assert excess.padded_max_usage(Usage(1_000, 1_000)) == Usage(1_300, 1_030)
    assert ReservationOverrun().padded_max_usage(most) == most
    assert ReservationOverrun().padded_max_usage(Usage(0, 0)) == Usage(0, 0)


@pytest.mark.parametrize(
    ("reported", "cost", "is_excess"),
    [
        (Usage(10, 10), 1.0, False),
        (Usage(5, 16), 1.0, True),
        (Usage(1, 1), 1.0 + 1e-12, False),
        (Usage(1, 1), 1.1, True),
        (Usage(1, 1), None, False),
    ],
)
def test_an_excess_is_more_than_was_reserved(
    reported: Usage, cost: float | None, is_excess: bool
) -> None:
    reserved = BudgetAmount(1, 20, 1.0)
    assert (
        BudgetLedger(Limits(), priced=True).is_over_reservation(reserved, reported, cost)
        is is_excess
    )
    assert not BudgetLedger(Limits(), priced=True).is_over_reservation(
        BudgetAmount(1, 20), Usage(1, 1), None
    )
    without = BudgetLedger(Limits(), priced=False)
    assert without.is_over_reservation(reserved, reported, cost) is (reported.total_tokens > 20)


def test_what_a_server_charges_for_a_model_without_a_price_is_reserved_next() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(max_cost=1.0), priced=True)
        first = BudgetReservation(ledger, "m", Usage(10, 10, calls=1), None)
        assert first.cost is None
        await first.reserve()
        text = first.settle(Usage(50, 5, calls=1), 0.0, "call 7")
        assert text == "m reported 55 tokens ($0) for call 7, which had reserved 20 tokens ($0)"
        ledger.excess.clear()
        first.update_for_overrun()
        first.record_excess(Usage(50, 5, calls=1), None, "call 8")
        assert ledger.excess.pop("m").cost == 0.0
        assert ledger.last_excess.endswith("55 tokens for call 8, which had reserved 20 tokens")
        await first.reserve()
        text = first.settle(Usage(5, 5, calls=1), 0.3, "call 0")
        assert text == ("m reported 10 tokens ($0.3) for call 0, which had reserved 20 tokens ($0)")
        later = BudgetReservation(ledger, "m", Usage(10, 10, calls=1), None)
        assert (later.cost, later.amount) == (0.3, BudgetAmount(1, 20, 0.3))
        other = BudgetReservation(ledger, "n", Usage(10, 10, calls=1), None)
        assert other.amount == BudgetAmount(1, 20)
        priced = BudgetReservation(ledger, "m", Usage(10, 10, calls=1), Price(1e5, 1e5))
        assert priced.cost == 2.0

    asyncio.run(main())


def test_unknown_usage_is_booked_as_reserved() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(), priced=True)
        most = Usage(10, 20, calls=1, unknown_calls=1)
        reservation = BudgetReservation(ledger, "m", most, Price(1.0, 2.0))
        await reservation.reserve()
        assert reservation.settle(Usage(calls=1, unknown_calls=1), None, "call 0") == ""
        assert (ledger.usage, ledger.cost) == (most, pytest.approx(50e-6))
        release_unspent = BudgetReservation(ledger, "free", most, Price(0.0, 0.0))
        assert release_unspent.cost == 0.0
        await release_unspent.reserve()
        release_unspent.release()
        assert ledger.outstanding == BudgetAmount()

    asyncio.run(main())


def test_a_request_that_can_never_fit_is_refused_while_others_are_settled() -> None:
    async def main() -> None:
        ledger = BudgetLedger(Limits(max_tokens=100), priced=False)
        first, sent, third = (
            BudgetReservation(ledger, "m", Usage(10, 10, calls=1), None) for _ in "abc"
        )
        await first.reserve()
        await sent.reserve()
        waiting = asyncio.create_task(ledger.reserve(BudgetAmount(1, 70)))
        await asyncio.sleep(0)
        first.settle(Usage(10, 60, calls=1), None, "call 0")
        with pytest.raises(LimitReached):
            await waiting
        assert ledger.is_draining
        with pytest.raises(LimitReached):
            await third.reserve()
        sent.release()
        assert not ledger.is_draining
        assert ledger.outstanding == BudgetAmount()

    asyncio.run(main())
