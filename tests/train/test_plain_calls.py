"""A policy that was trained with plain calls: its evaluations, its ``policy.json`` and its model
card."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from ramify import RLM
from ramify.cli.main import run as command
from ramify.errors import ConfigError
from ramify.evaluate.run_evaluation import evaluate
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Schedule, SftSpec, TaskSpec
from ramify.train.hub_publication import publish
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.trained_policy_settings import read_policy_settings
from ramify.types.trajectory import Trajectory
from tests.evaluate.helpers import plan
from tests.shown import train
from tests.train.small import SHAPE, small
from tests.train.test_loop import read_rows


def is_plain(item: Item, trajectory: Trajectory) -> float:
    return float(trajectory.root.kind == "lm")


def plain() -> DatasetTask:
    """Reward plain calls, and nothing else."""
    splits = {
        split: [Item("2 + 2?", id=f"{split}/{number}") for number in range(4)]
        for split in ("train", "validation", "test")
    }
    return DatasetTask("plain", splits, TrajectoryRewardFunction(is_plain))


TASK = TaskSpec(name=f"{__name__}:plain")
EVALUATE = EvaluateSpec(num=2, first=("test",), final=("test",))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of plain RLVR with one step."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    run = small(
        policy=PolicySpec(shape=SHAPE, words=("a", "b"), slots=16),
        task=TASK,
        warmup=None,
        sft=None,
        rl=RlSpec(
            steps=1,
            sample=RolloutBatchSpec(items=1),
            rollout=RolloutOptions(group=2, concurrency=1, direct=True),
            optim=OptimizerSpec(lr=1e-3),
        ),
        scaffold="bare",
        evaluate=EVALUATE,
        schedule=Schedule(evaluate_every=1),
    )
    train(run, out, say=lambda text: None)
    return out


@pytest.mark.parametrize(("option", "reward"), [("", 1.0), ("--no-direct", 0.0)])
def test_a_policy_is_evaluated_as_it_was_trained(
    trained: Path, capsys: pytest.CaptureFixture[str], option: str, reward: float
) -> None:
    assert read_policy_settings(trained / "policy").direct
    words = ["eval", TASK.name, "--model", f"local:{trained}/policy", "--items", "2", "--json"]
    assert command([*words, "--max-turns", "1", "--no-store", *filter(None, [option])]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["rewards"]["correct"] == reward


def test_library_evaluates_a_policy_as_it_was_trained(trained: Path) -> None:
    model = f"local:{trained}/policy"
    with RLM(model) as rlm:
        done = asyncio.run(evaluate(rlm, plain(), plan(model=model, items=1)))
    assert [outcome.reward for outcome in done.outcomes] == [1.0]


def test_card_of_a_policy_without_sessions_mentions_none(trained: Path, tmp_path: Path) -> None:
    card = (publish(trained, tmp_path / "new").folder / "README.md").read_text()
    assert "answers by one plain call" in card
    assert "user: 2 + 2?" in card
    for word in ("Python", "session", "turns", "recursive"):
        assert word not in card
    for split in ("validation", "test"):
        (row,) = [line for line in card.splitlines() if line.startswith(f"| {split} ")]
        assert row.endswith(" | 1.000 |")  # before training


@pytest.mark.parametrize("part", ["policy", "checkpoints", "checkpoints/step-000001/policy"])
def test_part_of_a_run_is_not_published_but_the_run_is_named(
    trained: Path, tmp_path: Path, part: str
) -> None:
    with pytest.raises(ConfigError, match=f"give the run's folder, {trained}$"):
        publish(trained / part, tmp_path / "new")


@pytest.mark.parametrize(("reply", "reward"), [("4", 1.0), ("FINAL(2 + 2)", 0.0)])
def test_run_without_rollouts_is_evaluated_as_its_conversations(
    reply: str, reward: float, tmp_path: Path
) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": reply},
        ]
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((msgspec.json.encode(row) + b"\n") * 4)
    run = small(
        policy=PolicySpec(shape=SHAPE, vocab_size=261, slots=16),
        task=TASK,
        warmup=None,
        sft=SftSpec(demos=str(rows), batch_tokens=100, optim=OptimizerSpec(lr=1e-3)),
        rl=None,
        scaffold="bare",
        evaluate=msgspec.structs.replace(EVALUATE, first=()),
    )
    train(run, tmp_path / "out", say=lambda text: None)
    (last,) = read_rows(tmp_path / "out", "last")
    assert last.values["test/reward"] == reward
    assert read_policy_settings(tmp_path / "out/policy").direct is bool(reward)
