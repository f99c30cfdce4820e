"""A Ray cluster of several nodes, which are raylets on one machine with different loopback
addresses.

A run whose engine and rollout worker are on another node equals the run in one process. Processes
of a lost node are restarted on another one. These nodes share CPUs, files and memory, so the tests
show nothing about slow or split networks, file systems that not all nodes see, or GPUs.
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

from ramify.actors.launcher import SlotMember
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import ComputeSpec
from ramify.train.config import Run
from ramify.train.placement.placement_slots import placement_slots
from ramify.train.placement.placement_spec import NodePool, PlacementSpec, RoleSpec, ServiceSpec
from ramify.train.placement.services import RunServices
from ramify.train.resource_counts import by
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


def spread(address: str = "") -> Run:
    """The run on one node, its engine and a runner on another."""
    spec = PlacementSpec(
        pools={"own": NodePool(cpus=0.8), "far": NodePool(cpus=1.6)},
        trainer=RoleSpec(pool="own", cpus=0.4),
        address=address,
        inference=RoleSpec(pool="far", cpus=0.8),
        rollouts=RoleSpec(pool="far", count=1, cpus=0.8),
        start_s=300,
    )
    return tuned(
        compute=ComputeSpec(precision="fp32"),
        inference=InferenceSpec(weight_sync="file"),
        placement=spec,
    )


def on_nodes(folder: str) -> None:
    """All that needs a cluster of several nodes, on one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    second = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2", **NODE)
    train(by(spread(cluster.address), "ray"), Path(folder) / "ray")
    moved(cluster, second, folder)
    cluster.shutdown()


def moved(cluster: Any, second: Any, folder: str) -> None:
    """A service stands on the second of two nodes, that node goes and a third one comes; at last
    that one goes, too."""
    from ramify.actors.ray_launcher import RayLauncher

    judge = ServiceSpec(
        pool="far",
        cpus=1.5,
        command=(sys.executable, "-c", SERVES, "{host}", "{port}"),
        variable="RAMIFY_TEST_JUDGE",
        path="/",
    )
    spec = PlacementSpec(
        kind="ray",
        pools={"own": NodePool(cpus=0.4), "far": NodePool(cpus=1.5)},
        trainer=RoleSpec(pool="own", cpus=0.4),
        services={"judge": judge},
        address=cluster.address,
    )
    hosts = RayLauncher(
        placement_slots(spec, {"trainer": 1, "inference": 0, "rollouts": 0, "judge": 1}),
        address=spec.address,
    )
    who = SlotMember("judge", 0)
    said: list[str] = []

    async def go() -> None:
        services = RunServices(hosts, {"judge": judge}, Path(folder), restarts=1)
        await services.start()
        url = os.environ["RAMIFY_TEST_JUDGE"]
        before = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
        print(hosts.address_of(who), hosts.address in url)
        cluster.remove_node(second, False)  # Ray wants to be in the main thread
        third = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3", **NODE)
        while len(said) < 2:
            await asyncio.sleep(0.1)
        after = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
        print(hosts.address_of(who), before != after)
        await services.close()
        cluster.remove_node(third, False)

    with heard(said.append, said.append):
        asyncio.run(go())
    hosts.start_s = 5.0
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until:  # the cluster knows after a while that the node is gone
            hosts.renew(who)
            time.sleep(0.2)
    except ConfigError as error:
        print(error)
    print(*said, sep="\n")
    hosts.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_over_nodes_and_what_becomes_of_those_that_go(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Sockets lie in there, whose paths are short; another test looks for what Ray leaves in /tmp/ray*.
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
    assert (
        "(127.0.0.3), is gone, and no node of the cluster provided its 0 GPUs and 1.5 CPUs within "
        "5 s" in lines[2]
    )
    assert [line.rpartition("; ")[2] for line in lines[3:5]] == ["it is restarted", lines[4]]
    assert lines[4].endswith("is back")

    alone = msgspec.structs.replace(spread(), inference=None, placement=None)
    train(alone, tmp_path / "alone")
    check_measured(tmp_path / "ray", tmp_path / "alone", abs=1e-5)
