"""The run watchdog: a wait ends with its result or with an error that names the blocked place, and a
file with all stacks."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from ramify.errors import ConfigError, TrainError
from ramify.progress import heartbeat
from ramify.train.backends.base import OptimizerSpec
from ramify.train.stages import OfflineDataStage, StepData
from ramify.train.stall_watchdog import FILE, SerialThread, StallError, StallWatchdog
from tests.train.small import Unpublished, not_evaluated, small
from tests.train.trainers import trainer_over


def test_watchdog_waits_for_work_that_makes_progress(tmp_path: Path) -> None:
    async def test() -> None:
        watch, thread = StallWatchdog(tmp_path, 2.0), SerialThread("work")
        assert (
            await watch.await_with_stall_limit("adding", thread.run(lambda a, b: a + b, 1, 2)) == 3
        )
        with pytest.raises(ZeroDivisionError):
            await watch.await_with_stall_limit("dividing", thread.run(lambda: 1 / 0))

        async def slow() -> int:
            for _ in range(30):
                await asyncio.sleep(0.1)
                watch.report_progress()
            return 4

        assert await watch.await_with_stall_limit("slow", slow()) == 4
        thread.close()
        with pytest.raises(RuntimeError, match="the thread work has ended"):
            await thread.run(print)
        watch.close()

    asyncio.run(test())


def test_stalled_thread_raises_and_writes_all_stacks(tmp_path: Path) -> None:
    stalls: list[str] = []
    release = threading.Event()

    def stand_here() -> None:
        release.wait(60)

    async def test() -> None:
        watch = StallWatchdog(
            tmp_path, 0.3, others=lambda: "rank 1 is somewhere else", on_stall=stalls.append
        )
        thread = SerialThread("ramify-train")
        with pytest.raises(
            StallError,
            match=r"learning is stuck: no progress for 0.3 s\. It is at File .* in stand_here",
        ):
            await watch.await_with_stall_limit(
                "learning", thread.run(stand_here), thread="ramify-train"
            )
        release.set()
        thread.close()
        watch.close()

    asyncio.run(test())
    text = (tmp_path / FILE).read_text()
    assert all(
        part in text
        for part in ("in stand_here", "thread MainThread", "task Task-", "rank 1 is somewhere else")
    )
    assert f"`ramify train --resume {tmp_path}`" in stalls[0]


def test_blocked_event_loop_raises(tmp_path: Path) -> None:
    async def busy() -> None:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 (blocking is the point of this test)

    async def test() -> None:
        watch = StallWatchdog(tmp_path, 0.3)
        try:
            await watch.await_with_stall_limit("stamping", busy())
        finally:
            watch.close()

    with pytest.raises(StallError, match=r"stamping is stuck: .* line \d+, in busy"):
        asyncio.run(test())


def test_watchdog_keeps_working_after_a_stall(tmp_path: Path) -> None:
    async def test() -> None:
        watch = StallWatchdog(tmp_path, 0.3)
        for what in ("one", "another"):
            with pytest.raises(StallError, match=f"{what} is stuck"):
                await asyncio.wait_for(
                    watch.await_with_stall_limit(what, asyncio.Event().wait()), 120
                )
        watch.close()

    asyncio.run(test())


def test_progress_during_stall_report_cancels_the_stall(tmp_path: Path) -> None:
    """The stall is reported neither to ``on_stall`` nor in OUT/stalled.txt."""
    stalls: list[str] = []
    may_end = threading.Event()

    async def test() -> None:
        def others() -> str:
            watch.report_progress()
            may_end.set()
            return ""

        watch, thread = (
            StallWatchdog(tmp_path, 0.3, others=others, on_stall=stalls.append),
            SerialThread("work"),
        )
        assert await watch.await_with_stall_limit("learning", thread.run(may_end.wait))
        thread.close()
        watch.close()

    asyncio.run(test())
    assert stalls == []
    assert not (tmp_path / FILE).exists()


class Batches(OfflineDataStage):
    """A stage whose steps compute ``num`` batches each, reported only by ``progress.heartbeat``."""

    name, num_steps, optim, num = "sft", 1, OptimizerSpec(), 3

    async def step_data(self, step: int) -> StepData:
        for _ in range(self.num):
            heartbeat()
        raise TrainError("that was all")


def test_each_batch_counts_as_progress(tmp_path: Path) -> None:
    """A long step is not a stall as long as its batches progress."""

    class Counting(StallWatchdog):
        num = 0

        def report_progress(self) -> None:
            self.num += 1
            super().report_progress()

    counts = []
    for num in (3, 8):
        stage, watch = Batches(), Counting(tmp_path, 60.0)
        stage.num = num
        with pytest.raises(TrainError, match="that was all"):
            asyncio.run(
                trainer_over(
                    tmp_path,
                    [stage],
                    lambda _: cast(Any, None),
                    Unpublished(),
                    not_evaluated,
                    watch=watch,
                ).run()
            )
        counts.append(watch.num)
    assert counts[1] - counts[0] == 5


def test_failure_elsewhere_ends_every_wait(tmp_path: Path) -> None:
    async def test() -> None:
        watch = StallWatchdog(tmp_path, 60.0)
        waits = asyncio.ensure_future(watch.await_with_stall_limit("one", asyncio.Event().wait()))
        await asyncio.sleep(0)
        watch.fail_waits(TrainError("the canary differs"))
        for wait in (waits, watch.await_with_stall_limit("another", asyncio.Event().wait())):
            with pytest.raises(TrainError, match="the canary differs"):
                await wait
        watch.close()

    asyncio.run(test())


class Endless(OfflineDataStage):
    """A stage whose data never arrives."""

    name, num_steps, optim = "rl", 3, OptimizerSpec()

    async def step_data(self, step: int) -> StepData:
        await asyncio.Event().wait()
        raise AssertionError


def test_run_whose_rollouts_never_end_stops_with_all_stacks(tmp_path: Path) -> None:
    loop = trainer_over(
        tmp_path,
        [Endless()],
        lambda _: cast(Any, None),
        Unpublished(),
        not_evaluated,
        watch=StallWatchdog(tmp_path, 2.0),
    )
    with pytest.raises(StallError, match=r"the work of step 1 \(rl\) is stuck: .* in step_data"):
        asyncio.run(loop.run())
    assert "in step_data\n  File" in (tmp_path / FILE).read_text()


def test_stall_s_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"stall_s=0\.0 must be above 0"):
        small(stall_s=0.0)
