"""Whole runs over two processes: equal to one process, bit-identical on resume; adapters;
``torchrun``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.cli.train import train_with_restarts
from ramify.errors import ConfigError, TrainError
from ramify.models.weights import read_weights
from ramify.train import run_record
from ramify.train.advantages.ppo import PPO
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.launch import is_restarted
from ramify.train.backends.torchrun_rendezvous import RankInfo, TorchrunAddressExchange
from ramify.train.checkpoint import CheckpointStore
from ramify.train.config import CriticSpec, LoraSpec, PolicySpec, Run, Schedule, TaskSpec
from ramify.train.execute import train
from ramify.train.losses import ImportanceSamplingLoss, PolicyLossInputs
from ramify.train.losses.total_loss import LossSpec
from ramify.train.metrics import read_metrics
from tests.packaged import TINY
from tests.processes import below, kill
from tests.shown import heard, logged
from tests.train.small import small, weights_of
from tests.train.test_killed_processes import GATE, LINUX

STEADY = ("loss", "reward", "grad_norm", "lr", "validation/reward", "test/reward", "ref_kl")
RANKS = TrainerComputeSpec(precision="fp32", backend="fsdp", shard=FsdpSpec(ranks=2, timeout_s=200))
ADAPTED = """
import os, time
from ramify.train.backends.base import TrainerComputeSpec
from tests.train.backends.test_ranks import GATED, adapted

def run():
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("0", "1"):
        time.sleep(1)  # the other rank arrives early and finds leftovers of the previous attempt
    return adapted(compute=TrainerComputeSpec(precision="fp32", backend="fsdp"), task=GATED)
"""


def tuned(**changes: Any) -> Run:
    """Two RL steps with the packaged policy, whose replies differ at this temperature."""
    first = small().rl
    rollout = msgspec.structs.replace(first.rollout, temperature=2.0)
    rl = msgspec.structs.replace(first, steps=2, rollout=rollout)
    policy = PolicySpec(path=str(TINY), slots=16)
    fields = {
        "warmup": None,
        "sft": None,
        "policy": policy,
        "rl": rl,
        "schedule": Schedule(evaluate_every=1),
    }
    return small(**(fields | changes))


def adapted(**changes: Any) -> Run:
    """Train adapters, with a KL to the policy at the start of RL."""
    rl = msgspec.structs.replace(
        tuned().rl, loss=LossSpec(kl_beta=0.1), optim=OptimizerSpec(lr=0.01)
    )
    policy = PolicySpec(path=str(TINY), slots=16, lora=LoraSpec(rank=2, alpha=4.0))
    return tuned(**({"rl": rl, "policy": policy} | changes))


def steady_metrics(out: Path) -> list[tuple[int, str, dict[str, float]]]:
    return [
        (row.step, row.stage, {name: row.values[name] for name in STEADY if name in row.values})
        for row in read_metrics(out)
    ]


def check_measured(ours: Path, theirs: Path, *, is_whole: bool = True, **within: float) -> None:
    """Compare the metrics of both runs with the tolerance of ``pytest.approx``; if ours is
    incomplete, only as far as it got."""
    found = steady_metrics(ours)
    assert sum("loss" in values for *_, values in found) == 2
    for (*place, values), (*other, expected) in zip(found, steady_metrics(theirs), strict=is_whole):
        assert place == other
        assert values == pytest.approx(expected, **within)


def check_close(ours: Path, theirs: Path) -> None:
    check_measured(ours, theirs, rel=1e-4, abs=1e-6)
    mine, wanted = weights_of(ours), weights_of(theirs)
    for name in mine | wanted:
        torch.testing.assert_close(mine[name], wanted[name], rtol=1e-4, atol=1e-5)


GATED = TaskSpec(name="tests.train.test_killed_processes:gated")
"""A task that pauses while a file exists (``test_killed_processes.py``)."""


def gated(**changes: Any) -> Run:
    """``tuned`` over two ranks, with a task that can be paused."""
    return tuned(**({"compute": RANKS, "task": GATED} | changes))


@LINUX
@pytest.mark.slow
def test_two_rank_run_matches_one_process_and_restart_is_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed in the middle of the second step; the trainer reports this, exits and is
    restarted (--restarts)."""
    one, two, killed, gate, recipe = (
        tmp_path / name for name in ("one", "two", "killed", "gate", "recipe.py")
    )
    train(gated(compute=tuned().compute), one)
    train(gated(), two)
    check_close(two, one)

    recipe.write_text("from tests.train.backends.test_ranks import gated as run\n")
    gate.mkdir()
    (gate / "hold-1").touch()
    monkeypatch.setenv(GATE, str(gate))
    messages: list[str] = []

    def kill_rank() -> None:
        while not (gate / "at-1").exists():
            time.sleep(0.02)
        kill(os.getpid(), "ramify.train.backends.launch")
        (gate / "hold-1").unlink()

    threading.Thread(target=kill_rank, daemon=True).start()
    with heard(messages.append):
        assert train_with_restarts([str(recipe)], ["--plain"], killed, None, 1) == 0
    checkpoint = killed / "checkpoints/step-000001"
    assert messages == [
        f"the trainer ended with status 1 after step 1; restarting from {checkpoint}"
    ]
    assert logged(killed, "restart") == [("killed", "")]
    assert logged(killed, "rank_ready") == [("killed", "rank 1")] * 2
    assert steady_metrics(killed) == steady_metrics(two)
    ours, theirs = (weights_of(out / "checkpoints/step-000002") for out in (killed, two))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs | ours)
    assert run_record.read_group_records(killed).has_each_group_once


