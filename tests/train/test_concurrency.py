"""RolloutConcurrencyLimiter: the number of concurrent rollouts follows the engine's cache pressure."""

from __future__ import annotations

import asyncio

from ramify.inference.base import CachePressure
from ramify.train.rollouts.rollouter import RolloutConcurrencyLimiter


class Engine:
    """A gauge with a settable value."""

    def __init__(self) -> None:
        self.now: CachePressure | None = CachePressure(0.2, 0, 0)

    async def __call__(self) -> CachePressure | None:
        return self.now


def test_evictions_lower_the_limit_by_a_quarter_once() -> None:
    async def run() -> list[int]:
        engine, limits = Engine(), []
        room = RolloutConcurrencyLimiter(16, engine, least=3)
        async with asyncio.TaskGroup() as tasks:
            leave = asyncio.Event()

            async def rollout() -> None:
                async with room:
                    await leave.wait()

            for _ in range(40):
                tasks.create_task(rollout())
            await asyncio.sleep(0)
            assert room.used == 16
            for pressure in (
                CachePressure(0.2, 0, 5),  # earlier evictions do not count
                CachePressure(0.99, 0, 5),  # full, but no sequence waits
                CachePressure(0.5, 9, 5),  # sequences wait, but not for memory
                CachePressure(0.5, 0, 6),
                CachePressure(0.5, 0, 7),  # sixteen are still running: no second decrease yet
            ):
                engine.now = pressure
                await room.adjust_limit()
                limits.append(room.limit)
            assert room.used == 16
            leave.set()
        return limits

    assert asyncio.run(run()) == [16, 16, 16, 12, 12]


def test_limit_stays_between_least_and_most() -> None:
    async def run() -> list[int]:
        engine = Engine()
        room, limits, leave = RolloutConcurrencyLimiter(6, engine, least=3), [], asyncio.Event()

        async def rollout() -> None:
            async with room:
                await leave.wait()

        async with room:
            for evicted in (0, 1, 2, 3):
                engine.now = CachePressure(0.5, 0, evicted)
                await room.adjust_limit()
                limits.append(room.limit)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(9):
                    tasks.create_task(rollout())
                await asyncio.sleep(0)
                for _ in range(4):
                    await room.adjust_limit()
                    limits.append(room.limit)
                engine.now = CachePressure(0.96, 2, 3)
                await room.adjust_limit()
                engine.now = None  # the engine reports no pressure
                await room.adjust_limit()
                limits.append(room.limit)
                leave.set()
        return limits

    assert asyncio.run(run()) == [6, 4, 3, 3, 4, 5, 6, 6, 4]


def test_slots_are_granted_in_order_and_cancelled_waiters_are_skipped() -> None:
    async def run() -> list[str]:
        room, order, leave = RolloutConcurrencyLimiter(1), [], asyncio.Event()

        async def rollout(name: str) -> None:
            async with room:
                order.append(name)
                await leave.wait()

        tasks = [asyncio.create_task(rollout(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        room.pause()
        tasks[0].cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert (order, room.used) == (["a"], 0)
        leave.set()
        room.resume()
        await asyncio.wait(tasks)
        assert room.used == 0
        return order

    assert asyncio.run(run()) == ["a", "c", "d"]


def test_pressure_is_read_when_a_rollout_ends() -> None:
    async def run() -> int:
        engine = Engine()
        room = RolloutConcurrencyLimiter(8, engine, every_s=0)
        for evicted in (0, 1):
            engine.now = CachePressure(0.5, 0, evicted)
            async with room:
                pass
            await asyncio.sleep(0.01)
        return room.limit

    assert asyncio.run(run()) == 6
