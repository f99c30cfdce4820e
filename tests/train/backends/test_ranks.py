"""Whole runs over two processes: the run of one process, resumed to the bit; adapters; ``torchrun``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.build.run import train
from ramify.errors import ConfigError
from ramify.inference.base import TINY
from ramify.policy.weights import read_weights
from ramify.train.algorithms.ppo import PPO
from ramify.train.backends.base import Compute, Optim, Shard
from ramify.train.checkpoint import Checkpoints
from ramify.train.config import CriticSpec, LoraSpec, PolicySpec, Run
from ramify.train.loop import Cadence
from ramify.train.loss import Loss
from ramify.train.metrics import read
from tests.train.small import small, weights_of

STEADY = ("loss", "reward", "grad_norm", "lr", "validation/reward", "test/reward", "ref_kl")
RANKS = Compute(precision="fp32", backend="fsdp", shard=Shard(ranks=2, timeout_s=200))
ADAPTED = """
from ramify.train.backends.base import Compute
from tests.train.backends.test_ranks import adapted

def run():
    return adapted(compute=Compute(precision="fp32", backend="fsdp"))
"""


def tuned(**changes: Any) -> Run:
    """Two steps of reinforcement learning of the packaged policy."""
    rl = msgspec.structs.replace(small().rl, steps=2)
    policy = PolicySpec(path=str(TINY), slots=16)
    fields = {"warmup": None, "sft": None, "policy": policy, "rl": rl, "cadence": Cadence(evaluate=1)}
    return small(**(fields | changes))


def adapted(**changes: Any) -> Run:
    """By adapters, with a KL to the policy that rollouts began with."""
    rl = msgspec.structs.replace(tuned().rl, loss=Loss(kl_beta=0.1), optim=Optim(lr=0.01))
    policy = PolicySpec(path=str(TINY), slots=16, lora=LoraSpec(rank=2, alpha=4.0))
    return tuned(**({"rl": rl, "policy": policy} | changes))


def steady(out: Path) -> list[tuple[int, str, dict[str, float]]]:
    return [
        (row.step, row.stage, {name: row.values[name] for name in STEADY if name in row.values}) for row in read(out)
    ]


def check_close(ours: Path, theirs: Path) -> None:
    for here, there in zip(steady(ours), steady(theirs), strict=True):
        assert here[:2] == there[:2]
        assert here[2] == pytest.approx(there[2], rel=1e-4, abs=1e-6)
    mine, wanted = weights_of(ours), weights_of(theirs)
    for name in mine | wanted:
        torch.testing.assert_close(mine[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_is_that_of_one_process_and_resumes_to_the_bit(tmp_path: Path) -> None:
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    train(tuned(), one)
    train(tuned(compute=RANKS), two)
    check_close(two, one)
    train(tuned(compute=RANKS), resumed, resume=two / "checkpoints/step-000001")
    assert steady(resumed)[:2] == [row for row in steady(two) if row[0] == 2][:2]
    ours, theirs = (weights_of(out / "checkpoints/step-000002") for out in (resumed, two))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs | ours)


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """Rank 0 carries the recipe out; the other follows, and says nothing. The reference of the KL is the policy without its
    adapters, where one process loads a second model."""
    (tmp_path / "recipe.py").write_text(ADAPTED)
    train(adapted(), tmp_path / "one", say=lambda text: None)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "ramify"),
            *("train", str(tmp_path / "recipe.py"), "--out", str(tmp_path / "two"), "--plain"),
        ],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("holds the trained policy") == 1
    check_close(tmp_path / "two", tmp_path / "one")
    for out in (tmp_path / "one", tmp_path / "two"):
        best = Checkpoints(out).best()
        assert best is not None
        kept = read_weights(best / "policy")
        assert all(torch.equal(weight, kept[name]) for name, weight in weights_of(out).items())
    assert max(values.get("ref_kl", 0.0) for _, _, values in steady(tmp_path / "two")) > 1e-6


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (Compute(backend="fdsp"), r"unknown backend 'fdsp': did you mean 'fsdp'\?"),
        (Compute(backend="fsdp", shard=Shard(replicas=4)), r"1 ranks do not fit a mesh of 4 replicas: 1 = 4 x 0 \+ 1"),
    ],
)
def test_what_does_not_fit_is_said_before_a_run_begins(compute: Compute, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        train(small(compute=compute), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["shared", "own"])
def test_a_critic_lies_over_the_ranks_too(model: Any, tmp_path: Path) -> None:
    rl = msgspec.structs.replace(tuned().rl, algorithm=PPO(), critic=CriticSpec(model=model), steps=2)
    one, two = tmp_path / "one", tmp_path / "two"
    train(tuned(rl=rl), one)
    train(tuned(rl=rl, compute=RANKS), two)
    check_close(two, one)
    losses = [[row.values["value_loss"] for row in read(out) if "value_loss" in row.values] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert min(losses[0]) > 0
