"""``ramify launch --on ray`` through Ray's own job submission, on a cluster of one node here.

Submission needs Ray's dashboard (``pip install 'ray[default]'``), which Ramify does not: without it
the first test is skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.train.metrics import read_metrics
from tests.extras.cluster.test_launch import ROOT, free_port

RECIPE = """
import msgspec
from tests.train.small import small
def run():
    made = small(warmup=None)
    return msgspec.structs.replace(made, rl=msgspec.structs.replace(made.rl, steps=2))
"""
WAIT_S = 240.0
pytestmark = pytest.mark.slow


class Cluster:
    """A separate Ray head, in a process group that ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.port, self.dashboard = free_port(), free_port()
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            "PATH": programs,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
        }
        self.address = f"127.0.0.1:{self.port}"
        words = ["ray", "start", "--head", "--block", "--num-cpus", "4", "--num-gpus", "0"]
        words += ["--port", str(self.port), "--node-ip-address", "127.0.0.1"]
        words += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(self.dashboard)]
        self.log = folder / "ray.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=WAIT_S
        )

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield made
    finally:
        made.close()


def test_ray_nodes_are_awaited_and_missing_ones_are_named(cluster: Cluster, tmp_path: Path) -> None:
    words = (sys.executable, "-m", "ramify.actors.wait_for_ray_nodes", cluster.address)
    done = cluster.run(tmp_path, *words, "1")
    assert done.returncode == 0, (done.stderr, cluster.log.read_text()[-2000:])
    code = f"""
from ramify.actors.wait_for_ray_nodes import wait_for_nodes
from ramify.errors import ConfigError
try:
    wait_for_nodes({cluster.address!r}, 2, 1.0)
except ConfigError as error:
    print(error)
"""
    done = cluster.run(tmp_path, sys.executable, "-c", code)
    assert f"1 of 2 nodes joined the Ray cluster at {cluster.address} within 1 s" in done.stdout


def test_submitted_job_trains_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="needs ray[default]")
    (tmp_path / "my.py").write_text(RECIPE)
    launch = ("ramify", "launch", "my.py", "--on", "ray", "--out", "runs/x", "--device", "cpu")
    until = time.monotonic() + WAIT_S
    while True:  # the dashboard answers later than the cluster
        done = cluster.run(tmp_path, *launch, "--submit")
        if done.returncode == 0 or time.monotonic() > until:
            break
    assert done.returncode == 0, done.stderr
    (name,) = set(re.findall(r"raysubmit_\w+", done.stdout))  # without the codes of its colours
    while True:
        status = cluster.run(tmp_path, "ray", "job", "status", name).stdout
        if "succeeded" in status or "failed" in status or time.monotonic() > until:
            break
        time.sleep(1)
    logs = cluster.run(tmp_path, "ray", "job", "logs", name).stdout
    assert "succeeded" in status, (status, logs[-3000:])
    measured = read_metrics(tmp_path / "runs/x")
    assert sum(each.stage == "rl" and "rl_loss" in each.values for each in measured) == 2
