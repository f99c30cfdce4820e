"""Processes of a real run are killed from outside: its results are the same as without the fault.

A file pauses the run: the process that scores the first rollout of step K creates ``at-K`` and
waits as long as ``hold-K`` exists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.weight_sync.base import remove_stale_files
from ramify.inference.weight_sync.shared_memory import SharedMemoryWeightSync
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated
from ramify.train import metrics, run_record
from ramify.train.config import EvaluateSpec, Run, Schedule, TaskSpec
from ramify.train.metrics import StepMetrics, read_metrics
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.types.trajectory import Trajectory
from tests.processes import kill
from tests.shown import logged, train
from tests.train.small import _even, _make, small, weights_of

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
GATE = "RAMIFY_TEST_GATE"
RECIPE = """
from tests.train.test_killed_processes import short as run
"""


def short(**changes: Any) -> Run:
    found = small(
        warmup=None,
        task=TaskSpec(name="tests.train.test_killed_processes:gated"),
        evaluate=EvaluateSpec(num=1, final=()),
        schedule=Schedule(evaluate_every=None, checkpoint_every=1),
        **changes,
    )
    assert found.sft is not None
    assert found.rl is not None
    rollout = RolloutOptions(group=3, concurrency=1, grace_s=300.0)
    sft, rl = (
        msgspec.structs.replace(found.sft, num=10),
        msgspec.structs.replace(found.rl, rollout=rollout),
    )
    return msgspec.structs.replace(found, sft=sft, rl=rl)


def _gated(item: Item, trajectory: Trajectory) -> float:
    step = trajectory.id.partition("step=")[2].partition("/")[0]
    hold = Path(os.environ.get(GATE, "/nowhere")) / f"hold-{step}"
    if trajectory.id.endswith("group=0/rollout=0") and hold.exists():
        hold.with_name(f"at-{step}").touch()
        while hold.exists():
            time.sleep(0.01)
    return _even(item, trajectory)


gated = DatasetTask("gated", generated("gated", _make), TrajectoryRewardFunction(_gated))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    train(short(), out)
    return out


def same(out: Path, undisturbed: Path) -> None:
    """Check that each group has the same outcome as without the fault, and the policy is equal."""
    assert run_record.read_group_records(out).has_each_group_once
    ours, theirs = (
        [(each.step, each.number, each.outcome) for each in metrics.GROUPS.read(each)]
        for each in (out, undisturbed)
    )
    assert ours == theirs
    ended = weights_of(out)
    for name, weight in weights_of(undisturbed).items():
        assert (ended[name] - weight).abs().max() < 1e-6


@LINUX
def test_killed_engine_is_restarted_without_changing_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    messages: list[str] = []
    killed: list[int] = []

    def listen(measured: StepMetrics) -> None:
        if measured.stage == "rl" and len(killed) < 1:
            killed.append(measured.step)
            kill(os.getpid(), f"serve-policy {tmp_path}")

    train(
        short(inference=InferenceSpec(probe_s=60.0)),
        tmp_path,
        listener=listen,
        say=messages.append,
        inform=lambda text: messages.append(text) if "is back" in text else None,
    )
    same(tmp_path, undisturbed)
    assert len(messages) == 2
    assert " was killed by signal 9; its log ends: " in messages[0]
    assert messages[0].endswith("no engine is left; it is started again")
    assert "an engine is back, with version" in messages[1]
    assert logged(tmp_path, "restart") == [(tmp_path.name, "")]
    last = [each.values for each in read_metrics(tmp_path) if "rl_loss" in each.values][-1]
    assert (last["engines"], last["engines_lost"], last["engines_back"]) == (1, 1, 1)


@LINUX
def test_engine_killed_while_asleep_is_restarted_without_changing_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    messages: list[str] = []

    def listen(measured: StepMetrics) -> None:
        if measured.stage == "sft" and measured.step == 2:
            kill(os.getpid(), f"serve-policy {tmp_path}")

    train(
        short(inference=InferenceSpec(probe_s=60.0, sleep="learn")),
        tmp_path,
        listener=listen,
        say=messages.append,
    )
    same(tmp_path, undisturbed)
    slept = [
        "sleep_s" in each.values for each in read_metrics(tmp_path) if "learn_s" in each.values
    ]
    assert len(slept) > 4
    assert all(slept)
    assert len(messages) == 1
    port = messages[0].split(":")[2].split(" ")[0]
    url = rf"http://127\.0\.0\.1:{port}/wake_up\?tags=weights"
    assert re.search(rf"the failed request: POST: .*{url}", messages[0])
    assert messages[0].endswith("no engine is left; it is started again")


@LINUX
def test_killed_trainer_resumes_from_its_last_checkpoint(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, gate, log = tmp_path / "recipe.py", tmp_path / "gate", tmp_path / "log"
    recipe.write_text(RECIPE)
    gate.mkdir()
    (gate / "hold-2").touch()
    monkeypatch.setenv(GATE, str(gate))
    command = [
        sys.executable,
        "-m",
        "ramify",
        "train",
        str(recipe),
        "--out",
        str(tmp_path / "out"),
        "--restarts",
        "1",
    ]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            while not (gate / "at-2").exists():
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            kill(process.pid, " train ")
            (gate / "hold-2").unlink()
            assert process.wait() == 0, log.read_text()
        finally:
            process.terminate()
    step = [each.step for each in metrics.GROUPS.read(undisturbed)][
        3
    ]  # after the second RL step, with two groups per step
    checkpoint = tmp_path / "out/checkpoints" / f"step-{step:06d}"
    assert (
        f"the trainer was killed by signal 9 after step {step}; restarting from {checkpoint}"
        in log.read_text()
    )
    assert logged(tmp_path / "out", "restart") == [("out", "")]
    same(tmp_path / "out", undisturbed)


@LINUX
def test_trainer_with_invalid_recipe_is_not_restarted(tmp_path: Path) -> None:
    """A trainer with an invalid recipe is not restarted at all."""
    command = [
        sys.executable,
        "-m",
        "ramify",
        "train",
        str(tmp_path / "none.py"),
        "--out",
        str(tmp_path),
        "--restarts",
        "3",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("is not a recipe") == 1


@LINUX
def test_killed_fork_server_is_restarted(tmp_path: Path) -> None:
    killed: list[int] = []

    def listen(measured: StepMetrics) -> None:
        if measured.stage == "rl" and not killed:
            killed.append(measured.step)
            kill(os.getpid(), "forkserver")

    train(
        small(warmup=None, sandbox=SandboxSpec(provider="process", allow_weaker=True)),
        tmp_path,
        listener=listen,
    )
    assert killed
    assert run_record.read_group_records(tmp_path).outcomes.get("lost", 0) == 0
    after = [
        each.values
        for each in read_metrics(tmp_path)
        if each.step > killed[0] and "rl_loss" in each.values
    ]
    assert len(after) == 3
    assert all(values["sampled_tokens"] > 0 for values in after)


def test_shared_memory_of_dead_trainers_is_removed_and_of_live_ones_kept(
    tmp_path: Path,
) -> None:
    import torch

    from ramify.inference.weight_sync.base import to_lazy_weights

    living = SharedMemoryWeightSync(folder=str(tmp_path))
    living.open(1)
    list(living.chunks(to_lazy_weights([("a", torch.ones(3))], torch.float32), 1, whole=True))
    held = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "ramify-weights-held-dead-0").write_bytes(b"0" * 64)
    (tmp_path / "another file").touch()
    remove_stale_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*held, "another file"}
    living.close()
    assert [path.name for path in tmp_path.iterdir()] == ["another file"]
