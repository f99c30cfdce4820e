"""Parts of a run that are killed, from outside and for real: the run becomes what it would have been without that.

``OUT/../gate`` holds the run still: whoever scores the first rollout of step K says so in ``at-K``, and waits for ``pass-K``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ramify.build.recipe import recipe
from ramify.build.run import train
from ramify.inference.weights.shared import Shared, sweep
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import Item, generated
from ramify.tasks.simple import SimpleTask, Whole
from ramify.train import groups
from ramify.train.metrics import Measured, read
from ramify.types.trajectory import Trajectory
from tests.train.small import _even, _make, small, weights_of

GATE = "RAMIFY_TEST_GATE"
RECIPE = """
import msgspec
from ramify.inference.http.spec import InferenceSpec
from ramify.train.config import EvaluateSpec, TaskSpec
from ramify.train.loop import Cadence
from ramify.train.rollout import RolloutOptions
from tests.train.small import small

def run():
    found = small(
        warmup=None, task=TaskSpec(name="tests.train.test_faults:gated"), evaluate=EvaluateSpec(num=1, final=()),
        cadence=Cadence(evaluate=0, checkpoint=1), inference=InferenceSpec(),
    )
    rollout = RolloutOptions(group=3, concurrency=1, grace_s=300.0)
    return msgspec.structs.replace(
        found, sft=msgspec.structs.replace(found.sft, num=10), rl=msgspec.structs.replace(found.rl, rollout=rollout)
    )
"""


def _gated(item: Item, trajectory: Trajectory) -> float:
    step = trajectory.id.partition("step=")[2].partition("/")[0]
    gate = Path(os.environ.get(GATE, "/nowhere"))
    if trajectory.id.endswith("group=0/rollout=0") and gate.is_dir() and not (gate / f"pass-{step}").exists():
        (gate / f"at-{step}").touch()
        while not (gate / f"pass-{step}").exists():
            time.sleep(0.01)
    return _even(item, trajectory)


gated = SimpleTask("gated", generated("gated", _make), Whole(_gated))


def below(pid: int) -> Iterator[tuple[int, str]]:
    """(process, command line) of all that ``pid`` started, and those started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if parent == pid:
            yield int(path.parent.name), command
            yield from below(int(path.parent.name))


def kill(pid: int, what: str) -> None:
    for each, command in below(pid):
        if what in command:
            os.kill(each, signal.SIGKILL)
            return
    raise AssertionError(f"{what} is not there: {list(below(pid))}")


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not holds():
        assert process.poll() is None, "the run ended before"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_killed_engine_and_a_killed_trainer_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    calm, out, gate = tmp_path / "calm", tmp_path / "out", tmp_path / "gate"
    train(recipe(tmp_path / "recipe.py", ["inference=null"]), calm)
    gate.mkdir()
    for step in (0, 2):
        (gate / f"pass-{step}").touch()
    monkeypatch.setenv(GATE, str(gate))
    log = (tmp_path / "log").open("wb")
    command = [
        sys.executable,
        "-m",
        "ramify",
        "train",
        str(tmp_path / "recipe.py"),
        "--out",
        str(out),
        "--restarts",
        "2",
    ]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until((gate / "at-1").exists, process)
            kill(process.pid, "serve-policy")  # others of its rollouts are still to come
            (gate / "pass-1").touch()
            until((gate / "at-3").exists, process)
            kill(process.pid, f"ramify train {tmp_path}")
            (gate / "pass-3").touch()
            assert process.wait() == 0, (tmp_path / "log").read_text()
        finally:
            process.terminate()
    said = (tmp_path / "log").read_text()
    assert "no engine is left; it is started again" in said
    assert "an engine is back, with version" in said
    assert "the trainer was killed by signal 9 after step" in said
    assert groups.accounts(out).balanced
    assert [(each.number, each.outcome) for each in groups.read(out)] == [
        (each.number, each.outcome) for each in groups.read(calm)
    ]
    for name, weight in weights_of(calm).items():
        assert (weights_of(out)[name] - weight).abs().max() < 1e-6


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_killed_supervisor_of_sessions_is_started_again(tmp_path: Path) -> None:
    killed: list[int] = []

    def listen(measured: Measured) -> None:
        if measured.stage == "rl" and not killed:
            killed.append(measured.step)
            kill(os.getpid(), "forkserver")

    train(small(warmup=None, sandbox=SandboxSpec(provider="process", allow_weaker=True)), tmp_path, listener=listen)
    assert killed
    assert groups.accounts(tmp_path).outcomes.get("lost", 0) == 0
    after = [each.values for each in read(tmp_path) if each.step > killed[0] and "rl_loss" in each.values]
    assert len(after) == 3
    assert all(values["sampled_tokens"] > 0 for values in after)


def test_buffers_of_a_dead_trainer_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    import torch

    from ramify.inference.weights.layout import sources

    living = Shared(folder=str(tmp_path))
    living.open(1)
    list(living.chunks(sources([("a", torch.ones(3))], torch.float32), 1, whole=True))
    held = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "ramify-weights-held-dead-0").write_bytes(b"0" * 64)
    (tmp_path / "another file").touch()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*held, "another file"}
    living.close()
    assert [path.name for path in tmp_path.iterdir()] == ["another file"]
