"""Signals on groups that only a later step takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.train.config import Schedule
from ramify.train.data.sft_data import read as trajectories
from ramify.train.execute import train
from ramify.train.metrics import read_metrics
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.signals.judge import ProcessRewardSignal
from ramify.train.signals.outcome import ToolErrorSignal
from ramify.train.signals.signal_composition import Hybrid
from ramify.train.signals.signal_term import AnnealSchedule, HybridTerm
from tests.train.small import small


def test_each_group_is_scored_once_by_every_signal_its_step_uses(tmp_path: Path) -> None:
    """The signal ``late`` has weight 0 in the first two steps; groups completed by then are scored
    when the third step takes them."""
    late = AnnealSchedule(0.0, 0.5, steps=1, after=1)
    rl = msgspec.structs.replace(
        small().rl,
        steps=4,
        sample=RolloutBatchSpec(items=2, max_staleness=1),
        rollout=RolloutOptions(group=3, concurrency=8),
        algorithm=Hybrid(
            terms=(HybridTerm(signal="rule", weight=0.1), HybridTerm(signal="late", weight=late))
        ),
        signals={
            "rule": ProcessRewardSignal(judge="tests.train.signals.rules:Steps"),
            "late": ProcessRewardSignal(judge="tests.train.signals.rules:Steps"),
            "tools": ToolErrorSignal(),
        },
    )
    train(
        small(rl=rl, warmup=None, schedule=Schedule(evaluate_every=None, save_rollouts_every=1)),
        tmp_path,
    )
    rows = [
        row.values
        for row in read_metrics(tmp_path)
        if row.stage == "rl" and "learn_s" in row.values
    ]
    assert [row["rule/read"] for row in rows] == [6] * 4
    assert [row.get("late/read") for row in rows] == [None, None, 6, 6]
    assert all(row["signals_wait_s"] >= 0 for row in rows)
    kept = list(trajectories(tmp_path / "rollouts"))
    assert len({each.id for each in kept}) == len(kept) == 24
    marks = [[(mark.by, mark.call, mark.turn) for mark in each.marks] for each in kept]
    assert all(found.count(("rule", "0", 0)) == 1 for found in marks)
