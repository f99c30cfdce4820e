"""Waits that end: what was waited for comes, or an error says where it stood, and the file has all stacks."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from ramify.errors import ConfigError, TrainError
from ramify.train.backends.base import Optim
from ramify.train.loop import Loop
from ramify.train.stages import Given, Work
from ramify.train.watch import FILE, OneThread, Stalled, Watch
from tests.train.small import small


def test_work_that_gets_on_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        watch, thread = Watch(tmp_path, 2.0), OneThread("work")
        assert await watch.bounded("adding", thread.run(lambda a, b: a + b, 1, 2)) == 3
        with pytest.raises(ZeroDivisionError):
            await watch.bounded("dividing", thread.run(lambda: 1 / 0))

        async def slow() -> int:
            for _ in range(30):
                await asyncio.sleep(0.1)
                watch.moved()
            return 4

        assert await watch.bounded("slow", slow()) == 4
        thread.close()
        with pytest.raises(RuntimeError, match="the thread work has ended"):
            await thread.run(print)
        watch.close()

    asyncio.run(test())


def test_a_thread_that_stands_still(tmp_path: Path) -> None:
    told: list[str] = []
    release = threading.Event()

    def stand_here() -> None:
        release.wait(60)

    async def test() -> None:
        watch = Watch(tmp_path, 0.3, others=lambda: "rank 1 is somewhere else", on_stall=told.append)
        thread = OneThread("ramify-train")
        with pytest.raises(
            Stalled, match=r"learning stands still: nothing moved for 0.3 s\. It stands at File .* in stand_here"
        ):
            await watch.bounded("learning", thread.run(stand_here), thread="ramify-train")
        release.set()
        thread.close()
        watch.close()

    asyncio.run(test())
    text = (tmp_path / FILE).read_text()
    assert all(
        part in text for part in ("in stand_here", "thread MainThread", "task Task-", "rank 1 is somewhere else")
    )
    assert f"`ramify train --resume {tmp_path}`" in told[0]


def test_an_event_loop_that_stands_still(tmp_path: Path) -> None:
    async def busy() -> None:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 (what is to be found out)

    async def test() -> None:
        watch = Watch(tmp_path, 0.3)
        try:
            await watch.bounded("stamping", busy())
        finally:
            watch.close()

    with pytest.raises(Stalled, match=r"stamping stands still: .* line \d+, in busy"):
        asyncio.run(test())


def test_what_fails_elsewhere_ends_every_wait(tmp_path: Path) -> None:
    async def test() -> None:
        watch = Watch(tmp_path, 60.0)
        waits = asyncio.ensure_future(watch.bounded("one", asyncio.Event().wait()))
        await asyncio.sleep(0)
        watch.fail(TrainError("the canary differs"))
        for wait in (waits, watch.bounded("another", asyncio.Event().wait())):
            with pytest.raises(TrainError, match="the canary differs"):
                await wait
        watch.close()

    asyncio.run(test())


class Endless(Given):
    """A stage whose work never comes."""

    name, num_steps, optim = "rl", 3, Optim()

    async def work(self, step: int) -> Work:
        await asyncio.Event().wait()
        raise AssertionError


class Published:
    version = 0

    async def publish(self) -> None: ...
    async def rest(self) -> bool:
        return False

    def spare(self) -> None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


async def nothing(split: str) -> dict[str, float]:
    return {}


def test_a_run_whose_rollouts_never_end_stops_with_all_stacks(tmp_path: Path) -> None:
    loop = Loop(tmp_path, [Endless()], lambda _: cast(Any, None), Published(), nothing, watch=Watch(tmp_path, 2.0))
    with pytest.raises(Stalled, match=r"the work of step 1 \(rl\) stands still: .* in work"):
        asyncio.run(loop.run())
    assert "in work\n  File" in (tmp_path / FILE).read_text()


def test_how_long_a_run_may_stand_still_is_positive() -> None:
    with pytest.raises(ConfigError, match=r"stall_s=0\.0 must be above 0"):
        small(stall_s=0.0)
