"""Child processes: how they end, their exit reasons and log tails, and that no descendant survives,
whichever process is killed first."""

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

from ramify.actors.child_process import ChildProcess, end_all, pythonpath_environment

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux process control")
STUBBORN = (
    "trap '' TERM; echo begins; sleep 1000 & echo $!; setsid sleep 1000 & echo $!; wait; wait"
)
PARENT = f"""
import sys, time
from pathlib import Path
from ramify.actors.child_process import ChildProcess
child = ChildProcess(["sh", "-c", {STUBBORN!r}], log=Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    """Wait until all have ended; the test's own time limit applies."""
    while any(map(is_running, pids)):
        time.sleep(0.01)


def lines(log: Path, num: int) -> list[str]:
    """Wait for ``num`` lines in the log and return its lines."""
    while not log.exists() or len(found := log.read_text().splitlines()) < num:
        time.sleep(0.01)
    return found


def guard_of(pid: int) -> int:
    """Process id of the guard that started the child ``pid``."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_command_gets_its_arguments_and_files_and_returns_its_exit_status(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(3)"
    given, taken = tmp_path / "in", tmp_path / "out"
    given.write_text("given")
    with given.open() as source, taken.open("w") as sink:
        files = (source.fileno(), sink.fileno(), None)
        child = ChildProcess([sys.executable, "-c", program, "a b", ""], files=files)
    assert (child.wait(), taken.read_text()) == (3, "['a b', ''] given\n")
    assert child.exit_reason() == "ended with status 3"


@LINUX
def test_child_inherits_no_extra_descriptors_session_or_ignored_signals(tmp_path: Path) -> None:
    """It has none of the guard's descriptors, its own session, and ignores no signal."""
    program = "import os; print(os.listdir('/proc/self/fd'), os.getsid(0))"
    log = tmp_path / "log"
    child = ChildProcess([sys.executable, "-S", "-c", program], log=log)
    assert child.wait() == 0
    listing = "3"  # the descriptor of the folder that is being listed
    assert log.read_text() == f"{['0', '1', '2', listing]} {child.pid}\n"
    # Python itself ignores SIGPIPE, so ask another program.
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as in a background job of a script
    try:
        assert ChildProcess(["grep", "SigIgn", "/proc/self/status"], log=log).wait() == 0
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert log.read_text().endswith("SigIgn:\t0000000000000000\n")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["nowhere-at-all", "--x"], "No such file or directory"),
        (["/"], "Permission denied"),
        (["/dev/null"], "Permission denied"),
    ],
)
def test_unstartable_program_raises_os_error_with_its_name(command: list[str], reason: str) -> None:
    with pytest.raises(OSError, match=reason) as caught:
        ChildProcess(command)
    assert caught.value.filename == command[0]


def test_exit_reason_of_failed_start_quotes_the_log(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-m", "nonesuch"], log=tmp_path / "log")
    assert child.wait() == 1
    assert child.exit_reason() == (
        f"ended with status 1; its log ends: {sys.executable}: No module named nonesuch"
    )


def test_process_that_ignores_sigterm_is_killed_with_its_descendants(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", STUBBORN], log=tmp_path / "logs" / "it")
    other = ChildProcess(["sleep", "1000"], log=tmp_path / "other")
    _, *started = lines(tmp_path / "logs" / "it", 3)
    assert (child.poll(), *map(is_running, map(int, started))) == (None, True, True)
    end_all([child, other], 0.3)
    assert (child.poll(), child.wait(), other.poll()) == (-9, -9, -15)
    assert not any(map(is_running, map(int, started)))
    child.end(10.0)
    child.signal(signal.SIGTERM)  # must not signal a process that reused its id


def test_descendants_end_when_child_exits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess(
        ["sh", "-c", "sleep 1000 & echo $!; setsid sleep 1000 & echo $!; exit 7"], log=log
    )
    assert child.wait() == 7
    assert not any(is_running(int(pid)) for pid in lines(log, 2))
    assert child.exit_reason().startswith("ended with status 7; its log ends: ")


@LINUX
@pytest.mark.parametrize("first", ["parent", "guard", "child", "guard and parent"])
def test_no_process_survives_whichever_is_killed_first(first: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    guard = guard_of(child)
    below = [int(pid) for pid in lines(log, 3)[1:]]
    pids = {"parent": parent.pid, "guard": guard, "child": child}
    for name in first.split(" and "):
        os.kill(pids[name], signal.SIGKILL)
    wait_for_end(child, guard) if first != "parent" else wait_for_end(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # Without guard and parent, nothing can end processes that moved to another session.
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
def test_garbage_collected_child_is_terminated() -> None:
    child = ChildProcess(["sleep", "1000"])
    pids = child.pid, guard_of(child.pid)
    del child
    gc.collect()
    wait_for_end(*pids)


@LINUX
def test_child_suspended_too_long_is_killed() -> None:
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
def test_child_can_be_ended_while_its_guard_is_suspended() -> None:
    child = ChildProcess(["sleep", "1000"])
    os.kill(guard_of(child.pid), signal.SIGSTOP)
    child.end(0.1)
    assert child.exit_reason() == "was killed by signal 9 (its guard was killed)"
    wait_for_end(child.pid)


@LINUX
def test_signals_to_the_guard_reach_the_child() -> None:
    child = ChildProcess(["sleep", "1000"])
    os.kill(guard_of(child.pid), signal.SIGTERM)
    assert child.wait(60.0) == -15


@LINUX
def test_many_children_are_started_ended_and_reaped_at_once() -> None:
    children = [ChildProcess(["sleep", "1000"]) for _ in range(32)]
    assert {child.poll() for child in children} == {None}
    guards = [guard_of(child.pid) for child in children]
    end_all(children, 30.0)
    assert {child.poll() for child in children} == {-15}
    assert not any(Path(f"/proc/{guard}").exists() for guard in guards)


def test_many_threads_can_wait_for_one_child() -> None:
    child = ChildProcess(["sh", "-c", "sleep 0.2; exit 5"])
    found: list[int | None] = []
    threads = [threading.Thread(target=lambda: found.append(child.wait())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5] * 16


def test_unread_output_does_not_block_child(tmp_path: Path) -> None:
    floods = "yes | head -c 3000000; yes 2>&1 | head -c 3000000 >&2"
    log = tmp_path / "log"
    assert ChildProcess(["sh", "-c", floods], log=log).wait(60.0) == 0
    assert log.stat().st_size == 6_000_000


def test_log_tail_is_short_and_redacts_secrets(tmp_path: Path) -> None:
    """Secrets of the child and of this process; a huge log is read only at its end."""
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
    assert (
        ChildProcess(command, environment=pythonpath_environment(), log=log, folder=tmp_path).wait()
        == 0
    )
    import ramify

    assert log.read_text().strip() == ramify.__file__
