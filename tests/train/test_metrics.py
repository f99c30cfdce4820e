"""The metrics file: reading back, torn lines after a kill, truncation on resume; and rollout
metrics."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ramify.tasks.base import Item
from ramify.train.metrics import (
    FILE,
    METRICS,
    MetricsFile,
    StepMetrics,
    passes,
    read_metrics,
    rollout_metrics,
    staleness,
)
from ramify.train.policy_evaluation import report
from ramify.types.message import VersionSpan
from ramify.types.trajectory import Group, Stop, Trajectory
from tests.shown import heard
from tests.train import trees


def test_metrics_are_written_and_read_back(tmp_path: Path) -> None:
    heard: list[StepMetrics] = []
    metrics = MetricsFile(tmp_path, heard.append)
    metrics.write(1, "sft", 0.51239, {"loss": 1 / 3})
    metrics.write(2, "rl", 2, {"reward": 1, "loss": float("nan")})
    first, second = read_metrics(tmp_path)
    assert first == StepMetrics(1, "sft", 0.512, {"loss": 0.3333333}) == heard[0]
    assert (second.step, second.stage, second.values) == (2, "rl", {"reward": 1})


def test_torn_line_is_skipped_without_losing_others(tmp_path: Path) -> None:
    MetricsFile(tmp_path).write(1, "rl", 1, {"a": 1})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"step": 2, "sta')
    MetricsFile(tmp_path).write(3, "rl", 3, {"a": 3})
    assert [each.step for each in read_metrics(tmp_path)] == [1, 3]


def test_cut_drops_rows_of_later_steps(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in (1, 2, 3, 4):
        metrics.write(step, "rl", step, {})
    METRICS.drop_after_step(tmp_path, 2)
    assert [each.step for each in read_metrics(tmp_path)] == [1, 2]
    assert list(read_metrics(tmp_path / "nowhere")) == []


def test_rollout_metrics_and_pass_at_k() -> None:
    """Two items with four attempts each: three correct for the first; two correct and one failed
    for the second."""
    right = [
        trees.tree(trees.call("0", 4, 2), trees.call("0.0", 3, reward=1.0), reward=1.0)
        for _ in range(5)
    ]
    wrong = [trees.tree(trees.call("0", 4, 2, stop=Stop.MAX_TURNS), reward=0.0) for _ in range(2)]
    failed = trees.tree(trees.call("0", 6))
    groups = [trees.group(*right[:3], wrong[0]), trees.group(*right[3:], wrong[1], failed)]
    found = rollout_metrics(groups, {})
    assert found == pytest.approx({
        # of 4 with 3 right, of 3 with 2 right: two wrong ones cannot be drawn
        "pass@2": (1 + 1) / 2,
        "pass@4": 1.0,  # of the first item alone
        "depth0.rlm/reward": 5 / 7, "depth0.rlm/calls": 1.0, "depth0.rlm/turns": 15 / 8, "depth0.rlm/sampled": 6.0,
        "depth0.rlm/surprise": 0.5, "depth0.rlm/truncated": 2 / 8,
        "depth1.rlm/reward": 1.0, "depth1.rlm/calls": 5 / 8, "depth1.rlm/turns": 1.0, "depth1.rlm/sampled": 3.0,
        "depth1.rlm/surprise": 0.5, "depth1.rlm/truncated": 0.0,
    })  # fmt: skip


def test_failed_attempts_do_not_count_in_an_evaluation() -> None:
    """One of two correct, one wrong and one failed, and an item whose attempts both failed."""
    right, wrong, failed = (
        trees.tree(trees.call("0", 1), reward=reward) for reward in (1.0, 0.0, None)
    )
    failed.errors = ["no session could be had"]
    groups = [trees.group(right, wrong), trees.group(wrong, failed), trees.group(failed, failed)]
    assert passes(groups, {}) == {2: 1.0}
    messages: list[str] = []
    items = [Item("?", "7", kind=kind) for kind in "aab"]
    with heard(messages.append):
        assert report("test", items, groups, {}, max_failed=0.5) == {
            "test/reward": pytest.approx(1 / 3),
            "test/reward_low": 0.0,  # of the two items: 1/2 and 0
            "test/reward_high": 0.5,
            "test/a": pytest.approx(1 / 3),
            "test/pass@2": 1.0,
            "test/failed": 3.0,
        }
        assert report("test", items, groups, {}, max_failed=0.49) == {"test/failed": 3.0}
        assert report("test", items[:1], groups[2:], {}, max_failed=1.0) == {"test/failed": 2.0}
    ours = "attempts failed for reasons outside the policy"
    assert messages == [
        f"test: 3 of 6 {ours} and are left out of the score; the first: no session could be had",
        f"test: 3 of 6 {ours}, above evaluate.max_failed=0.49: this evaluation has no score; the "
        "first: no session could "
        "be had",
        f"test: all 2 {ours}: this evaluation has no score; the first: no session could be had",
    ]
    with heard(pytest.fail):
        report("test", items[:1], groups[:1], {}, max_failed=0.0)


def test_staleness_is_measured_per_token() -> None:
    one = trees.call("0", 4)
    turn = one[0].turns[0]
    reply = msgspec.structs.replace(
        turn.reply, versions=(VersionSpan(0, 3, 7), VersionSpan(3, 4, 5))
    )
    one[0].turns[0] = msgspec.structs.replace(turn, reply=reply)
    assert staleness([trees.group(trees.tree(one, reward=1.0))], 8) == {
        "staleness": 6 / 4,
        "staleness_max": 3.0,
    }
    assert staleness([trees.group(trees.tree(trees.call("0", 4), reward=1.0))], 8) == {}


def test_environment_in_which_no_text_is_an_action_is_named() -> None:
    def played(steps: float) -> Group:
        metrics = {"steps": steps, "rejected actions": 3.0}
        return Group("a", [Trajectory("a", "q", rewards={"return": 0.0}, metrics=metrics)])

    items = [Item("q", id="a")]
    messages: list[str] = []
    with heard(messages.append):
        report("test", items, [played(1.0)], {}, max_failed=0.0)
        assert not messages
        report("test", items, [played(0.0)], {}, max_failed=0.0)
    assert "test: no attempt did an action in its environment; 3 texts per attempt" in messages[0]
