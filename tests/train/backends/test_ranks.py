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

from ramify.build import train
from ramify.errors import ConfigError
from ramify.train.backends.base import Compute, Optim, Shard
from ramify.train.config import LoraSpec, PolicySpec, Run
from ramify.train.loss import Loss
from ramify.train.metrics import Measured, read
from tests.train.small import small, weights_of

STEADY = ("loss", "reward", "grad_norm", "lr", "validation/reward", "test/reward", "ref_kl")
RECIPE = """
from tests.train.small import small
from ramify.train.backends.base import Compute

def run():
    return small(warmup=None, compute=Compute(precision="fp32", backend="fsdp"))
"""


class Killed(Exception):
    """Instead of a signal, which would end the test."""


def over_ranks(**changes: Any) -> Run:
    return small(compute=Compute(precision="fp32", backend="fsdp", shard=Shard(ranks=2, timeout_s=60)), **changes)


def steady(out: Path) -> list[tuple[int, str, dict[str, float]]]:
    return [
        (row.step, row.stage, {name: row.values[name] for name in STEADY if name in row.values}) for row in read(out)
    ]


def check_close(ours: Path, theirs: Path) -> None:
    for here, there in zip(steady(ours), steady(theirs), strict=True):
        assert here[:2] == there[:2]
        assert here[2] == pytest.approx(there[2], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_run_is_that_of_one_process_and_resumes_to_the_bit(tmp_path: Path) -> None:
    train(small(), tmp_path / "one")
    train(over_ranks(), tmp_path / "two")
    check_close(tmp_path / "two", tmp_path / "one")

    def kill(measured: Measured) -> None:
        if measured.step == 10:
            raise Killed

    with pytest.raises(Killed):
        train(over_ranks(), tmp_path / "broken", listener=kill)
    train(over_ranks(), tmp_path / "broken", resume=tmp_path / "broken")
    assert steady(tmp_path / "broken") == steady(tmp_path / "two")
    ours, theirs = (weights_of(tmp_path / name) for name in ("broken", "two"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs | ours)


@pytest.mark.slow
def test_adapters_with_the_base_as_reference(tmp_path: Path) -> None:
    """A KL to the policy that rollouts began with: adapters switched off, where one process loads a second model."""
    train(small(rl=None), tmp_path / "start")
    changes: dict[str, Any] = {
        "warmup": None, "sft": None,
        "policy": PolicySpec(path=str(tmp_path / "start/policy"), lora=LoraSpec(rank=2, alpha=4.0)),
        "rl": msgspec.structs.replace(small().rl, loss=Loss(kl_beta=0.1), optim=Optim(lr=0.05)),
    }  # fmt: skip
    train(small(**changes), tmp_path / "one")
    train(over_ranks(**changes), tmp_path / "two")
    check_close(tmp_path / "two", tmp_path / "one")
    assert max(values.get("ref_kl", 0.0) for _, _, values in steady(tmp_path / "two")) > 1e-4
    ours, theirs = (weights_of(tmp_path / name) for name in ("two", "one"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """Rank 0 carries the recipe out; the other follows, and says nothing."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    train(small(warmup=None), tmp_path / "one")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "ramify"),
            *("train", str(tmp_path / "recipe.py"), "--out", str(tmp_path / "two"), "--plain"),
        ],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("holds the trained policy") == 1
    check_close(tmp_path / "two", tmp_path / "one")


def test_what_does_not_fit_is_said_before_a_run_begins(tmp_path: Path) -> None:
    wrong = {
        "unknown backend 'fdsp': did you mean 'fsdp'?": Compute(backend="fdsp"),
        "4 ranks do not fit": Compute(backend="fsdp", shard=Shard(ranks=0, replicas=4)),
    }
    for told, compute in wrong.items():
        with pytest.raises(ConfigError, match=told.replace("?", r"\?").replace("4 ranks", "1 ranks")):
            train(small(compute=compute), tmp_path / "out")
    assert not (tmp_path / "out").exists()
