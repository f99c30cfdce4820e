from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ramify.inference.http.following import following

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux is asked")
STARTS = """
import signal, subprocess, sys, time
from ramify.inference.http.following import following
sleeps = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
child = subprocess.Popen(following(sleeps, signal.SIGKILL), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_command_is_what_it_was() -> None:
    command = following(
        [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "a b", ""], signal.SIGTERM
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
