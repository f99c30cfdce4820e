"""Items from which nothing is learned are asked less often, and a resumed run passes over the same
ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction
from ramify.train.config import EvaluateSpec, RlSpec, Run, Schedule, TaskSpec
from ramify.train.metrics import GROUPS, RolloutGroupRecord, read_metrics
from ramify.train.rollouts.difficulty_pool import NoSignalItemFilter
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.run_record import read_group_records
from ramify.types.trajectory import RolloutGroupOutcome, Trajectory
from tests.shown import train
from tests.train.small import _even, small
from tests.train.test_loop import Killed, kill_at


def _some_are_settled(item: Item, trajectory: Trajectory) -> float:
    return 0.0 if item.id.startswith("hard") else _even(item, trajectory)


ITEMS = [Item(f"{number}?", "text", gold=1.0, id=id) for number, id in enumerate(("a", "hard b"))]
half_settled = DatasetTask(
    "half settled",
    {"train": ITEMS, "validation": ITEMS},
    TrajectoryRewardFunction(_some_are_settled),
)
SHARE = 0.25


def run_of(share: float | None, *, steps: int = 20, max_staleness: int = 0) -> Run:
    return small(
        task=TaskSpec(name=f"{__name__}:half_settled", validate=False),
        warmup=None,
        evaluate=EvaluateSpec(num=1, final=()),
        schedule=Schedule(evaluate_every=5),
        rl=RlSpec(
            steps=steps,
            sample=RolloutBatchSpec(items=1, settled_share=share, max_staleness=max_staleness),
            rollout=RolloutOptions(group=4, concurrency=4),
        ),
    )


def outcomes(folder: Path) -> Counter[tuple[str, str]]:
    return Counter((each.item, str(each.outcome)) for each in GROUPS.read(folder))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_settled_items_are_asked_in_the_stated_share_of_their_turns(
    tmp_path: Path, max_staleness: int
) -> None:
    train(run_of(SHARE, max_staleness=max_staleness), tmp_path)
    found = outcomes(tmp_path)
    asked, skipped = found["hard b", "no_signal"], found["hard b", "skipped"]
    assert 0 < asked < skipped
    assert found["a", "skipped"] < skipped / 4  # only if all attempts happen to be equal
    assert found["a", "learnt"] > 2 * asked
    records = read_group_records(tmp_path)
    assert records.has_each_group_once, records
    steps = [row.values for row in read_metrics(tmp_path) if "skipped_items" in row.values]
    assert 0 <= skipped - sum(step["skipped_items"] for step in steps) <= 2 * max_staleness


def test_every_item_is_asked_by_default(tmp_path: Path) -> None:
    train(run_of(None, steps=4), tmp_path)
    assert [record.number for record in GROUPS.read(tmp_path)] == list(range(30, 34))


def test_killed_and_resumed_run_passes_over_the_same_items(tmp_path: Path) -> None:
    run, whole, broken = run_of(SHARE), tmp_path / "whole", tmp_path / "broken"
    last = train(run, whole).step
    with pytest.raises(Killed):
        train(run, broken, listener=kill_at(last - 8))
    train(run, broken, resume=broken)
    ours, theirs = (
        [(each.step, each.number, each.item, each.outcome) for each in GROUPS.read(folder)]
        for folder in (whole, broken)
    )
    assert ours == theirs
    assert any(outcome is RolloutGroupOutcome.SKIPPED for *_, outcome in ours)


def record(number: int, item: str, outcome: str) -> RolloutGroupRecord:
    return RolloutGroupRecord(
        step=1,
        number=number,
        item=item,
        version=1,
        outcome=RolloutGroupOutcome(outcome),
        rollouts=[],
    )


def test_part_of_a_mixture_is_settled_after_many_groups_without_signal(tmp_path: Path) -> None:
    GROUPS.append(tmp_path, [record(n, f"easy:{n}", "no_signal") for n in range(19)])
    pool = NoSignalItemFilter(SHARE, tmp_path, has_parts=True)
    pool.load()
    assert not pool.has_no_signal("easy:100")
    pool.record_outcomes([record(19, "easy:19", "learnt")])
    assert pool.has_no_signal("easy:100")  # 19 of its 20 latest groups
    assert not pool.has_no_signal("other:1")
    asked = sum(not pool.should_skip(number, "easy:100") for number in range(4000))
    assert asked == pytest.approx(SHARE * 4000, rel=0.1)
    pool.record_outcomes([record(n, f"easy:{n}", "learnt") for n in range(20, 23)])
    assert not pool.has_no_signal("easy:100")


def test_item_that_is_learned_from_again_is_no_longer_settled(tmp_path: Path) -> None:
    pool = NoSignalItemFilter(SHARE, tmp_path)
    pool.load()
    for outcome, settled in (
        ("no_signal", True),
        ("skipped", True),
        ("lost", True),
        ("learnt", False),
    ):
        pool.record_outcomes([record(1, "a", outcome)])
        assert pool.has_no_signal("a") is settled


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_share_outside_its_range_is_rejected(share: float) -> None:
    with pytest.raises(ConfigError, match=r"settled_share=.* is a share of turns"):
        RolloutBatchSpec(settled_share=share)


def test_pool_without_repeated_items_is_reported(tmp_path: Path) -> None:
    run = run_of(SHARE, steps=1)
    run = msgspec.structs.replace(run, task=TaskSpec(name="tests.train.small:even"))
    with pytest.warns(
        match=r"settled_share=0.25 has no effect: .* generates new items without end"
    ):
        train(run, tmp_path)
