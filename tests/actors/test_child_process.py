"""Processes that this one starts: how they end, the end of their logs, and that nothing is left of
them, whichever process is killed first."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ramify.actors.child_process import ChildProcess, end_all, import_path

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux is asked")
STUBBORN = (
    "trap '' TERM; echo begins; sleep 1000 & echo $!; setsid sleep 1000 & echo $!; wait; wait"
)
PARENT = f"""
import sys, time
from pathlib import Path
from ramify.actors.child_process import ChildProcess
child = ChildProcess(["sh", "-c", {STUBBORN!r}], log=Path(sys.argv[1]))
print(child.pid, child._guard.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    """Fails by the time limit of the test."""
    while any(map(is_running, pids)):
        time.sleep(0.01)


def lines(log: Path, num: int) -> list[str]:
    """Its lines, once there are ``num``."""
    while not log.exists() or len(found := log.read_text().splitlines()) < num:
        time.sleep(0.01)
    return found


def guard_of(child: ChildProcess) -> int:
    return child._guard.pid


def test_arguments_files_and_status_are_those_of_the_command(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(3)"
    given, taken = tmp_path / "in", tmp_path / "out"
    given.write_text("given")
    with given.open() as source, taken.open("w") as sink:
        files = (source.fileno(), sink.fileno(), None)
        child = ChildProcess([sys.executable, "-c", program, "a b", ""], files=files)
    assert (child.wait(), taken.read_text()) == (3, "['a b', ''] given\n")
    assert child.exit_reason() == "ended with status 3"


@LINUX
def test_its_surroundings_are_those_of_a_fresh_process(tmp_path: Path) -> None:
    """No descriptors of the guard, a separate session, and no signal ignored."""
    program = "import os; print(os.listdir('/proc/self/fd'), os.getsid(0))"
    log = tmp_path / "log"
    child = ChildProcess([sys.executable, "-S", "-c", program], log=log)
    assert child.wait() == 0
    listing = "3"  # the descriptor of the folder that is being listed
    assert log.read_text() == f"{['0', '1', '2', listing]} {child.pid}\n"
    # Python ignores SIGPIPE itself, so another program is asked.
    assert ChildProcess(["grep", "SigIgn", "/proc/self/status"], log=log).wait() == 0
    assert log.read_text().endswith("SigIgn:\t0000000000000000\n")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["nowhere-at-all", "--x"], "No such file or directory"),
        (["/"], "Permission denied"),
        (["/dev/null"], "Permission denied"),
    ],
)
def test_a_program_that_cannot_be_started(command: list[str], reason: str) -> None:
    with pytest.raises(OSError, match=reason) as caught:
        ChildProcess(command)
    assert caught.value.filename == command[0]


