import asyncio

import pytest

from ramify.clients.rate_limited_requests import AdaptiveConcurrencyLimiter
from tests.clients.helpers import run, run_skipping


def test_limiter_caps_concurrency_and_serves_in_order_of_arrival():
    async def main():
        gate, order, most = AdaptiveConcurrencyLimiter(3), [], 0

        async def one(i):
            nonlocal most
            await gate.acquire()
            order.append(i)
            most = max(most, gate.in_flight)
            await asyncio.sleep(0)
            gate.release()

        await asyncio.gather(*map(one, range(20)))
        return order, most, gate.in_flight

    assert run(main()) == (list(range(20)), 3, 0)


def test_rate_limit_halves_width_once_per_round_and_success_widens_it():
    async def main():
        gate = AdaptiveConcurrencyLimiter(64)
        rounds = [await gate.acquire() for _ in range(64)]
        for entered in rounds:
            gate.slow_down(entered, 0.001)
            gate.release()
        widths = [gate.max_in_flight]
        for _ in range(64):
            gate.speed_up()
        widths.append(gate.max_in_flight)
        for _ in range(4000):
            gate.speed_up()
        return [*widths, gate.max_in_flight]

    assert run(main()) == [32, 35, 64]


def test_width_never_falls_below_one():
    async def main():
        gate = AdaptiveConcurrencyLimiter(4)
        for _ in range(9):
            gate.slow_down(await gate.acquire(), 0.0)
            gate.release()
        return gate.max_in_flight

    assert run(main()) == 1


def test_all_waiters_wait_for_the_longest_pause():
    async def main():
        gate, loop = AdaptiveConcurrencyLimiter(8), asyncio.get_running_loop()
        entered = await gate.acquire()
        started, waits = loop.time(), []
        gate.slow_down(entered, 0.2)
        gate.slow_down(entered, 0.05)
        gate.release()

        async def one():
            await gate.acquire()
            waits.append(loop.time() - started)
            gate.release()

        await asyncio.gather(*(one() for _ in range(5)))
        return min(waits)

    assert run(main()) >= 0.19


@pytest.mark.parametrize("granted", [False, True], ids=["while waiting", "as the turn comes"])
def test_cancelled_waiter_gives_up_its_place(granted):
    async def main():
        gate = AdaptiveConcurrencyLimiter(1)
        await gate.acquire()
        waiting = asyncio.create_task(gate.acquire())
        await asyncio.sleep(0)
        if granted:
            gate.release()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if not granted:
            gate.release()
        await asyncio.wait_for(gate.acquire(), 30)
        return gate.in_flight

    assert run(main()) == 1


def test_waiters_cancelled_during_a_pause_do_not_block_those_behind():
    async def main():
        gate = AdaptiveConcurrencyLimiter(1)
        gate.slow_down(await gate.acquire(), 0.05)
        gate.release()
        early = [asyncio.create_task(gate.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in early:
            task.cancel()
        await asyncio.wait_for(gate.acquire(), 30)
        return gate.in_flight

    assert run(main()) == 1


def test_a_gate_is_slowed_while_it_is_paused_or_narrow():
    async def main():
        gate, states = AdaptiveConcurrencyLimiter(4), []
        entered = [await gate.acquire() for _ in range(4)]
        states.append((gate.is_slowed, gate.pause_remaining_s(), gate.max_in_flight))
        gate.slow_down(entered[0], 10.0)
        assert 9.9 < gate.pause_remaining_s() <= 10.0
        states.append((gate.is_slowed, gate.max_in_flight))
        for _ in range(4):
            gate.release()
        assert await gate.acquire() == entered[0] + 1  # after the pause
        states.append((gate.is_slowed, gate.pause_remaining_s(), gate.max_in_flight))
        for _ in range(5):
            gate.speed_up()
        states.append((gate.is_slowed, gate.max_in_flight))
        gate.speed_up()
        return [*states, (gate.is_slowed, gate.max_in_flight, gate.passed)]

    assert run_skipping(main()) == [
        (False, 0.0, 4),
        (True, 2),
        (True, 0.0, 2),
        (True, 3),
        (False, 4, 6),
    ]


def test_the_width_is_half_of_what_was_in_flight():
    async def main():
        gate = AdaptiveConcurrencyLimiter(64)
        entered, *_ = [await gate.acquire() for _ in range(10)]
        gate.slow_down(entered, 0.0)
        gate.slow_down(entered, 0.0)  # of the same round
        return gate.max_in_flight

    assert run_skipping(main()) == 5


def test_a_freed_slot_goes_to_one_waiter_who_was_not_cancelled():
    async def main():
        gate = AdaptiveConcurrencyLimiter(1)
        await gate.acquire()
        first, second, third = (asyncio.create_task(gate.acquire()) for _ in range(3))
        await asyncio.sleep(0)
        first.cancel()
        gate.release()
        await asyncio.wait_for(second, 60)
        assert (first.cancelled(), third.done(), gate.in_flight) == (True, False, 1)
        gate.release()
        await asyncio.wait_for(third, 60)
        gate.release()
        return gate.in_flight

    assert run_skipping(main()) == 0


def test_a_pause_has_the_time_that_is_left_of_it():
    async def main():
        gate = AdaptiveConcurrencyLimiter(2)
        entered = await gate.acquire()
        gate.slow_down(entered, 0.0)
        over_s = gate.pause_remaining_s()
        gate.slow_down(entered, 0.5)
        return over_s, 0.4 < gate.pause_remaining_s() <= 0.5

    assert run_skipping(main()) == (0.0, True)


def test_a_newcomer_does_not_overtake_when_the_gate_widens():
    async def main():
        gate = AdaptiveConcurrencyLimiter(4)
        entered = [await gate.acquire() for _ in range(2)]
        gate.slow_down(entered[0], 0.001)
        gate.release()
        await asyncio.sleep(1.0)
        first = asyncio.create_task(gate.acquire())
        await asyncio.sleep(1.0)
        assert (first.done(), gate.max_in_flight) == (False, 1)
        gate.speed_up()
        newcomer = asyncio.create_task(gate.acquire())
        await asyncio.sleep(1.0)
        states = first.done(), newcomer.done(), gate.max_in_flight
        newcomer.cancel()
        return states

    assert run_skipping(main()) == (True, False, 2)
