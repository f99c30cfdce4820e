"""The number of concurrent rollouts follows the engine's cache pressure."""

from __future__ import annotations

import asyncio

from ramify.inference.base import CachePressure
from ramify.train.rollouts.rollouter import ConcurrencyController


class Engine:
    """A gauge with a settable value."""

    def __init__(self) -> None:
        self.now: CachePressure | None = CachePressure(0.2, 0, 0)

    async def __call__(self) -> CachePressure | None:
        return self.now


def test_a_quarter_fewer_when_sequences_are_thrown_out_and_one_more_each_time_after() -> None:
    async def run() -> list[int]:
        engine, limits = Engine(), []
        room = ConcurrencyController(16, engine, least=3)
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
                CachePressure(0.2, 0, 5),  # what was thrown out before counts for nothing
                CachePressure(0.99, 0, 5),  # full, but no sequence waits
                CachePressure(0.5, 9, 5),  # they wait for something else than memory
                CachePressure(0.5, 0, 6),
                CachePressure(0.5, 0, 7),  # sixteen are still inside: the decrease has yet to show
            ):
                engine.now = pressure
                await room.look()
                limits.append(room.limit)
            assert room.used == 16
            leave.set()
        return limits

    assert asyncio.run(run()) == [16, 16, 16, 12, 12]


def test_between_the_least_and_the_most() -> None:
    async def run() -> list[int]:
        engine = Engine()
        room, limits, leave = ConcurrencyController(6, engine, least=3), [], asyncio.Event()

        async def rollout() -> None:
            async with room:
                await leave.wait()

        async with room:
            for evicted in (0, 1, 2, 3):
                engine.now = CachePressure(0.5, 0, evicted)
                await room.look()
                limits.append(room.limit)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(9):
                    tasks.create_task(rollout())
                await asyncio.sleep(0)
                for _ in range(4):
                    await room.look()
                    limits.append(room.limit)
                engine.now = CachePressure(0.96, 2, 3)
                await room.look()
                engine.now = None  # it does not say
                await room.look()
                limits.append(room.limit)
                leave.set()
        return limits

    assert asyncio.run(run()) == [6, 4, 3, 3, 4, 5, 6, 6, 4]


def test_in_order_of_arrival_and_a_place_that_is_given_up_goes_to_the_next() -> None:
    async def run() -> list[str]:
        room, order, leave = ConcurrencyController(1), [], asyncio.Event()

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


def test_it_looks_when_a_rollout_ends() -> None:
    async def run() -> int:
        engine = Engine()
        room = ConcurrencyController(8, engine, every_s=0)
        for evicted in (0, 1):
            engine.now = CachePressure(0.5, 0, evicted)
            async with room:
                pass
            await asyncio.sleep(0.01)
        return room.limit

    assert asyncio.run(run()) == 6
