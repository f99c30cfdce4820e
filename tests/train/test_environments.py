"""Training in a multi-step environment without gold answers: SFT on played episodes, then RL."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify import RLM, ScriptedClient
from ramify.errors import ConfigError
from ramify.evaluate.attempt import attempt
from ramify.models.load import load_policy
from ramify.tasks.base import Item
from ramify.tasks.text_env import env_task
from ramify.train.backends.base import OptimizerSpec
from ramify.train.checkpoint import CheckpointStore
from ramify.train.config import PolicySpec, Schedule, SftSpec, TaskSpec
from ramify.train.data.sft_data import append_trajectories
from ramify.train.data.sft_data import read as read_trajectories
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from tests.shown import train
from tests.train.small import SHAPE, small
from tests.train.test_loop import read_rows

WAYS = ("step('go')\nFINAL(step('go'))", "step('stop')\nFINAL(step('go'))")
"""Two actions that reach the goal, and two of which the first has no effect."""


class Corridor:
    """A Gymnasium-style environment of two rooms: no single action reaches the end."""

    def __init__(self) -> None:
        self.place = self.actions = 0

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "You are in room 0.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions += 1
        self.place += action == "go"
        is_there = self.place == 2
        return f"You are in room {self.place}.", float(is_there), is_there, self.actions == 4, {}


class TextCorridor(Corridor):
    """The same environment with the interface of SkyRL-gym."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "You are in room 0."}], {}

    def step(self, action: str) -> dict[str, Any]:  # type: ignore[override]
        seen, reward, is_there, is_late, _ = super().step(action)
        reported = [{"role": "user", "content": seen}]
        return {
            "observations": reported,
            "reward": reward,
            "done": is_there or is_late,
            "metadata": {},
        }


def _items(split: str, gold: str | None) -> list[Item]:
    return [
        Item(f"way {split} {number}?", gold=gold, id=f"corridor/{split}/{number}")
        for number in range(4)
    ]


def corridor(kind: str = "gymnasium", gold: str | None = None) -> Any:
    splits = {split: _items(split, gold) for split in ("train", "validation", "test")}
    make = Corridor if kind == "gymnasium" else TextCorridor
    return env_task("corridor", splits, lambda item: make())


def played(folder: Path) -> Path:
    """Write episodes that a scripted model played, half of them each way, for SFT."""
    script = itertools.cycle([WAYS[0]] * 4 + [WAYS[1]] * 4)  # both ways for every item
    model = ScriptedClient(lambda messages: next(script))
    task = corridor()

    async def play() -> list[Any]:
        async with RLM(model, scaffold="bare", sandbox="inprocess") as rlm:
            return [
                await attempt(rlm, task, task.splits["train"][number % 4]) for number in range(64)
            ]

    path = folder / "played.jsonl"
    append_trajectories(path, asyncio.run(play()))
    return path


def run(folder: Path, **task: Any) -> Any:
    given = small()
    sft = SftSpec(
        trajectories=str(played(folder)),
        epochs=12,
        batch_tokens=600,
        optim=OptimizerSpec(kind="muon", lr=2e-2),
    )
    rl = msgspec.structs.replace(
        given.rl,
        steps=2,
        sample=RolloutBatchSpec(items=4),
        rollout=RolloutOptions(group=8, concurrency=1),
    )
    limits = msgspec.structs.replace(given.limits, max_reply_tokens=40)
    name = "tests.train.test_environments:corridor"
    return small(
        policy=PolicySpec(shape=SHAPE, vocab_size=270, slots=16),
        task=TaskSpec(name=name, **task),
        warmup=None,
        sft=sft,
        rl=rl,
        limits=limits,
        scaffold="bare",
        schedule=Schedule(evaluate_every=None, save_rollouts_every=1, keep_last=9),
    )


@pytest.mark.parametrize("kind", ["gymnasium", "skyrl"])
def test_multi_step_environment_is_trained_without_gold_answers(kind: str, tmp_path: Path) -> None:
    reported: list[str] = []
    train(run(tmp_path, options={"kind": kind}), tmp_path / "out", say=reported.append)
    assert reported == [
        "task 'corridor': 12 of the 12 items checked have no gold answer; the check of "
        "their scores was skipped"
    ]
    kept = [
        each for path in (tmp_path / "out/rollouts").iterdir() for each in read_trajectories(path)
    ]
    assert len(kept) == 2 * 4 * 8
    assert {call.kind for each in kept for call in each.calls} == {"rlm"}
    assert max(each.metrics["steps"] for each in kept) >= 2
    assert {each.rewards["return"] for each in kept} == {0.0, 1.0}
    losses = [
        row.values["rl_loss"]
        for row in read_rows(tmp_path / "out", "rl")
        if "rl_loss" in row.values
    ]
    assert len(losses) == 2
    before, after = (
        load_policy(path / "policy").model.state_dict()
        for path in CheckpointStore(tmp_path / "out").all()[-2:]
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_validate_false_skips_the_check_of_gold_answers(tmp_path: Path) -> None:
    options = {"gold": "go"}
    with pytest.raises(
        ConfigError, match=r"the right answer 'go' scores 0 and not 1.*task\.validate=false"
    ):
        train(run(tmp_path, options=options), tmp_path / "checked")
    reported: list[str] = []
    train(run(tmp_path, options=options, validate=False), tmp_path / "out", say=reported.append)
    assert (
        reported[0]
        == "task 'corridor': the check of its scores with gold answers is switched off (task.validate=false)"
    )
