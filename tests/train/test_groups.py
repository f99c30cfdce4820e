"""Group records: writing, truncation on resume, and the check that each group occurs once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.train import metrics, run_record
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore, read_state
from ramify.train.config import Schedule
from ramify.train.execute import train
from ramify.train.metrics import RolloutGroupRecord, StepMetrics
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from tests.train.small import small
from tests.train.test_loop import Killed


def one(step: int, number: int, outcome: str = "learnt") -> RolloutGroupRecord:
    return RolloutGroupRecord(
        step=step, number=number, item=f"t/{number}", version=3, outcome=outcome, rollouts=["a"]
    )


def save_state(out: Path, **state: int | list[int]) -> None:
    CheckpointStore(out).save(CheckpointedProgress(**state), {})  # type: ignore[arg-type]


def test_check_finds_duplicated_and_missing_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold a run: give the folder .* --out"):
        run_record.read_group_records(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert run_record.read_group_records(tmp_path).has_each_group_once
    metrics.GROUPS.append(tmp_path, [one(1, 4), one(1, 6, "no_signal")])
    metrics.GROUPS.append(tmp_path, [])
    metrics.GROUPS.append(tmp_path, [one(3, 7), one(3, 5, "lost")])
    save_state(tmp_path, step=3, first_item=4, next_item=10, pending=[8, 9])
    found = run_record.read_group_records(tmp_path)
    assert (found.outcomes, found.pending, found.has_each_group_once) == (
        {"learnt": 2, "no_signal": 1, "lost": 1},
        [8, 9],
        True,
    )
    metrics.GROUPS.append(tmp_path, [one(4, 7)])  # after the last checkpoint: it is repeated
    assert run_record.read_group_records(tmp_path).has_each_group_once
    save_state(tmp_path, step=4, first_item=3, next_item=12, pending=[8, 10, 4])
    found = run_record.read_group_records(tmp_path)
    assert (found.duplicated, found.missing, found.has_each_group_once) == (
        [4, 7],
        [3, 9, 11],
        False,
    )


def test_torn_line_is_skipped_without_losing_the_next(tmp_path: Path) -> None:
    metrics.GROUPS.append(tmp_path, [one(1, 0)])
    with (tmp_path / metrics.GROUPS.name).open("ab") as file:
        file.write(b'{"step": 2, "numb')
    metrics.GROUPS.append(tmp_path, [one(2, 1)])
    assert [each.number for each in metrics.GROUPS.read(tmp_path)] == [0, 1]
    metrics.GROUPS.drop_after_step(tmp_path, 1)
    assert [(each.number, each.step) for each in metrics.GROUPS.read(tmp_path)] == [(0, 1)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_killed_and_resumed_run_records_each_group_once(tmp_path: Path, max_staleness: int) -> None:
    """Killed when the third RL step is measured, one step after a checkpoint."""
    steps: list[int] = []

    def kill(measured: StepMetrics) -> None:
        if "loss" in measured.values and measured.stage == "rl":
            steps.append(measured.step)
            if len(steps) == 3:
                raise Killed

    run = small(warmup=None, schedule=Schedule(evaluate_every=2))
    rl = msgspec.structs.replace(
        run.rl,
        sample=RolloutBatchSpec(items=2, max_staleness=max_staleness),
        rollout=RolloutOptions(group=2, concurrency=3),
    )
    run = msgspec.structs.replace(run, rl=rl)
    with pytest.raises(Killed):
        train(run, tmp_path, listener=kill)
    state = read_state(CheckpointStore(tmp_path).all()[-1])
    known = [each.number for each in metrics.GROUPS.read(tmp_path) if each.step <= state.step]
    assert (
        sorted([*known, *state.pending])
        == list(range(30, 34 + 4 * max_staleness))
        == list(range(30, state.next_item))
    )
    assert len(state.pending) == 4 * max_staleness
    train(run, tmp_path, resume=tmp_path)
    found = list(metrics.GROUPS.read(tmp_path))
    assert [each.step - steps[0] for each in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(each.number for each in found) == list(range(30, 38))
    assert {each.number for each in found if each.step - steps[0] in (2, 3)} >= set(state.pending)
    assert all(each.version is not None and len(each.rollouts) == 2 for each in found)
    ended = run_record.read_group_records(tmp_path)
    assert (ended.has_each_group_once, ended.pending, sum(ended.outcomes.values())) == (True, [], 8)
