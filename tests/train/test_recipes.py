"""The recipes, shortened to seconds, with real jailed sessions and child calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.models.load import load_policy, save_policy
from ramify.train.execute import train
from ramify.train.metrics import read_metrics
from ramify.train.recipe import load_recipe
from tests.train.small import SHAPE, assemble, small

ROOT = Path(__file__).parents[2]
SHORT = (
    "warmup.steps=2",
    "sft.num=40",
    "sft.optim.warmup_steps=1",
    "rl.steps=2",
    "rl.sample.items=2",
    "rl.rollout.group=2",
    "limits.max_turns=2",
    "limits.max_reply_tokens=16",
    "evaluate.num=2",
    "evaluate.validation=2",
    "rl.sample.max_items=null",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny_recursive"])
def test_recipe_trains_a_policy_from_scratch(name: str, tmp_path: Path) -> None:
    run = load_recipe(ROOT / f"recipes/{name}.py", SHORT)
    state = train(run, tmp_path)
    rows = list(read_metrics(tmp_path))
    assert state.step == rows[-1].step
    assert {row.stage for row in rows} - {"best"} == {"warmup", "sft", "first", "rl", "last"}
    assert sum(row.values.get("failed_rollouts", 0) for row in rows) == 0
    assert load_policy(tmp_path / "policy").num_parameters > 400_000
    if name == "tiny_recursive":
        assert run.task.options == {"multi": 1.0, "long": 0.05}


@pytest.mark.slow
def test_standalone_rl_loop_script_trains_a_policy(tmp_path: Path) -> None:
    made = assemble(small())
    save_policy(made.policy, tmp_path / "policy")
    command = [sys.executable, "recipes/rl_loop.py", str(tmp_path / "policy"), "1", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 0: ")
    assert load_policy(tmp_path / "policy-rl").config.hidden_size == SHAPE["hidden_size"]
