"""Processes on their seats: started, asked how they are, ended with all that they started; engines that are out of reach."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.inference.http.spec import InferenceSpec
from ramify.train.placement.counted import check_reach
from ramify.train.placement.here import HereHosts
from ramify.train.placement.hosts import PlacedEngine
from ramify.train.placement.seats import Member
from tests.train.small import small

SCRIPT = "echo begins with $GIVEN; sleep 1000 & echo $!; wait"
WHO = Member("rollouts", 3)


class Apart(HereHosts):
    """Two machines: whoever is not the first stands on the other."""

    def address_of(self, member: Member) -> str:
        return "10.0.0.2" if member.number else self.address


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has asked for is none."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_process_ends_with_what_it_started(tmp_path: Path) -> None:
    hosts, log = HereHosts(), tmp_path / "logs" / "it.log"
    process = hosts.start(WHO, ["sh", "-c", SCRIPT], {"GIVEN": "this"}, log)
    assert process.where.startswith(f"process {process.pid} on ")
    while len(process.said().split(" | ")) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    said, child = process.said().split(" | ")
    assert said == "begins with this"
    assert is_running(int(child))
    process.terminate(30.0)
    assert process.poll() in (-15, 143)
    process.terminate(30.0)
    while is_running(int(child)):
        time.sleep(0.01)
    hosts.close()


def test_what_a_host_started_ends_with_it(tmp_path: Path) -> None:
    hosts = HereHosts()
    process = hosts.start(WHO, ["sleep", "1000"], {}, tmp_path / "log")
    hosts.close()
    assert process.wait() == -15
    hosts.close()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollouts 3 cannot be started: nonesuch: No such file or directory"):
        HereHosts().start(WHO, ["nonesuch"], {}, tmp_path / "log")


def test_an_engine_listens_where_others_reach_it(tmp_path: Path) -> None:
    spec = InferenceSpec(num=2, command=("sh", "-c", 'echo "$@"; exit 3', "engine"), ports=(7001, 7002))
    hosts = Apart()
    engines = [PlacedEngine(hosts, spec, i, tmp_path, "float32", 64, tmp_path / f"{i}.log") for i in (0, 1)]
    assert [engine.url for engine in engines] == ["http://127.0.0.1:7001", "http://10.0.0.2:7002"]
    while engines[1].ended is None:
        time.sleep(0.01)
    assert engines[1].ended == 3
    assert f"{tmp_path} --host 10.0.0.2 --port 7002 --dtype float32 --weight-transfer" in engines[1].said()
    hosts.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {},
            "inference.carrier=shared ends at this machine, and engine 1 was placed on 10.0.0.2: use 'nccl' or 'gloo'",
        ),
        ({"carrier": "gloo"}, "set inference.carrier_options.address=127.0.0.1"),
    ],
)
def test_weights_must_reach_engines(fields: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_reach(small(inference=InferenceSpec(num=2, **fields)), Apart(), 2)
    assert said in str(error.value)
    check_reach(small(inference=InferenceSpec(num=2, **fields)), HereHosts(), 2)
    check_reach(small(inference=InferenceSpec(num=2, carrier="file")), Apart(), 2)
