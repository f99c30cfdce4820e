"""Processes that this one starts: told how they end, quoted, ended with all that is theirs, and
with who started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ramify.child import ChildProcess, end_all, following

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux is asked")
STARTS = """
import signal, subprocess, sys, time
from ramify.child import following
sleeps = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
child = subprocess.Popen(following(sleeps, signal.SIGKILL), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_command_is_what_it_was() -> None:
    command = following(
        [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "a b", ""],
        signal.SIGTERM,
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "['a b', '']\n", "")


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere-at-all") as caught:
        following(["nowhere-at-all", "--x"], signal.SIGTERM)
    assert caught.value.filename == "nowhere-at-all"


@LINUX
def test_it_ends_with_who_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while _is_running(child):
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


STUBBORN = "trap '' TERM; echo begins; sleep 1000 & echo $!; wait; wait"


def said(child: ChildProcess, num: int) -> list[str]:
    """Its first lines, once there are so many."""
    while len(lines := child.log_tail().split(" | ")) < num:
        assert child.poll() is None
        time.sleep(0.01)
    return lines


def test_one_that_does_not_end_by_itself_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", STUBBORN], log=tmp_path / "logs" / "it")
    other = ChildProcess(["sleep", "1000"], log=tmp_path / "other")
    _, started = said(child, 2)
    assert (child.poll(), _is_running(int(started))) == (None, True)
    end_all([child, other], 0.3)
    assert (child.poll(), child.wait(), other.poll()) == (-9, -9, -15)
    while _is_running(int(started)):
        time.sleep(0.01)
    child.end(10.0)
    child.signal(signal.SIGTERM)  # its id may be reused by now: no process gets the signal


def test_what_a_child_left_behind_is_ended_after_it(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", "sleep 1000 & echo $!; exit 7"], log=tmp_path / "log")
    while child.poll() is None:
        time.sleep(0.01)
    left = int(child.log_tail())
    assert (child.poll(), _is_running(left)) == (7, True)
    child.end(10.0)
    while _is_running(left):
        time.sleep(0.01)


def test_what_it_said_last_is_short_and_without_secrets(tmp_path: Path) -> None:
    """Its own and this process's; of a log that may be larger than memory the end alone is read."""
    log = tmp_path / "log"
    log.write_bytes(b"older\n" * 100_000)
    says = "import os; print('x' * 5000); print('with', os.environ['ENGINE_KEY']); print(' and\\n\\n', os.getcwd())"
    (tmp_path / "here").mkdir()
    given = {"ENGINE_KEY": "abc-def-123-456"}
    child = ChildProcess(
        [sys.executable, "-c", says], environment=given, log=log, folder=tmp_path / "here"
    )
    assert child.wait() == 0
    assert child.log_tail().endswith(f"x | with «redacted ENGINE_KEY» | and | {tmp_path / 'here'}")
    assert len(child.log_tail()) <= 600 + 10
    assert ChildProcess(["true"]).wait() == 0
