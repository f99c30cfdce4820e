"""Runs that continue with a changed configuration, are forked, or are ended by signals."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.engine.limits import Limits
from ramify.errors import ConfigError
from ramify.tasks.base import DatasetTask, TrajectoryRewardFunction, generated
from ramify.train.backends.base import OptimizerSpec
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore, read_state
from ramify.train.config import PolicySpec, Run, Schedule, TaskSpec, to_plain_data
from ramify.train.lineage import LINEAGE, check_changes
from ramify.train.metrics import StepMetrics, read_metrics
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from tests.shown import train
from tests.train.small import _even, _make, small
from tests.train.test_loop import same

other = DatasetTask("other", generated("other", _make), TrajectoryRewardFunction(_even))


def run_of(steps: int, lr: float = 1e-3, **changes: Any) -> Run:
    """A run without warm-up and with a constant learning rate."""
    run = small(warmup=None, **changes)
    rl = msgspec.structs.replace(run.rl, steps=steps, optim=OptimizerSpec(lr=lr))
    return msgspec.structs.replace(run, rl=rl)


def test_four_steps_plus_four_resumed_steps_equal_eight_steps(tmp_path: Path) -> None:
    whole, broken, fork = (tmp_path / name for name in ("whole", "broken", "fork"))
    state, half = train(run_of(8), whole), train(run_of(4), broken)
    informed: list[str] = []
    train(run_of(8), broken, resume=broken, inform=informed.append)
    assert informed[0] == f"the run continues from step {half.step}: rl.steps 4 → 8"
    sft, end = half.step - 4, half.step + 4
    assert informed[1] == (
        f"{end} steps: 1 to {sft} sft, {sft + 1} to {end} rl; {half.step} are done"
    )
    assert same(whole, broken)
    # The same from a checkpoint, in another folder: the first run stays unchanged.
    before = sorted(path.name for path in whole.rglob("*"))
    middle, last = (f"checkpoints/step-{step:06d}" for step in (state.step - 2, state.step))
    train(run_of(8), fork, resume=whole / middle)
    assert same(whole / last, fork / last)
    assert steps_of(fork) == steps_of(whole)
    assert sorted(path.name for path in whole.rglob("*")) == before
    assert [(entry.step, entry.is_fork, entry.changes) for entry in LINEAGE.read(fork)] == [
        (state.step - 2, True, [])
    ]


def test_task_limits_and_batch_sizes_can_change_on_resume(tmp_path: Path) -> None:
    """Change limits, batch sizes, concurrency, task and learning rate, but not demonstrations."""
    run = run_of(2)
    half = train(run, tmp_path)
    assert run.rl is not None
    rl = msgspec.structs.replace(
        run.rl,
        steps=4,
        sample=RolloutBatchSpec(items=3),
        rollout=RolloutOptions(group=2, concurrency=2),
        optim=OptimizerSpec(lr=5e-4, schedule="linear"),
    )
    longer = msgspec.structs.replace(
        run,
        rl=rl,
        task=TaskSpec(name="tests.train.test_continued_training:other"),
        limits=Limits(max_turns=1, max_reply_tokens=6, max_seconds=300),
    )
    state = train(longer, tmp_path, resume=tmp_path)
    assert (state.step, state.scored_since) == (half.step + 2, half.step)
    (entry,) = LINEAGE.read(tmp_path)
    assert {change.field: change.now for change in entry.changes} == {
        "task.name": "tests.train.test_continued_training:other",
        "rl.steps": 4,
        "rl.sample.items": 3,
        "rl.sample.minibatches": 1,
        "rl.rollout.group": 2,
        "rl.rollout.concurrency": 2,
        "rl.optim.lr": 5e-4,
        "rl.optim.schedule": "linear",
        "limits.max_turns": 1,
        "limits.max_reply_tokens": 6,
    }
    (last,) = (
        row for row in read_metrics(tmp_path) if row.step == state.step and "lr" in row.values
    )
    assert last.values["lr"] < 5e-4
    # Scores of the earlier task are not comparable, so its checkpoints cannot be the best.
    best = CheckpointStore(tmp_path).best()
    assert best is not None
    assert read_state(best).step > half.step


def steps_of(out: Path) -> list[tuple[int, str, float | None, float | None]]:
    """Return (step, stage, reward, validation reward) of each metrics row, without the report."""
    return [
        (row.step, row.stage, row.values.get("reward"), row.values.get("validation/reward"))
        for row in read_metrics(out)
        if row.stage not in ("last", "best")
    ]


@pytest.mark.parametrize(
    ("stage", "changes", "refused"),
    [
        (2, {"seed": 1}, "seed was 0 and is now 1; it cannot change, since the order of the data"),
        (2, {"policy": PolicySpec(path="x")}, r"policy\.path was '' .* weights of that model"),
        (2, {"warmup": None}, "warmup was .* the stage warmup has begun"),
        (2, {"sft.num": 31}, r"sft\.num was 30 and is now 31.* the stage sft is over"),
        (2, {"rl.optim.kind": "muon"}, r"rl\.optim\.kind was 'adamw'.* optimizer's state"),
        (2, {"rl.steps": 0}, r"rl\.steps was 4 and is now 0.* 1 steps of the stage are done"),
        (1, {"sft.batch_tokens": 3}, r"sft\.batch_tokens .* a part of these rows"),
        (1, {"scaffold": "bare"}, "scaffold was 'tiny' .* rows of the stage sft"),
        (1, {"warmup.steps": 9}, r"warmup\.steps .* the stage warmup is over"),
        (0, {"warmup.steps": 9, "sft.num": 31, "scaffold": "bare", "sft.epochs": 2}, None),
        (1, {"sft.epochs": 2, "sft.optim.lr": 1.0, "rl.optim.kind": "muon", "rl": None}, None),
        (2, {"rl.loss.clip_low": 0.1, "limits.max_turns": 9, "compute.max_tokens": 9}, None),
    ],
)
def test_fields_that_cannot_change_are_named(
    stage: int, changes: dict[str, Any], refused: str | None
) -> None:
    config = to_plain_data(small())
    now = msgspec.json.decode(msgspec.json.encode(config))
    for name, value in changes.items():
        place = now
        *parts, last = name.split(".")
        for part in parts:
            place = place[part]
        place[last] = to_plain_data(small(policy=value))["policy"] if last == "policy" else value
    state = CheckpointedProgress(step=7, stage=stage, stage_step=1, config=config)
    if refused is None:
        check_changes(state, now)
    else:
        with pytest.raises(ConfigError, match=f"step 7 has a different config: {refused}"):
            check_changes(state, now)


def learned(out: Path) -> list[int]:
    """Return the steps that have a loss in the metrics."""
    return [row.step for row in read_metrics(out) if "loss" in row.values]


def is_stopped(num_steps: int, delay_s: float, number: signal.Signals, run: Run, out: Path) -> bool:
    """Train, and send the signal ``delay_s`` seconds after ``num_steps`` more steps. Return whether
    the signal ended the run."""
    resume = out if any(out.glob("checkpoints/step-*")) else None
    over, begun = threading.Event(), len(learned(out))

    def interrupt() -> None:
        while len(learned(out)) < begun + num_steps:
            if over.wait(0.002):
                return
        if not over.wait(delay_s):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        train(run, out, resume=resume)
    except SystemExit as ended:
        return ended.code == 128 + number
    finally:
        over.set()
        thread.join()
    return False


def test_signal_loses_no_complete_step(tmp_path: Path) -> None:
    """Signals at random moments of a step leave the result bit-identical."""
    run = run_of(6, schedule=Schedule(evaluate_every=4, checkpoint_every=100))
    whole, broken, chosen = tmp_path / "whole", tmp_path / "broken", random.Random(3)
    began = time.monotonic()
    state = train(run, whole)
    step_s = (time.monotonic() - began) / state.step
    ending = (signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in ending]
    num = 0
    try:
        for number in itertools.cycle(ending):
            delay_s = chosen.random() * step_s
            if not is_stopped(chosen.randint(1, 3), delay_s, number, run, broken):
                break
            latest = CheckpointStore(broken).latest()
            assert (latest is not None and read_state(latest).step) == max(learned(broken))
            num += 1
    finally:
        for number, handler in zip(ending, before, strict=True):
            signal.signal(number, handler)
    assert num
    assert same(whole, broken)
    assert steps_of(whole) == steps_of(broken)


def test_keyboard_interrupt_in_a_notebook_saves_a_checkpoint(tmp_path: Path) -> None:
    """As in a notebook, the event loop of the main thread runs each cell."""
    run = run_of(8, schedule=Schedule(evaluate_every=None, checkpoint_every=100))
    train(run, tmp_path / "whole")
    out, is_interrupted = tmp_path / "cells", threading.Event()

    def interrupt(metrics: StepMetrics) -> None:
        if metrics.stage == "rl" and not is_interrupted.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            assert is_interrupted.wait(60)

    def interrupted(*_: object) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    async def cell(resume: Path | None) -> CheckpointedProgress:
        return train(run, out, resume=resume, listener=interrupt)

    loop, before = asyncio.new_event_loop(), signal.signal(signal.SIGINT, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell(None))
        loop.run_until_complete(cell(out))
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert same(tmp_path / "whole", out)
    assert steps_of(tmp_path / "whole") == steps_of(out)


def test_checkpoint_every_s_writes_checkpoints(tmp_path: Path) -> None:
    schedule = Schedule(evaluate_every=None, checkpoint_every_s=1e-6, keep_last=100)
    state = train(run_of(3, schedule=schedule), tmp_path)
    names = [path.name for path in CheckpointStore(tmp_path).all()]
    assert names == [f"step-{step:06d}" for step in range(1, state.step + 1)]
