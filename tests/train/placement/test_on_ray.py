"""One cluster of Ray for all that needs one: a run on it is the run without it; what dies on it is named; it ends whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ramify.build.run import train
from ramify.errors import ConfigError
from ramify.inference.http.spec import InferenceSpec
from ramify.train.config import Run
from ramify.train.placement.counted import by
from ramify.train.placement.on_ray import RayHosts
from ramify.train.placement.seats import Member, Needs, Seat
from ramify.train.placement.spec import PlacementSpec, Pool, Role
from tests.train.backends.test_ranks import RANKS, steady, tuned

pytest.importorskip("ray", reason="needs the extra ray")
CLUSTER = """
import sys
from tests.train.placement.test_on_ray import on_a_cluster
on_a_cluster(sys.argv[1])
"""
SMALL = Role(cpus=0.4)


def placed() -> Run:
    """Two ranks and an engine, which share seats where they can."""
    spec = PlacementSpec(pools={"main": Pool(cpus=2)}, trainer=SMALL, inference=SMALL)
    return tuned(compute=RANKS, placement=spec)


def on_a_cluster(folder: str) -> None:
    """All of it in one process, since a cluster takes seconds to come up."""
    out = Path(folder)
    begun = time.monotonic()
    train(by(msgspec.structs.replace(placed(), inference=InferenceSpec()), "ray"), out / "ray", say=print)
    assert (out / "ray/ranks/rank-1.log").exists()
    print(f"trained in {time.monotonic() - begun:.1f} s, {time.process_time():.1f} s of this process", flush=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_ray_is_the_run_without_it(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("ray*"))
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(tmp_path)], capture_output=True, text=True, timeout=500,
        env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stderr)
    train(by(placed(), "local"), tmp_path / "local", say=print)
    ours, theirs = steady(tmp_path / "ray"), steady(tmp_path / "local")
    assert len(ours) == len(theirs) > 2
    for (*place, values), (*other, expected) in zip(ours, theirs, strict=True):
        assert place == other
        assert values == pytest.approx(expected, abs=1e-6)
    assert set(Path("/tmp").glob("ray*")) <= before
    assert not list(tmp_path.glob(".ray*"))
