"""Errors for failing ranks name the rank, the failure and the place in its code. The rank processes
use no tensors, so they start quickly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.child_process import ChildProcess, pythonpath_environment
from ramify.actors.connect_back import ConnectBackListener
from ramify.actors.rank_group import PeerRankFailedError, RankGroup
from ramify.actors.rank_monitor import RankConnection, RankProgress
from ramify.errors import ConfigError, TrainError
from ramify.progress import on_heartbeat

START = """
import sys
from ramify.actors.run_channel import connect
from ramify.actors.connect_back import read_ticket
from ramify.actors.rank_group import serve_rank_zero
from ramify.actors.rank_monitor import RankProgress
from tests.actors.test_rank_group import FakeRank
pulse = RankProgress()
ticket, rank = read_ticket(), int(sys.argv[1])
talk, watch = (connect(ticket.address, ticket.key, ticket.name) for _ in range(2))
serve_rank_zero(FakeRank(rank, pulse), pulse, talk, watch, rank, float(sys.argv[2]))
"""


class FakeRank:
    """Methods of a rank; most of them fail on one rank only."""

    def __init__(self, rank: int, pulse: RankProgress) -> None:
        self.rank = rank
        self.pulse = pulse

    def add(self, shared: int, own: int = 0) -> int:
        return shared + own * 10 + self.rank

    def refuse(self) -> None:
        raise (
            ConfigError("the window is too small")
            if self.rank == 1
            else PeerRankFailedError("another rank's reason")
        )

    def break_(self) -> None:
        if self.rank == 1:
            raise ZeroDivisionError("no batch")

    def sleep(self) -> None:
        if self.rank == 1:
            time.sleep(600)

    def work(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.pulse.tick()

    def end(self, how: int) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), how)

    def spin(self) -> None:
        while self.rank == 0:
            time.sleep(0.01)


MakeRankGroup = Callable[..., RankGroup]


@pytest.fixture
def rank_group(tmp_path: Path) -> Iterator[MakeRankGroup]:
    made: list[RankGroup] = []

    def make(others: int = 2, timeout_s: float = 60.0) -> RankGroup:
        links, processes = [], []
        with ConnectBackListener() as listener:
            for rank in range(1, others + 1):
                process = ChildProcess(
                    [sys.executable, "-c", START, str(rank), str(timeout_s)],
                    environment=pythonpath_environment(),
                    log=tmp_path / "log",
                    stdin=listener.create_ticket(f"rank {rank}"),
                )
                # The short timeout of these tests must not apply to process start-up.
                talk, watch = (listener.accept(str, 60.0)[0] for _ in range(2))
                links.append(RankConnection(rank, talk, watch, f"process {process.pid}"))
                processes.append(process)
        pulse = RankProgress()
        made.append(RankGroup(FakeRank(0, pulse), pulse, links, processes, timeout_s, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert all(process.poll() is not None for process in each.processes)


def test_call_returns_result_of_each_rank_or_their_common_error(rank_group: MakeRankGroup):
    three = rank_group()
    assert three.call("add", 100) == [100, 101, 102]
    assert three.call("add", 100, each=[(1,), (2,), (3,)]) == [110, 121, 132]
    with pytest.raises(ConfigError, match="the window is too small"):
        three.call("refuse")
    assert three.call("add", 5) == [5, 6, 7]
    assert rank_group(others=0).call("add", 5) == [5]


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("break_", (), r"rank 1 \(process \d+\) is lost: in 'break_', ZeroDivisionError: no batch"),
        (
            "end",
            (signal.SIGKILL,),
            r"rank 1 \(process \d+\) is lost: it was killed by signal 9; its log ends: ",
        ),
    ],
)
def test_lost_rank_is_named_by_this_and_every_later_call(
    rank_group: MakeRankGroup, verb: str, arguments: Any, message: str
):
    """Every later call raises the same error."""
    three = rank_group()
    for name, each in ((verb, arguments), ("add", (1,))):
        with pytest.raises(TrainError, match=message):
            three.call(name, *each)


def test_stalled_rank_is_named_with_its_stack(rank_group: MakeRankGroup, tmp_path: Path):
    with pytest.raises(
        TrainError,
        match=r"no rank made progress for 3 s in 'sleep'. .*rank 1 \(process \d+\) is at .*in sleep",
    ):
        rank_group(others=1, timeout_s=3.0).call("sleep")
    stacks = (tmp_path / "stalled-ranks.txt").read_text()
    assert "rank 0, " in stacks
    assert "time.sleep(600)" in stacks.partition("rank 1, ")[2]


def test_suspended_rank_is_named(rank_group: MakeRankGroup):
    """The rank cannot answer; its state is read from outside."""
    with pytest.raises(
        TrainError, match=r"rank 1 \(process \d+\) does not answer \(State: T \(stopped\)\)"
    ):
        rank_group(others=1, timeout_s=3.0).call("end", signal.SIGSTOP)


def test_stalled_rank_0_is_interrupted_and_named(rank_group: MakeRankGroup):
    with pytest.raises(
        TrainError,
        match=r"no rank made progress for 3 s in 'spin'. .*rank 0 \(this process\) is at .*in spin",
    ):
        rank_group(others=1, timeout_s=3.0).call("spin")


def test_call_may_outlast_timeout_while_heartbeats_arrive(rank_group: MakeRankGroup):
    """Heartbeats of the ranks also reach the run's watchdog."""
    signs: list[None] = []
    with on_heartbeat(lambda: signs.append(None)):
        rank_group(others=1, timeout_s=3.0).call("work", 5.0)
    assert len(signs) > 1


def test_other_ranks_exit_when_rank_0_is_gone(rank_group: MakeRankGroup):
    """They notice the closed connection, whatever they are doing."""
    two = rank_group(others=1)
    assert two.call("add", 1) == [1, 2]
    for connection in (two.connections[0].talk, two.connections[0].watch):
        connection.close()
    assert two.processes[0].wait(30) == 1


def test_concurrent_calls_from_threads_are_serialized(rank_group: MakeRankGroup):
    two = rank_group(others=1)
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(two.call("add", n))) for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [[n, n + 1] for n in range(20)]
