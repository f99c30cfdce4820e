"""Run folder locks: a second run in the same folder, or one that resumes a live run, is
rejected."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ramify.cli.train import train_with_restarts
from ramify.errors import RunInUse
from ramify.train.checkpoint import (
    FILE,
    CheckpointedProgress,
    CheckpointStore,
    find_lock_holder,
    hold_run_lock,
    resolve_checkpoint,
)
from ramify.train.execute import train
from tests.cli.helpers import Shell
from tests.train.small import small

HOLD = (
    "import sys; from pathlib import Path; from ramify.train.checkpoint import hold_run_lock\n"
    "with hold_run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@contextmanager
def held(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let another process hold the lock of ``out``."""
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_second_run_in_a_folder_is_rejected_and_names_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    host = socket.gethostname()
    with held(out) as process:
        for resume in (None, out):
            with pytest.raises(
                RunInUse,
                match=rf"out is being written by process {process.pid} on {host}: wait for it",
            ):
                train(small(), out, resume=resume)
        assert [path.name for path in out.iterdir()] == [FILE]
        found = find_lock_holder(out)
        assert found is not None
        assert (found.pid, found.host) == (process.pid, host)


def test_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / FILE).is_file()
        assert find_lock_holder(tmp_path) is None
        with hold_run_lock(tmp_path):
            found = find_lock_holder(tmp_path)
            assert found is not None
            assert found.pid == os.getpid()
    assert not (tmp_path / FILE).exists()


def test_folder_created_only_for_the_lock_is_removed_with_it(tmp_path: Path) -> None:
    with hold_run_lock(tmp_path / "a/b"):
        assert (tmp_path / "a/b" / FILE).is_file()
    assert [*tmp_path.iterdir()] == []
    with hold_run_lock(tmp_path / "a/b"):
        (tmp_path / "a/b/kept").touch()
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["kept"]


def test_one_process_cannot_hold_the_lock_twice(tmp_path: Path) -> None:
    message = rf"is being written by process {os.getpid()} on "
    with hold_run_lock(tmp_path), pytest.raises(RunInUse, match=message), hold_run_lock(tmp_path):
        pass


def test_reading_a_live_run_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    """A live run replaces a checkpoint with two renames; a reader that restored the old one in
    between would break the second."""
    checkpoint = CheckpointStore(tmp_path).save(CheckpointedProgress(step=1), {})
    CheckpointStore(tmp_path).save(CheckpointedProgress(step=2), {})
    aside = tmp_path / "checkpoints/.step-000002.old.tmp"
    (tmp_path / "checkpoints/step-000002").rename(aside)
    with held(tmp_path):
        assert resolve_checkpoint(tmp_path) == checkpoint
        assert aside.is_dir()
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoints/step-000002"


def test_train_command_names_the_lock_holder_and_exits_with_status_2(
    shell: Shell, tmp_path: Path
) -> None:
    recipe = shell.write("small.py", "from tests.train.small import small as run\n")
    out = tmp_path / "out"
    with held(out) as process:
        done = shell.run("train", recipe, "--out", "out")
        assert (done.code, done.out) == (2, "")
        assert f"is being written by process {process.pid} on " in done.err
        assert train_with_restarts([str(tmp_path / recipe)], ["--plain"], out, None, 3) == 2
