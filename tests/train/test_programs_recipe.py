"""The programs study at small scale: SFT and two RL steps with each kind of signal, from scratch,
through the training loop.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ramify.train.execute import train
from ramify.train.metrics import read_metrics
from ramify.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
SHORT = (
    "sft.num=60",
    "sft.batch_tokens=2000",
    "sft.optim.warmup_steps=1",
    "rl.steps=2",
    "rl.sample.items=2",
    "rl.rollout.group=4",
    "policy.shape.hidden_size=32",
    "policy.shape.num_hidden_layers=1",
    "evaluate.num=2",
    "evaluate.validation=2",
    "evaluate.attempts=2",
    "schedule.evaluate_every=null",
)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "hybrid.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location("hybrid_benchmark", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two RL steps on outcome reward, from scratch."""
    out = tmp_path_factory.mktemp("programs") / "out"
    train(load_recipe(ROOT / "recipes/programs.py", SHORT), out)
    return out


def test_programs_recipe_trains_from_scratch_on_outcome_reward(trained: Path) -> None:
    rows = list(read_metrics(trained))
    assert {row.stage for row in rows} - {"best"} == {"sft", "first", "rl", "last"}
    assert sum(row.values.get("failed_rollouts", 0) for row in rows) == 0
    last = rows[-1].values
    assert last.keys() >= {
        "test/reward",
        "test/pass@2",
        "test/metric malformed",
        "test/metric raised",
    }


@pytest.mark.parametrize("arm", ["narrow", "process", "v3", "shuffled", "ema"])
def test_each_arm_of_the_study_runs_with_its_overrides(
    arm: str, trained: Path, tmp_path: Path, benchmark: ModuleType
) -> None:
    short = [each for each in SHORT if not each.startswith(("sft", "policy"))]
    given = ["sft=null", f"policy.path={trained}/policy", *benchmark.ARMS[arm].overrides, *short]
    train(load_recipe(ROOT / benchmark.ARMS[arm].recipe, given), tmp_path)
    steps = [
        row.values
        for row in read_metrics(tmp_path)
        if row.stage == "rl" and "learn_s" in row.values
    ]
    assert len(steps) == 2
    assert any(name.startswith("process/" if arm == "process" else "teacher/") for name in steps[0])


@pytest.mark.filterwarnings("ignore:a live teacher:UserWarning")
def test_every_arm_of_the_study_loads_as_a_recipe(benchmark: ModuleType) -> None:
    for arm in benchmark.ARMS.values():
        run = load_recipe(ROOT / arm.recipe, ["sft=null", "policy.path=x", *arm.overrides])
        assert run.rl is not None
        assert (run.rl.steps, run.rl.sample.items, run.rl.rollout.group) == (benchmark.STEPS, 8, 8)


def test_paired_difference_has_a_confidence_interval(benchmark: ModuleType) -> None:
    """Two seeds and four problems: a gain shared by all is certain, one that depends on the seed is
    not."""

    def ran(arm: str, seed: int, gain: float) -> object:
        rewards = {f"i{n}": [0.25 + gain, 0.25 + gain] for n in range(4)}
        return benchmark.ArmResult(
            arm, seed, rewards, 0.25, 30, [], [], 0.0, 0.0, 0.0, 0.0, 0.0, {}
        )

    base = [ran("outcome", seed, 0.0) for seed in (0, 1)]
    assert benchmark.paired_difference(
        [*base, ran("hybrid", 0, 0.5), ran("hybrid", 1, 0.5)], "hybrid", "outcome"
    ) == (
        0.5,
        0.5,
        0.5,
    )
    mean, low, high = benchmark.paired_difference(
        [*base, ran("hybrid", 0, 0.5), ran("hybrid", 1, -0.5)], "hybrid", "outcome"
    )
    assert (mean, low, high) == (0.0, -0.5, 0.5)
    assert benchmark.paired_difference(base, "hybrid", "outcome") is None


def test_fill_replaces_marked_sections_of_a_page(benchmark: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n")
    benchmark.fill(page, {"x": "new\n"})
    assert page.read_text() == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(SystemExit, match="has no place for y"):
        benchmark.fill(page, {"y": ""})
