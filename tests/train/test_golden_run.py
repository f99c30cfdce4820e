"""A training folder that an earlier version wrote: it can always be read, evaluated and continued."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ramify.policy.fingerprint import fingerprint
from ramify.policy.load import load
from ramify.train import groups, metrics
from ramify.train.checkpoint import find, read_state, verify

GOLDEN = Path(__file__).parents[1] / "data" / "golden_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def test_its_files_are_read(folder: Path) -> None:
    state = read_state(find(folder))
    assert (state.step, state.stage, state.version, state.score) == (11, 2, 5, 0.45)
    rows = list(metrics.read(folder))
    assert [row.stage for row in rows] == [
        "warmup", "warmup", *["sft"] * 5, "first", *["rl"] * 6, "last", "best",
    ]  # fmt: skip
    rewards = [row.values.get("reward") for row in rows if row.stage == "rl"]
    assert rewards == [0.4629808, 0.51, None, 0.45, 0.39375, None]
    outcomes = [record.outcome for record in groups.read(folder)]
    assert outcomes == [*["learnt"] * 6, "silent", "learnt"]


def test_its_checkpoint_is_whole_and_its_policy_is_the_same(folder: Path) -> None:
    verify(find(folder))
    policy = load(folder / "policy")
    assert policy.num_parameters == 17_408
    assert fingerprint(policy.model) == "b25d877261674ec3"
    assert fingerprint(load(find(folder) / "policy").model) == "7af843570d5cebeb"