def test_a_start_that_fails_at_once_names_its_reason(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-m", "nonesuch"], log=tmp_path / "log")
    assert child.wait() == 1
    assert child.exit_reason() == (
        f"ended with status 1; its log ends: {sys.executable}: No module named nonesuch"
    )


def test_one_that_does_not_end_by_itself_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", STUBBORN], log=tmp_path / "logs" / "it")
    other = ChildProcess(["sleep", "1000"], log=tmp_path / "other")
    _, *started = lines(tmp_path / "logs" / "it", 3)
    assert (child.poll(), *map(is_running, map(int, started))) == (None, True, True)
    end_all([child, other], 0.3)
    assert (child.poll(), child.wait(), other.poll()) == (-9, -9, -15)
    assert not any(map(is_running, map(int, started)))
    child.end(10.0)
    child.signal(signal.SIGTERM)  # its id may be reused by now: no process gets the signal


def test_what_a_child_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess(
        ["sh", "-c", "sleep 1000 & echo $!; setsid sleep 1000 & echo $!; exit 7"], log=log
    )
    assert child.wait() == 7
    assert not any(is_running(int(pid)) for pid in lines(log, 2))
    assert child.exit_reason().startswith("ended with status 7; its log ends: ")


@LINUX
@pytest.mark.parametrize("first", ["parent", "guard", "child", "guard and parent"])
def test_nothing_is_left_whichever_process_is_killed_first(first: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child, guard = map(int, parent.stdout.readline().split())
    below = [int(pid) for pid in lines(log, 3)[1:]]
    pids = {"parent": parent.pid, "guard": guard, "child": child}
    for name in first.split(" and "):
        os.kill(pids[name], signal.SIGKILL)
    wait_for_end(child, guard) if first != "parent" else wait_for_end(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # Without guard and parent no process is left to end what moved to another session.
    wait_for_end(child, guard, *(below if "guard" not in first else ()))
    for pid in below:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@LINUX
def test_a_child_outlives_the_thread_that_started_it() -> None:
    """PR_SET_PDEATHSIG alone would end it with the thread."""
    started: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: started.append(ChildProcess(["sleep", "1000"])))
    thread.start()
    thread.join()
    assert started[0].wait(0.3) is None
    started[0].end(10.0)
    assert started[0].poll() == -15


@LINUX
def test_a_child_that_is_forgotten_ends() -> None:
    child = ChildProcess(["sleep", "1000"])
    pids = child.pid, guard_of(child)
    del child
    gc.collect()
    wait_for_end(*pids)


@LINUX
def test_a_child_that_is_stopped_too_long_is_killed() -> None:
    child = ChildProcess(["sleep", "1000"], stopped_s=0.3)
    other = ChildProcess(["sleep", "1000"], stopped_s=30.0)
    for each in (child, other):
        each.signal(signal.SIGSTOP)
    assert child.wait(60.0) == -9
    assert child.exit_reason() == "was killed by signal 9 (it was stopped for 0.3 s)"
    other.signal(signal.SIGCONT)
    assert other.poll() is None
    other.signal(signal.SIGSTOP)
    other.end(30.0)  # continues it, so that SIGTERM acts
    assert other.poll() == -15


@LINUX
@pytest.mark.slow
def test_a_child_ends_although_its_guard_is_stopped() -> None:
    child = ChildProcess(["sleep", "1000"])
    os.kill(guard_of(child), signal.SIGSTOP)
    child.end(0.1)
    assert child.exit_reason() == "was killed by signal 9 (its guard was killed)"
    wait_for_end(child.pid)


def test_signals_to_the_guard_reach_the_child() -> None:
    child = ChildProcess(["sleep", "1000"])
    os.kill(guard_of(child), signal.SIGTERM)
    assert child.wait(60.0) == -15


def test_many_at_once_are_started_ended_and_reaped() -> None:
    children = [ChildProcess(["sleep", "1000"]) for _ in range(32)]
    assert {child.poll() for child in children} == {None}
    end_all(children, 30.0)
    assert {child.poll() for child in children} == {-15}
    assert not any(Path(f"/proc/{guard_of(child)}").exists() for child in children)


def test_threads_may_wait_for_one_child_together() -> None:
    child = ChildProcess(["sh", "-c", "sleep 0.2; exit 5"])
    found: list[int | None] = []
    threads = [threading.Thread(target=lambda: found.append(child.wait())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5] * 16


def test_output_that_nobody_reads_blocks_nothing(tmp_path: Path) -> None:
    floods = "yes | head -c 3000000; yes 2>&1 | head -c 3000000 >&2"
    log = tmp_path / "log"
    assert ChildProcess(["sh", "-c", floods], log=log).wait(60.0) == 0
    assert log.stat().st_size == 6_000_000


def test_the_end_of_its_log_is_short_and_without_secrets(tmp_path: Path) -> None:
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
    assert re.fullmatch("ended with status 0; its log ends: .{1,610}", child.exit_reason())
    assert ChildProcess(["true"]).wait() == 0


def test_a_python_process_imports_this_copy_of_the_package(tmp_path: Path) -> None:
    says = "import ramify; print(ramify.__file__)"
    log = tmp_path / "log"
    command = [sys.executable, "-c", says]
    assert ChildProcess(command, environment=import_path(), log=log, folder=tmp_path).wait() == 0
    import ramify

    assert log.read_text().strip() == ramify.__file__
