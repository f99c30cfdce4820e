"""The budget that all workers of a map on a cluster share: exact, and with lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from ramify.engine.limits import BudgetAmount, Limits
from ramify.errors import LimitReached, RamifyError
from ramify.maps.shared_budget import (
    MapBudgetActor,
    MapRowCounts,
    RemoteBudget,
    TableMapSpending,
    read_spending,
)
from ramify.types.message import Usage

ONE = BudgetAmount(1, 100, 1.0)
PAID = Usage(5, 5, calls=1)
DONE = MapRowCounts(answered=1)


def shared(max_calls: int = 10**9, in_flight: int = 100, **more: Any) -> MapBudgetActor:
    limits = Limits(max_calls=max_calls, max_tokens=10**9, max_cost=1e9)
    return MapBudgetActor(limits, in_flight, is_priced=True, **more)


def remote(budget: MapBudgetActor, attempt: str, pause_remaining_s: float = 0.0) -> RemoteBudget:
    def call(method: str, *given: Any) -> Awaitable[Any]:
        found: Awaitable[Any] = getattr(budget, method)(*given)
        return found

    return RemoteBudget(call, attempt, lambda: pause_remaining_s, lambda reason: None)


def test_two_workers_never_pass_the_limit_by_one_call() -> None:
    async def run() -> None:
        budget = shared(max_calls=50, in_flight=7)
        sent = most = in_flight = 0
        refused: list[str] = []

        async def ask(ledger: RemoteBudget) -> None:
            nonlocal sent, in_flight, most
            try:
                await ledger.reserve(ONE)
            except LimitReached as error:
                refused.append(str(error))
                return
            sent, in_flight = sent + 1, in_flight + 1
            most = max(most, in_flight)
            await asyncio.sleep(0.001)
            in_flight -= 1
            ledger.settle(ONE, PAID, 0.5)

        workers = [remote(budget, name) for name in ("a", "b")]
        for number, worker in enumerate(workers):
            assert await worker.begin_part_attempt(f"part-{number}") == ""
        await asyncio.gather(*(ask(workers[number % 2]) for number in range(80)))
        for worker in workers:
            await worker.end_part_attempt(DONE)
        state = await budget.state()
        assert (sent, len(refused), most) == (50, 30, 7)
        assert set(refused) == {"the map's limit of 50 calls is reached"}
        assert (state.usage.calls, state.cost, state.counts.answered) == (50, 25.0, 2)

    asyncio.run(run())


def test_a_lost_workers_part_is_paid_again_and_counted(tmp_path: Path) -> None:
    async def run() -> None:
        path = str(tmp_path / "record.json")
        budget = shared(max_calls=10, in_flight=2, record=path)
        lost = remote(budget, "lost")
        await lost.begin_part_attempt("part-0")
        await lost.reserve(ONE)
        lost.settle(ONE, PAID, 0.5)
        await lost.reserve(ONE)  # in flight when it is lost: counts as spent
        again = remote(budget, "again")
        await again.begin_part_attempt("part-0")
        state = await budget.state()
        assert (state.num_paid_again, state.usage.calls, state.cost) == (1, 2, 1.5)
        assert state.usage.unknown_calls == 1
        with pytest.raises(RamifyError, match="cannot be reached"):
            await lost.reserve(ONE)
        await lost.close()
        # Both slots are free again.
        await asyncio.wait_for(asyncio.gather(again.reserve(ONE), again.reserve(ONE)), 10)
        again.settle(ONE, PAID, 0.5)
        again.release(ONE)
        await again.end_part_attempt(DONE)
        found = read_spending(path)
        assert found is not None
        assert (found.usage.calls, found.unwritten, found.answered) == (3, 1, 0)
        await budget.mark_written("part-0")
        found = read_spending(path)
        assert found == TableMapSpending(Usage(10, 110, calls=3, unknown_calls=1), 2.0, 0, 1, 0)
        # The next start of the map has seven calls left, and not ten.
        copy = tmp_path / "copy.json"
        copy.write_bytes(Path(path).read_bytes())  # the record itself is locked
        rest = remote(shared(max_calls=10, record=str(copy)), "next")
        await rest.begin_part_attempt("part-1")
        asked = [asyncio.create_task(rest.reserve(ONE)) for _ in range(7)]
        await asyncio.wait_for(asyncio.gather(*asked), 10)
        waiting = asyncio.create_task(rest.reserve(ONE))
        for _ in range(7):
            rest.settle(ONE, PAID, 0.5)
        with pytest.raises(LimitReached):
            await waiting
        await rest.end_part_attempt(DONE)

    asyncio.run(run())


def test_a_silent_worker_gives_its_slot_back() -> None:
    async def run() -> None:
        budget = shared(in_flight=1, silent_s=2.5)
        silent, other = remote(budget, "silent"), remote(budget, "other")
        await silent.begin_part_attempt("part-0")
        await silent.reserve(ONE)
        await other.begin_part_attempt("part-1")
        await asyncio.wait_for(other.reserve(ONE), 20)
        other.settle(ONE, PAID, 0.5)
        await other.end_part_attempt(DONE)
        await silent.close()
        assert (await budget.state()).usage.unknown_calls == 1

    asyncio.run(run())


def test_a_cancelled_reservation_is_returned() -> None:
    async def run() -> None:
        budget = shared(in_flight=1)
        worker = remote(budget, "a")
        await worker.begin_part_attempt("part-0")
        await worker.reserve(ONE)
        second = asyncio.create_task(worker.reserve(ONE))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        worker.settle(ONE, PAID, 0.5)
        await asyncio.wait_for(worker.reserve(ONE), 10)
        worker.release(ONE)
        await worker.end_part_attempt(DONE)
        assert (await budget.state()).usage.calls == 1

    asyncio.run(run())


def test_a_rate_limit_of_one_worker_pauses_the_others() -> None:
    async def run() -> None:
        budget = shared()
        limited, other = remote(budget, "limited", pause_remaining_s=0.3), remote(budget, "other")
        await limited.begin_part_attempt("part-0")
        await other.begin_part_attempt("part-1")
        loop = asyncio.get_running_loop()

        async def ask(worker: RemoteBudget) -> float:
            await worker.reserve(ONE)
            worker.release(ONE)
            return loop.time()

        began_s = loop.time()
        first = asyncio.create_task(ask(limited))
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(ask(other), 20) - began_s > 0.2
        await first
        await limited.end_part_attempt(DONE)
        await other.end_part_attempt(DONE)

    asyncio.run(run())
