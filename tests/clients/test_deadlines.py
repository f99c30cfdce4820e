"""``TimeoutScheduler`` ends late blocks as ``asyncio.timeout_at`` does, with one timer for all of them."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ramify.clients.deadlines import TimeoutScheduler


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    return run


def now_s() -> float:
    return asyncio.get_running_loop().time()


@in_loop
async def test_each_late_block_ends_and_the_others_continue() -> None:
    deadlines = TimeoutScheduler()
    go_on = asyncio.Event()

    async def wait(after_s: float) -> str:
        try:
            with deadlines.timeout_at(now_s() + after_s):
                await go_on.wait()
        except TimeoutError:
            return "late"
        return "in time"

    early, later, never = (asyncio.create_task(wait(s)) for s in (0.02, 0.01, 600))
    assert await early == await later == "late"
    assert not never.done()
    go_on.set()
    assert await never == "in time"
    deadlines.close()


@in_loop
async def test_a_block_may_be_extended_and_shortened() -> None:
    deadlines = TimeoutScheduler()
    with deadlines.timeout_at(now_s() + 0.01) as deadline:
        deadline.reschedule(now_s() + 600)
        await asyncio.sleep(0.03)
    late = deadlines.timeout_at(now_s() + 600)

    async def wait() -> None:
        with late:
            late.reschedule(now_s())
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait()
    deadlines.close()


@in_loop
async def test_a_cancellation_from_elsewhere_is_not_a_time_out() -> None:
    deadlines = TimeoutScheduler()

    async def wait() -> None:
        with deadlines.timeout_at(now_s() + 600):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadlines.close()


@in_loop
async def test_the_inner_of_two_blocks_ends_alone() -> None:
    deadlines = TimeoutScheduler()
    with deadlines.timeout_at(now_s() + 600):
        with pytest.raises(TimeoutError), deadlines.timeout_at(now_s() + 0.01):
            await asyncio.Event().wait()
        await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    deadlines.close()


class CountingLoop(asyncio.SelectorEventLoop):
    """A loop that counts its timers."""

    num_timers = 0

    def call_at(self, *args: Any, **more: Any) -> asyncio.TimerHandle:
        self.num_timers += 1
        return super().call_at(*args, **more)


def test_a_thousand_open_blocks_have_one_timer() -> None:
    async def main() -> None:
        deadlines, go_on = TimeoutScheduler(), asyncio.Event()

        async def wait() -> None:
            with deadlines.timeout_at(now_s() + 600):
                await go_on.wait()

        tasks = [asyncio.create_task(wait()) for _ in range(1000)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*tasks)
        deadlines.close()

    loop = CountingLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert loop.num_timers == 1
