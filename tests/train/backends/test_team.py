"""Failing ranks: which one, how, and at which place. Uses processes without tensors, so that they
start quickly.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, TrainError
from ramify.progress import on_heartbeat
from ramify.train.backends.rank_group import (
    RankConnection,
    RankGroup,
    RankHeartbeat,
    RemoteRankError,
)

START = """
import sys
from multiprocessing.connection import Connection
from ramify.train.backends.rank_group import RankHeartbeat, follow
from tests.train.backends.test_team import Own
pulse = RankHeartbeat()
rank, talk, watch = map(int, sys.argv[1:4])
print("up", flush=True)
follow(Own(rank, pulse), pulse, Connection(talk), Connection(watch), rank, float(sys.argv[4]))
"""


class Own:
    """The verbs of a rank: here each does something to rank 1 alone."""

    def __init__(self, rank: int, pulse: RankHeartbeat) -> None:
        self.rank = rank
        self.pulse = pulse

    def add(self, shared: int, own: int = 0) -> int:
        return shared + own * 10 + self.rank

    def refuse(self) -> None:
        raise (
            ConfigError("the window is too small")
            if self.rank == 1
            else RemoteRankError("another rank's reason")
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


Make = Callable[..., RankGroup]


@pytest.fixture
def rank_group(tmp_path: Path) -> Iterator[Make]:
    made: list[RankGroup] = []

    def make(others: int = 2, timeout_s: float = 60.0) -> RankGroup:
        links, processes = [], []
        for rank in range(1, others + 1):
            pairs = [socket.socketpair() for _ in range(2)]
            theirs = [theirs.detach() for _, theirs in pairs]
            command = [sys.executable, "-c", START, str(rank), *map(str, theirs), str(timeout_s)]
            process = subprocess.Popen(
                command, pass_fds=theirs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for each in theirs:
                os.close(each)
            talk, watch = (Connection(ours.detach()) for ours, _ in pairs)
            links.append(RankConnection(rank, talk, watch, f"process {process.pid}"))
            processes.append(process)
        for (
            process
        ) in processes:  # the patience of these tests is short, and not meant for their start
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.stdout.close()
        pulse = RankHeartbeat()
        made.append(RankGroup(Own(0, pulse), pulse, links, processes, timeout_s, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert all(process.poll() is not None for process in each.processes)


def test_verbs_and_errors_that_all_have(rank_group: Make):
    three = rank_group()
    assert three.call("add", 100) == [100, 101, 102]
    assert three.call("add", 100, each=[(1,), (2,), (3,)]) == [110, 121, 132]
    with pytest.raises(ConfigError, match="the window is too small"):
        three.call("refuse")
    assert three.call("add", 5) == [5, 6, 7]
    assert rank_group(others=0).call("add", 5) == [5]


@pytest.mark.parametrize(
    ("verb", "arguments", "told"),
    [
        ("break_", (), r"rank 1 \(process \d+\) is lost: in 'break_', ZeroDivisionError: no batch"),
        (
            "end",
            (signal.SIGKILL,),
            r"rank 1 \(process \d+\) is lost: its process ended \(killed by signal 9\)",
        ),
    ],
)
def test_a_rank_that_is_lost_is_named(rank_group: Make, verb: str, arguments: Any, told: str):
    """And from then on every verb says so."""
    three = rank_group()
    for name, each in ((verb, arguments), ("add", (1,))):
        with pytest.raises(TrainError, match=told):
            three.call(name, *each)


def test_a_rank_that_stands_still_is_named_with_its_stack(rank_group: Make, tmp_path: Path):
    with pytest.raises(
        TrainError,
        match=r"no rank made progress for 3 s in 'sleep'. .*rank 1 \(process \d+\) is at .*in sleep",
    ):
        rank_group(others=1, timeout_s=3.0).call("sleep")
    stacks = (tmp_path / "stalled-ranks.txt").read_text()
    assert "rank 0, " in stacks
    assert "time.sleep(600)" in stacks.partition("rank 1, ")[2]


def test_a_rank_that_is_stopped_is_named(rank_group: Make):
    """It cannot answer; what it is in is known from outside."""
    with pytest.raises(
        TrainError, match=r"rank 1 \(process \d+\) does not answer \(State: T \(stopped\)\)"
    ):
        rank_group(others=1, timeout_s=3.0).call("end", signal.SIGSTOP)


def test_rank_0_itself_is_brought_back(rank_group: Make):
    with pytest.raises(
        TrainError,
        match=r"no rank made progress for 3 s in 'spin'. .*rank 0 \(this process\) is at .*in spin",
    ):
        rank_group(others=1, timeout_s=3.0).call("spin")


def test_work_that_gets_on_may_take_its_time(rank_group: Make):
    """Heartbeats of the ranks also reach the run's watchdog."""
    signs: list[None] = []
    with on_heartbeat(lambda: signs.append(None)):
        rank_group(others=1, timeout_s=3.0).call("work", 5.0)
    assert len(signs) > 1


def test_others_end_where_rank_0_is_gone(rank_group: Make):
    """Their connection says so, whatever they are in the middle of."""
    two = rank_group(others=1)
    assert two.call("add", 1) == [1, 2]
    for connection in (two._connections[0].talk, two._connections[0].watch):
        connection.close()
    assert two.processes[0].wait(timeout=30) == 1


def test_threads_take_turns(rank_group: Make):
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