class Sleepy(ImportanceSamplingLoss, frozen=True, kw_only=True, tag="sleepy"):
    """A loss that never returns on rank 1."""

    def per_token(self, tokens: PolicyLossInputs) -> Any:
        if torch.distributed.get_rank() == 1:
            time.sleep(600)
        return super().per_token(tokens)


@pytest.mark.slow
def test_hanging_rank_is_named_and_stacks_of_all_ranks_are_saved(tmp_path: Path) -> None:
    rl = msgspec.structs.replace(tuned().rl, loss=LossSpec(policy=f"{__name__}:Sleepy"))
    shard = msgspec.structs.replace(RANKS.shard, timeout_s=20)
    with pytest.raises(
        TrainError,
        match=r"no rank made progress for 20 s in .*\. rank 1 \(shard 1, process \d+ on .*\) is at .*in per_token",
    ):
        train(
            tuned(rl=rl, compute=msgspec.structs.replace(RANKS, shard=shard)),
            tmp_path,
        )
    rank_0, _, rank_1 = (tmp_path / "stalled-ranks.txt").read_text().partition("rank 1, ")
    assert "time.sleep(600)" in rank_1
    assert "torch" in rank_0


@LINUX
@pytest.mark.slow
def test_torchrun_restarts_the_ranks_after_one_is_killed(tmp_path: Path) -> None:
    """Rank 0 runs the recipe; the other rank follows and prints nothing. The KL reference is the
    policy without its adapters, whereas one process loads a second model. Rank 0 is killed in the
    middle of the second step."""
    one, killed, gate, log = (tmp_path / name for name in ("one", "killed", "gate", "log"))
    train(adapted(task=GATED), one)
    (tmp_path / "recipe.py").write_text(ADAPTED)
    gate.mkdir()
    (gate / "hold-1").touch()
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "--max-restarts",
            "1",
        ),
        *("-m", "ramify", "train", str(tmp_path / "recipe.py"), "--out", str(killed), "--plain"),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), GATE: str(gate)}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process,
    ):
        try:
            while not (gate / "at-1").exists():
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            os.kill(rank_of(process.pid, 0), signal.SIGKILL)
            (gate / "hold-1").unlink()
            assert process.wait(timeout=280) == 0, log.read_text()
        finally:
            process.terminate()
    assert log.read_text().count("trained policy in") == 1
    check_close(killed, one)
    assert max(values.get("ref_kl", 0.0) for _, _, values in steady_metrics(killed)) > 1e-6
    assert run_record.read_group_records(killed).has_each_group_once
    for out in (killed, one):
        best = CheckpointStore(out).best()
        assert best is not None
        kept = read_weights(best / "policy")
        assert all(torch.equal(weight, kept[name]) for name, weight in weights_of(out).items())


def rank_of(torchrun: int, rank: int) -> int:
    """Return the pid of the process that torchrun started as this rank."""
    for pid, _ in below(torchrun):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"rank {rank} is not there")


@LINUX
def test_is_restarted_needs_an_earlier_attempt_in_the_agent_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a process whose agent store has seen an earlier attempt counts as restarted."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "RAMIFY_RUN_KEY": "a key for both machines",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in (
        environment | {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ).items():
        monkeypatch.setenv(name, value)
    assert not is_restarted()
    world = RankInfo.of_environment()
    assert world is not None
    TorchrunAddressExchange(world).listen().close()  # as an earlier attempt does after its checks
    assert is_restarted()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # another machine counted the restart
    assert is_restarted()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert not is_restarted()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (TrainerComputeSpec(backend="fdsp"), r"unknown backend 'fdsp': did you mean 'fsdp'\?"),
        (
            TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(replicas=4)),
            r"1 ranks do not fit a mesh of 4 replicas: 1 = 4 x 0 \+ 1",
        ),
    ],
)
def test_invalid_compute_specs_are_rejected_before_the_run_starts(
    compute: TrainerComputeSpec, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small(compute=compute), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["shared", "own"])
def test_run_with_critic_over_two_ranks_matches_one_process(model: Any, tmp_path: Path) -> None:
    rl = msgspec.structs.replace(
        tuned().rl, algorithm=PPO(), critic=CriticSpec(model=model), steps=2
    )
    one, two = tmp_path / "one", tmp_path / "two"
    train(tuned(rl=rl), one)
    train(tuned(rl=rl, compute=RANKS), two)
    check_close(two, one)
    losses = [
        [row.values["value_loss"] for row in read_metrics(out) if "value_loss" in row.values]
        for out in (one, two)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert min(losses[0]) > 0
