"""No process of a run survives when two of its members are killed, in any order.

A run is a supervisor, its trainer, and the trainer's rank, engine, rollout worker and service, as
real processes (``members.py``), each with two child processes, one of them in another session.
The test process adopts every orphan (``PR_SET_CHILD_SUBREAPER``), so it sees every survivor,
whatever its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.members import ROLES, here
from tests.processes import below

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted by Linux")
LIMIT_S = 10.0
_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopt_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(_SET_CHILD_SUBREAPER, 0)


def live_descendants() -> list[tuple[int, str]]:
    """Reap ended children, then return the descendants of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return list(below(os.getpid()))


def pids(folder: Path, run: subprocess.Popen[bytes]) -> dict[str, int]:
    """Wait until all members are up and return the process id of each role."""
    while True:
        assert run.poll() is None, (folder / "out").read_text()
        found = {role: folder / role for role in ROLES}
        if all(path.exists() and path.stat().st_size for path in found.values()):
            return {role: int(path.read_text()) for role, path in found.items()}
        time.sleep(0.02)


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended because of the other one
        os.kill(pid, number)


@pytest.mark.usefixtures("adopt_orphans")
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(ROLES, 2)))
def test_no_process_survives_when_two_members_are_killed(
    first: str, second: str, tmp_path: Path
) -> None:
    draw = random.Random(f"{first} {second}")
    before = {pid for pid, _ in live_descendants()}
    with (tmp_path / "out").open("wb") as out:
        run = subprocess.Popen(here("supervisor", tmp_path), stdout=out, stderr=out)
    found = pids(tmp_path, run)
    kill(found[first], signal.SIGKILL)
    time.sleep(draw.choice([0.0, 0.0, 0.05, 0.3]))
    kill(found[second], signal.SIGKILL)
    until = time.monotonic() + LIMIT_S
    while (rest := [each for each in live_descendants() if each[0] not in before]) and (
        time.monotonic() < until
    ):
        time.sleep(0.02)
    for pid, _ in rest:
        kill(pid, signal.SIGKILL)
    run.returncode = run.returncode or 0  # reaped above
    assert rest == []
