"""The parts of a step's time add up to the step, for wall and for CPU time, and work counts for the
part that did it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from ramify.step_time_accounting import (
    PARTS,
    ROLLOUTS,
    WAITING,
    StepTimeAccount,
    WallAndCpuTimer,
    WallTimer,
    begin_part,
    end_part,
)
from ramify.train.config import EvaluateSpec, Schedule
from ramify.train.metrics import StepMetrics, read_metrics
from ramify.train.rollouts.rollouter import RolloutOptions
from tests.shown import train
from tests.train.small import small

EVERY = (*PARTS, ROLLOUTS, WAITING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all three stages."""
    out = tmp_path_factory.mktemp("timed")
    run = small(evaluate=EvaluateSpec(num=1, final=()), schedule=Schedule(evaluate_every=None))
    assert run.sft is not None
    assert run.rl is not None
    run = msgspec.structs.replace(
        run,
        sft=msgspec.structs.replace(run.sft, num=8),
        rl=msgspec.structs.replace(run.rl, steps=2, rollout=RolloutOptions(group=2, concurrency=1)),
    )
    train(run, out)
    return out


@pytest.fixture
def rows(folder: Path) -> list[StepMetrics]:
    return list(read_metrics(folder))


def steps_after_steps(rows: list[StepMetrics]) -> list[tuple[StepMetrics, StepMetrics]]:
    """Pairs of consecutive lines that are both steps of one stage."""
    return [
        (one, other)
        for one, other in pairwise(rows)
        if one.stage == other.stage and all("time/step_s" in each.values for each in (one, other))
    ]


def test_wall_time_of_parts_adds_up_to_the_step(rows: list[StepMetrics]):
    pairs = steps_after_steps(rows)
    assert {later.stage for _, later in pairs} >= {"sft", "rl"}
    for earlier, later in pairs:
        parts = sum(later.values[f"time/{part}_s"] for part in EVERY)
        assert parts == pytest.approx(later.at_s - earlier.at_s, rel=0.02, abs=0.003)


def test_cpu_time_of_parts_adds_up_to_the_step(rows: list[StepMetrics]):
    for earlier, later in steps_after_steps(rows):
        sessions = later.values["time_cpu/sessions_s"]
        parts = sum(later.values.get(f"time_cpu/{part}_s", 0.0) for part in EVERY) - sessions
        process = later.values["cpu_s"] - earlier.values["cpu_s"]
        assert parts == pytest.approx(process, rel=0.02, abs=0.003)


def test_each_part_of_a_step_is_counted(rows: list[StepMetrics]):
    last = [row.values for row in rows if row.stage == "rl" and "time/step_s" in row.values][-1]
    sequential = ("sampling", "packing", "forward_backward", "optimizer", "weight_sync", "credit")
    for part in (*sequential, "journal", "rendering", "sessions"):
        assert last[f"time/{part}_s"] > 0, part
    for part in (*sequential, "journal", "rendering"):
        assert last[f"time_cpu/{part}_s"] > 0, part
    useful = last["time/sampling_s"] + last["time/forward_backward_s"]
    assert last["time/overhead"] == pytest.approx(1 - useful / last["time/step_s"], abs=1e-5)


def spin(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_inner_block_is_not_counted_twice():
    with StepTimeAccount() as account:
        with WallAndCpuTimer("credit"):
            spin(0.02)
            with WallAndCpuTimer("packing"):
                spin(0.01)
        times = account.take_times()
    assert times.cpu_s["packing"] == pytest.approx(0.01, rel=0.5)
    assert times.cpu_s["credit"] == pytest.approx(0.02, rel=0.5)
    assert times.wall_s["packing"] >= 0.01
    assert times.wall_s["credit"] >= 0.02


def test_wall_time_counts_for_the_first_part_in_progress():
    inside, over = threading.Event(), threading.Event()

    def engine() -> None:
        with WallAndCpuTimer("sampling"):
            inside.set()
            over.wait(30)

    with StepTimeAccount() as account:
        thread = threading.Thread(target=engine)
        thread.start()
        inside.wait(30)
        with WallTimer("sessions"), WallAndCpuTimer("rendering"):
            spin(0.02)
        first = account.take_times()
        with WallAndCpuTimer("packing"):
            spin(0.02)
        second = account.take_times()
        over.set()
        thread.join()
    assert first.wall_s["rendering"] == first.wall_s["sessions"] == 0
    assert first.wall_s["sampling"] >= 0.02
    assert first.cpu_s["rendering"] >= 0.02
    assert second.wall_s["packing"] >= 0.02


def test_event_loop_without_a_part_is_rollouts_or_waiting():
    with StepTimeAccount() as account:
        spin(0.02)
        time.sleep(0.02)
        times = account.take_times()
    assert times.wall_s[ROLLOUTS] >= 0.02
    assert times.wall_s[WAITING] >= 0.015
    assert sum(times.wall_s.values()) == pytest.approx(
        times.wall_s[ROLLOUTS] + times.wall_s[WAITING]
    )


def test_part_that_ends_in_an_error_is_over():
    with StepTimeAccount() as account:
        with pytest.raises(ZeroDivisionError), WallAndCpuTimer("packing"):
            _ = 1 / 0
        account.take_times()
        time.sleep(0.01)
        assert account.take_times().wall_s["packing"] == 0


def test_without_an_account_nothing_is_counted():
    begin_part("sessions")  # a session that was open before
    with StepTimeAccount() as account:
        end_part("sessions")
        with WallAndCpuTimer("packing"):
            spin(0.001)
        assert account.take_times().wall_s["packing"] > 0
        assert account.take_times().wall_s["sessions"] == 0


def test_parts_are_in_the_log_of_a_run(folder: Path):
    log = (folder / "run.log").read_text(encoding="utf-8")
    assert "time/sampling_s=" in log
    assert "time/overhead=" in log
