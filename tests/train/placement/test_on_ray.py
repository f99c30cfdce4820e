"""Runs on a Ray cluster: same results as without Ray, a killed rank is named, and nothing is left
behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ramify.errors import TrainError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.config import Run
from ramify.train.execute import train
from ramify.train.metrics import StepMetrics
from ramify.train.placement.placement_spec import NodePoolSpec, PlacementSpec, RoleSpec
from ramify.train.placement_plan import with_placement_kind
from tests.train.backends.test_ranks import RANKS, check_measured, tuned

pytest.importorskip("ray", reason="needs the extra ray")
JOINS = """
import sys
from ramify.errors import ConfigError
from ramify.actors.ray_launcher import RayLauncher
try:
    RayLauncher([], address=sys.argv[1])
except ConfigError as error:
    print(error)
"""
CLUSTER = """
import sys
from tests.train.placement.test_on_ray import on_a_cluster
on_a_cluster(sys.argv[1])
"""
SMALL = RoleSpec(cpus=0.4)


def placed() -> Run:
    """Two ranks and one engine, each in a separate placement slot."""
    spec = PlacementSpec(pools={"main": NodePoolSpec(cpus=2)}, trainer=SMALL, inference=SMALL)
    return tuned(compute=RANKS, inference=InferenceSpec(), placement=spec)


def on_a_cluster(folder: str) -> None:
    """Run everything that needs a cluster in one process and one run, since starting one takes
    seconds: before training, a process that sees another Ray version tries to join; after the
    second step rank 1 is killed."""
    num_steps = 0

    def look(measured: StepMetrics) -> None:
        nonlocal num_steps
        if not num_steps and "loss" not in measured.values:
            join_with_other_version(gcs_address())
        num_steps += "loss" in measured.values
        if "loss" in measured.values and num_steps == 2:
            os.kill(pid_of("ramify.train.backends.launch"), signal.SIGKILL)

    try:
        train(with_placement_kind(placed(), "ray"), folder, listener=look)
    except TrainError as error:
        print(error)


def join_with_other_version(address: str) -> None:
    """Change the version in the cluster's records while another process tries to join."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    key, where = b"CLUSTER_METADATA", b"cluster"
    true = _internal_kv_get(key, namespace=where)
    _internal_kv_put(
        key, json.dumps(json.loads(true) | {"ray_version": "2.9.3"}).encode(), True, namespace=where
    )
    done = subprocess.run(
        [sys.executable, "-c", JOINS, address], capture_output=True, text=True, timeout=300
    )
    print(done.stdout, end="")
    _internal_kv_put(key, true, True, namespace=where)


def gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def pid_of(name: str) -> int:
    """Return the pid of the process of this test's cluster that runs the module ``name``."""
    mine = f"/{Path(os.environ['HOME']).name}"
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name.encode() in (path / "cmdline").read_bytes() and mine in (
                path / "environ"
            ).read_text(errors="replace"):
                return int(path.name)
    raise LookupError(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_on_ray_matches_local_run_and_names_killed_rank(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("ray*"))
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(tmp_path / "ray")],
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 2), done.stdout + done.stderr
    version, lost = done.stdout.splitlines()[-2:]
    assert re.match(
        r"the Ray cluster at .* runs other versions than this process \(.*2\.9\.3", version
    )
    assert re.match(
        rf"rank 1 \(shard 1, process \d+ on {socket.gethostname()}\) is lost: it was killed by signal 9; its log ends: ",
        lost,
    )
    assert not [
        path for path in Path("/proc").glob("[0-9]*/environ") if file_contains(path, str(tmp_path))
    ]
    assert set(Path("/tmp").glob("ray*")) <= before
    assert not list(tmp_path.glob(".ray*"))

    alone = msgspec.structs.replace(
        placed(), compute=TrainerComputeSpec(precision="fp32"), inference=None, placement=None
    )
    train(alone, tmp_path / "alone")
    check_measured(tmp_path / "ray", tmp_path / "alone", is_whole=False, abs=1e-5)


def file_contains(path: Path, text: str) -> bool:
    with contextlib.suppress(OSError):
        return text.encode() in path.read_bytes()
    return False
