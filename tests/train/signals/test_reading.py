"""Signals that read groups which a later step takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.build.run import train
from ramify.train.loop import Cadence
from ramify.train.metrics import read
from ramify.train.rollout import RolloutOptions
from ramify.train.sft import read as trajectories
from ramify.train.signals.compose import Anneal, Hybrid, Term
from ramify.train.signals.process import Process
from ramify.train.signals.tools import ToolUse
from ramify.train.stages import Sample
from tests.train.small import small


def test_each_group_is_read_once_and_by_every_signal_that_its_step_weighs(tmp_path: Path) -> None:
    """``late`` weighs nothing in the first two steps: groups that were whole by then are read when the third takes them."""
    late = Anneal(0.0, 0.5, steps=1, after=1)
    rl = msgspec.structs.replace(
        small().rl, steps=4, sample=Sample(items=2, max_staleness=1), rollout=RolloutOptions(group=3, concurrency=8),
        algorithm=Hybrid(terms=(Term(signal="rule", weight=0.1), Term(signal="late", weight=late))),
        signals={
            "rule": Process(judge="tests.train.signals.rules:Steps"),
            "late": Process(judge="tests.train.signals.rules:Steps"), "tools": ToolUse(),
        },
    )  # fmt: skip
    train(small(rl=rl, warmup=None, cadence=Cadence(evaluate_every=0, save_rollouts_every=1)), tmp_path, say=lambda _: None)
    rows = [row.values for row in read(tmp_path) if row.stage == "rl" and "learn_s" in row.values]
    assert [row["rule/read"] for row in rows] == [6] * 4
    assert [row.get("late/read") for row in rows] == [None, None, 6, 6]
    assert all(row["signals_wait_s"] >= 0 for row in rows)
    kept = list(trajectories(tmp_path / "rollouts"))
    assert len({each.id for each in kept}) == len(kept) == 24
    marks = [[(mark.by, mark.call, mark.turn) for mark in each.marks] for each in kept]
    assert all(found.count(("rule", "0", 0)) == 1 for found in marks)
