"""Runs on a Ray cluster of several nodes: raylets on one machine with different loopback
addresses.

A run whose engine and rollout worker are on another node equals the run in one process. Processes
of a lost node are restarted on another one. These nodes share CPUs, files and memory, so the tests
do not cover slow or partitioned networks, separate file systems, or GPUs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.actors.launcher import RoleInstanceId
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.config import Run
from ramify.train.placement.placement_slots import placement_slots
from ramify.train.placement.placement_spec import (
    NodePoolSpec,
    PlacementSpec,
    RewardServiceSpec,
    RoleSpec,
)
from ramify.train.placement.reward_services import RewardServiceManager
from ramify.train.placement_plan import with_placement_kind
from tests.shown import heard, train
from tests.train.backends.test_ranks import check_measured, tuned
from tests.train.placement.test_services import SERVES

pytest.importorskip("ray", reason="needs the extra ray")
SCRIPT = """
import sys
from tests.train.placement.test_nodes import on_nodes
on_nodes(sys.argv[1])
"""


NODE: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}


def spread_run(address: str = "") -> Run:
    """The trainer on one node, its engine and a rollout worker on another."""
    spec = PlacementSpec(
        pools={"own": NodePoolSpec(cpus=0.8), "far": NodePoolSpec(cpus=1.6)},
        trainer=RoleSpec(pool="own", cpus=0.4),
        address=address,
        inference=RoleSpec(pool="far", cpus=0.8),
        rollouts=RoleSpec(pool="far", count=1, cpus=0.8),
        start_s=300,
    )
    return tuned(
        compute=TrainerComputeSpec(precision="fp32"),
        inference=InferenceSpec(weight_sync="file"),
        placement=spec,
    )


def on_nodes(folder: str) -> None:
    """Run everything that needs a cluster of several nodes on one cluster."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    second = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2", **NODE)
    train(with_placement_kind(spread_run(cluster.address), "ray"), Path(folder) / "ray")
    run_service_on_lost_nodes(cluster, second, folder)
    cluster.shutdown()


def run_service_on_lost_nodes(cluster: Any, second: Any, folder: str) -> None:
    """A service runs on the second of two nodes; that node is removed and a third is added; finally
    the third is removed, too."""
    from ramify.actors.ray_launcher import RayLauncher

    judge = RewardServiceSpec(
        pool="far",
        cpus=1.5,
        command=(sys.executable, "-c", SERVES, "{host}", "{port}"),
        variable="RAMIFY_TEST_JUDGE",
        path="/",
    )
    spec = PlacementSpec(
        kind="ray",
        pools={"own": NodePoolSpec(cpus=0.4), "far": NodePoolSpec(cpus=1.5)},
        trainer=RoleSpec(pool="own", cpus=0.4),
        services={"judge": judge},
        address=cluster.address,
    )
    hosts = RayLauncher(
        placement_slots(spec, {"trainer": 1, "inference": 0, "rollouts": 0, "judge": 1}),
        address=spec.address,
    )
    member = RoleInstanceId("judge", 0)
    messages: list[str] = []

    async def go() -> None:
        services = RewardServiceManager(hosts, {"judge": judge}, Path(folder), restarts=1)
        await services.start()
        url = os.environ["RAMIFY_TEST_JUDGE"]
        before = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
        print(hosts.address_of(member), hosts.address in url)
        cluster.remove_node(second, False)  # Ray must be called from the main thread
        third = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3", **NODE)
        while len(messages) < 2:
            await asyncio.sleep(0.1)
        after = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
        print(hosts.address_of(member), before != after)
        await services.close()
        cluster.remove_node(third, False)

    with heard(messages.append, messages.append):
        asyncio.run(go())
    hosts.start_s = 5.0
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until:  # the cluster notices the lost node after a while
            hosts.ensure_slot(member)
            time.sleep(0.2)
    except ConfigError as error:
        print(error)
    print(*messages, sep="\n")
    hosts.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_over_two_nodes_and_recovery_from_lost_nodes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # A short path for Ray's sockets; not /tmp/ray*, which another test checks for leftovers.
    ray = Path("/tmp") / f"n-{os.getpid()}"
    request.addfinalizer(lambda: shutil.rmtree(ray, ignore_errors=True))
    (ray / "ray").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ
        | {"HOME": str(tmp_path), "RAY_TMPDIR": str(ray), "RAY_USAGE_STATS_ENABLED": "0"},
    )
    if "timed out during startup" in done.stderr:
        pytest.skip("Ray gives a node 30 s to come up, and this machine was too busy")
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("127.", "slot", "service"))
    ]
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[:2] == ["127.0.0.2 True", "127.0.0.3 True"]
    assert "(127.0.0.3), was lost, and no node offered 0 GPUs and 1.5 CPUs within 5 s" in lines[2]
    assert [line.rpartition("; ")[2] for line in lines[3:5]] == ["it is restarted", lines[4]]
    assert lines[4].endswith("is back")

    alone = msgspec.structs.replace(spread_run(), inference=None, placement=None)
    train(alone, tmp_path / "alone")
    check_measured(tmp_path / "ray", tmp_path / "alone", abs=1e-5)
