"""The analogue at small scale: two steps of demonstrations and of each kind of rollouts, from
scratch, through the one loop.
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
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of two steps of outcome reward, from scratch."""
    out = tmp_path_factory.mktemp("programs") / "out"
    train(load_recipe(ROOT / "recipes/programs.py", SHORT), out)
    return out


def test_from_nothing_by_outcome(begun: Path) -> None:
    rows = list(read_metrics(begun))
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
def test_arms_differ_by_overrides_alone(
    arm: str, begun: Path, tmp_path: Path, benchmark: ModuleType
) -> None:
    short = [each for each in SHORT if not each.startswith(("sft", "policy"))]
    given = ["sft=null", f"policy.path={begun}/policy", *benchmark.ARMS[arm].overrides, *short]
    train(load_recipe(ROOT / benchmark.ARMS[arm].recipe, given), tmp_path)
    steps = [
        row.values
        for row in read_metrics(tmp_path)
        if row.stage == "rl" and "learn_s" in row.values
    ]
    assert len(steps) == 2
    assert any(name.startswith("process/" if arm == "process" else "teacher/") for name in steps[0])


@pytest.mark.filterwarnings("ignore:a live teacher:UserWarning")
def test_every_arm_of_the_study_is_a_recipe(benchmark: ModuleType) -> None:
    for arm in benchmark.ARMS.values():
        run = load_recipe(ROOT / arm.recipe, ["sft=null", "policy.path=x", *arm.overrides])
        assert run.rl is not None
        assert (run.rl.steps, run.rl.sample.items, run.rl.rollout.group) == (benchmark.STEPS, 8, 8)


def test_the_interval_of_a_difference(benchmark: ModuleType) -> None:
    """Over two seeds and four problems: a gain that all share is certain, one that rests on one
    seed is not."""

    def ran(arm: str, seed: int, gain: float) -> object:
        rewards = {f"i{n}": [0.25 + gain, 0.25 + gain] for n in range(4)}
        return benchmark.Trained(arm, seed, rewards, 0.25, 30, [], [], 0.0, 0.0, 0.0, 0.0, 0.0, {})

    base = [ran("outcome", seed, 0.0) for seed in (0, 1)]
    assert benchmark.paired(
        [*base, ran("hybrid", 0, 0.5), ran("hybrid", 1, 0.5)], "hybrid", "outcome"
    ) == (
        0.5,
        0.5,
        0.5,
    )
    mean, low, high = benchmark.paired(
        [*base, ran("hybrid", 0, 0.5), ran("hybrid", 1, -0.5)], "hybrid", "outcome"
    )
    assert (mean, low, high) == (0.0, -0.5, 0.5)
    assert benchmark.paired(base, "hybrid", "outcome") is None


def test_a_page_is_filled_where_it_says(benchmark: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n")
    benchmark.fill(page, {"x": "new\n"})
    assert page.read_text() == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(SystemExit, match="has no place for y"):
        benchmark.fill(page, {"y": ""})
