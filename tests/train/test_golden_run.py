"""A run folder written by an earlier version stays readable and can be continued."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ramify.errors import ConfigError
from ramify.models.load import load_policy
from ramify.models.weights import fingerprint
from ramify.train import metrics
from ramify.train.checkpoint import read_state, resolve_checkpoint, verify
from ramify.train.recipe import load_recipe, load_stored_run

GOLDEN = Path(__file__).parents[1] / "data" / "golden_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def test_golden_run_files_are_readable(folder: Path) -> None:
    state = read_state(resolve_checkpoint(folder))
    assert (state.step, state.stage, state.version, state.score) == (11, 2, 5, 0.45)
    rows = list(metrics.read_metrics(folder))
    assert [row.stage for row in rows] == [
        "warmup",
        "warmup",
        *["sft"] * 5,
        "first",
        *["rl"] * 6,
        "last",
        "best",
    ]
    rewards = [row.values.get("reward") for row in rows if row.stage == "rl"]
    assert rewards == [0.4629808, 0.51, None, 0.45, 0.39375, None]
    outcomes = [record.outcome for record in metrics.GROUPS.read(folder)]
    assert outcomes == [*["learnt"] * 6, "no_signal", "learnt"]


def test_golden_run_checkpoint_is_intact_and_policy_unchanged(folder: Path) -> None:
    verify(resolve_checkpoint(folder))
    policy = load_policy(folder / "policy")
    assert policy.num_parameters == 17_408
    assert fingerprint(policy.model) == "b25d877261674ec3"
    assert (
        fingerprint(load_policy(resolve_checkpoint(folder) / "policy").model) == "7af843570d5cebeb"
    )


def test_golden_run_config_is_read_with_current_field_names(folder: Path) -> None:
    run = load_stored_run(folder)
    assert run.rl is not None
    assert (run.rl.sample.grace_steps, run.rl.algorithm.drop_zero_variance) == (4, True)
    assert run.schedule.evaluate_every == 2


@pytest.mark.parametrize(
    ("field", "now"),
    [
        ("cadence.evaluate=3", "schedule"),
        ("rl.sample.late=3", "rl.sample.grace_steps"),
        ("rl.sample.straggle=2.0", "rl.sample.straggler_factor"),
    ],
)
def test_override_with_a_renamed_field_gives_the_new_name(
    folder: Path, field: str, now: str
) -> None:
    with pytest.raises(ConfigError, match=f"it is called {now}[a-z_.]* now$"):
        load_stored_run(folder, [field])


def test_recipe_with_a_renamed_field_gives_the_new_name(tmp_path: Path) -> None:
    old = tmp_path / "old.py"
    old.write_text(
        "from ramify.train.rollouts.group_queue import RolloutBatchSpec\n\n\ndef run():\n    return "
        "RolloutBatchSpec(late=3)\n"
    )
    with pytest.raises(ConfigError, match=r"late is called rl\.sample\.grace_steps now$"):
        load_recipe(old)
