"""A run that takes seconds: a policy of a few thousand parameters and a task that gives random
tokens a reward."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.engine.limits import Limits
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.config import (
    EvaluateSpec,
    InductionWarmUpSpec,
    PolicySpec,
    RlSpec,
    Run,
    Schedule,
    SftSpec,
    TaskSpec,
)
from ramify.train.findings import CollapseAlarms
from ramify.train.load_run_parts import PreparedTrainingRun
from ramify.train.load_run_parts import assemble as load_parts
from ramify.train.resolve_run import resolve
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.training_guard import TrainingGuardSpec
from ramify.types.trajectory import Trajectory

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


UNTRAINED = CollapseAlarms(truncated=None)
"""An untrained policy writes random tokens: its cells raise, and it does not end its replies."""


def small(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "name": "small",
        "policy": PolicySpec(shape=SHAPE, vocab_size=300, slots=16),
        "task": TaskSpec(name="tests.train.small:even"),
        "warmup": InductionWarmUpSpec(steps=2, batch_tokens=200),
        "sft": SftSpec(
            demos="ledger",
            num=30,
            task=TaskSpec(options={"rows": [4, 6]}),
            batch_tokens=1200,
            optim=OptimizerSpec(kind="muon", lr=1e-3, weight_decay=0.01),
        ),
        "rl": RlSpec(
            steps=4,
            sample=RolloutBatchSpec(items=2, minibatches=2),
            rollout=RolloutOptions(group=3, concurrency=1),
            optim=OptimizerSpec(lr=1e-3, schedule="linear"),
        ),
        "scaffold": "tiny",
        "limits": Limits(max_turns=2, max_reply_tokens=8, max_seconds=300),
        "sandbox": SandboxSpec(provider="inprocess", allow_weaker=True),
        "evaluate": EvaluateSpec(num=2, final=("test",)),
        "schedule": Schedule(evaluate_every=2),
        "compute": TrainerComputeSpec(precision="fp32"),
        "guard": TrainingGuardSpec(alarms=UNTRAINED),
        "threads": 1,
    }
    return Run(**(fields | changes))


def _make(rng: random.Random) -> Item:
    return Item(f"{rng.randrange(10**6)}?", "text", gold=1.0)


def _even(item: Item, trajectory: Trajectory) -> float:
    """1 for a correct answer, which no policy here gives; otherwise 0.9 times the share of even ids
    among the sampled ones."""
    if trajectory.answer == item.gold:
        return 1.0
    ids = [
        id for call in trajectory.calls for turn in call.turns for id in turn.reply.token_ids or ()
    ]
    return sum(id % 2 == 0 for id in ids) / len(ids) * 0.9 if ids else 0.0


even = DatasetTask("even", generated("even", _make), TrajectoryRewardFunction(_even))
wrong = DatasetTask("wrong", generated("wrong", _make), lambda answer, item: 0.5)
zero_variance = DatasetTask(
    "silent", generated("silent", _make), lambda answer, item: float(answer == item.gold)
)


def _fails(item: Item, trajectory: Trajectory) -> float:
    if not trajectory.calls[0].turns:
        return float(trajectory.answer == item.gold)
    raise OSError("the grader is down")


failing = DatasetTask("failing", generated("failing", _make), TrajectoryRewardFunction(_fails))


def weights_of(out: Path) -> dict[str, Any]:
    from ramify.models.weights import read_weights

    return read_weights(out / "policy")


def assemble(run: Run) -> PreparedTrainingRun:
    """The parts of ``run``, loaded and checked as before a training."""
    return load_parts(resolve(run))


class Unpublished:
    """A policy that is published to no engine."""

    version = 0

    async def publish(self) -> None: ...
    async def put_engines_to_sleep(self) -> bool:
        return False

    def release_memory(self) -> None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


async def not_evaluated(split: str) -> Mapping[str, float]:
    return {}
