"""Engines and services in placement slots: start, health checks, restarts, and engines that weight
sync cannot reach."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.actors.launcher import LocalLauncher, RoleInstanceId
from ramify.errors import ConfigError
from ramify.inference.http.engine_process import EngineProcess
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.placement.placement_spec import (
    NodePoolSpec,
    PlacementSpec,
    RewardServiceSpec,
    RoleSpec,
)
from ramify.train.placement.reward_services import RewardServiceManager
from ramify.train.placement_plan import check_weight_sync_reach, plan_placement
from tests.shown import heard
from tests.train.small import small


class TwoMachines(LocalLauncher):
    """Two machines: every member except the first is on the other one."""

    def address_of(self, member: RoleInstanceId) -> str:
        return "10.0.0.2" if member.number else self.address


def test_engine_listens_on_the_address_of_its_machine(tmp_path: Path) -> None:
    spec = InferenceSpec(
        num=2, command=("sh", "-c", 'echo "$@"; exit 3', "engine"), ports=(7001, 7002)
    )
    hosts = TwoMachines()
    engines = [
        EngineProcess(hosts, spec, i, tmp_path, "float32", 64, tmp_path / f"{i}.log")
        for i in (0, 1)
    ]
    assert [engine.url for engine in engines] == ["http://127.0.0.1:7001", "http://10.0.0.2:7002"]
    while engines[1].exit_status is None:
        time.sleep(0.01)
    assert engines[1].exit_status == 3
    assert (
        f"{tmp_path} --host 10.0.0.2 --port 7002 --dtype float32 --weight-transfer"
        in engines[1].exit_reason()
    )
    hosts.close()


def test_service_is_reached_at_its_address_and_counts_as_a_slot(tmp_path: Path) -> None:
    """Python's file server takes the place of a judge; a second service exits at once."""
    judge = RewardServiceSpec(
        command=(sys.executable, "-m", "http.server", "--bind", "{host}", "{port}"),
        variable="RAMIFY_TEST_JUDGE",
        path="/",
    )
    (tmp_path / "verdict").write_text("right")

    async def ask() -> str:
        services = RewardServiceManager(LocalLauncher(), {"judge": judge}, tmp_path)
        await services.start()
        address = os.environ["RAMIFY_TEST_JUDGE"]
        try:
            assert address.startswith("http://127.0.0.1:")
            return await asyncio.to_thread(
                lambda: urllib.request.urlopen(address, timeout=60).read().decode()
            )
        finally:
            await services.close()

    assert "Directory listing" in asyncio.run(ask())
    assert "RAMIFY_TEST_JUDGE" not in os.environ
    broken = RewardServiceSpec(
        command=("sh", "-c", "echo no model; exit 7"), variable="RAMIFY_TEST_JUDGE"
    )
    with pytest.raises(
        ConfigError,
        match=r"service 'judge' \(process \d+ on .*\) did not accept connections: it ended with status 7; its log ends: .*no model",
    ):
        asyncio.run(RewardServiceManager(LocalLauncher(), {"judge": broken}, tmp_path).start())

    spec = PlacementSpec(
        pools={"main": NodePoolSpec(gpus=1, cpus=4)},
        services={"judge": RewardServiceSpec(command=("x",), variable="Y", gpus=1)},
    )
    _, found = plan_placement(small(placement=spec))
    assert [placement_slot.members for placement_slot in found] == [
        (RoleInstanceId("trainer", 0),),
        (RoleInstanceId("judge", 0),),
    ]
    with pytest.raises(
        ConfigError, match="trainer 1 x 1 \\+ judge 1 x 1 = 2 GPUs, but it has 1 x 1 = 1"
    ):
        plan_placement(small(placement=msgspec.structs.replace(spec, trainer=RoleSpec(gpus=1))))


SERVES = """
import http.server, os, sys

class PidHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(5)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), PidHandler).serve_forever()
"""


class MovingLauncher(LocalLauncher):
    """Two machines: a renewed member moves to the other one, which has room for ``room``
    members."""

    room = 1
    moved: frozenset[RoleInstanceId] = frozenset()

    def address_of(self, member: RoleInstanceId) -> str:
        return "127.0.0.3" if member in self.moved else "127.0.0.2"

    def ensure_slot(self, member: RoleInstanceId) -> None:
        if member not in self.moved and len(self.moved) == self.room:
            raise ConfigError("no node has room")
        self.moved |= {member}


@pytest.mark.parametrize("hosts", [LocalLauncher, MovingLauncher])
def test_service_that_exits_is_restarted_and_keeps_its_address(
    hosts: type[LocalLauncher], tmp_path: Path
) -> None:
    """On this machine, or first on a second machine and then on a third; finally it is given up."""
    service = RewardServiceSpec(
        command=(sys.executable, "-c", SERVES, "{host}", "{port}"),
        variable="RAMIFY_TEST_JUDGE",
        path="/",
    )
    reported: list[str] = []

    def fetched(path: str = "") -> str:
        try:
            return (
                urllib.request.urlopen(os.environ["RAMIFY_TEST_JUDGE"] + path, timeout=60)
                .read()
                .decode()
            )
        except OSError:
            return ""

    async def ask() -> None:
        services = RewardServiceManager(hosts(), {"judge": service}, tmp_path, restarts=1)
        await services.start()
        try:
            first = await asyncio.to_thread(fetched)
            assert first
            for num in (2, 3):  # messages so far: ended, back; then ended again
                assert await asyncio.to_thread(fetched, "die") == ""
                while len(reported) < num:
                    await asyncio.sleep(0.01)
                assert (await asyncio.to_thread(fetched) not in ("", first)) == (num == 2)
        finally:
            await services.close()

    with heard(reported.append, reported.append):
        asyncio.run(ask())
    assert [
        re.sub(r" \(process \d+ on .*?\)|; its log ends: .*(?=;)", "", each) for each in reported
    ] == [
        "service 'judge' ended with status 5; it is restarted",
        "service 'judge' is back",
        "service 'judge' ended with status 5; it is given up",
    ]


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        (
            {},
            "inference.weight_sync=shared works on this machine only, but engine 1 was placed on "
            "10.0.0.2: use 'nccl' or 'gloo'",
        ),
        (
            {"weight_sync": "delta"},
            "inference.weight_sync=shared works on this machine only, but engine 1 was placed on "
            "10.0.0.2",
        ),
        ({"weight_sync": "gloo"}, "set inference.weight_sync_options.address=127.0.0.1"),
        (
            {"weight_sync": "delta", "weight_sync_options": {"by": "gloo"}},
            "inference.weight_sync=gloo listens on the loopback, but",
        ),
    ],
)
def test_weight_sync_that_cannot_reach_engines_is_rejected(fields: Any, reported: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_weight_sync_reach(small(inference=InferenceSpec(num=2, **fields)), TwoMachines(), 2)
    assert reported in str(error.value)
    check_weight_sync_reach(small(inference=InferenceSpec(num=2, **fields)), LocalLauncher(), 2)
    check_weight_sync_reach(
        small(inference=InferenceSpec(num=2, weight_sync="file")), TwoMachines(), 2
    )
