"""The lock of a training folder: one process writes to it, and a second one is rejected at once.

    OUT/.lock      held by ``flock`` for the duration of the run; names the process that holds it:
                   {"pid":4711,"host":"gpu-3"}

The system frees the lock when its holder exits, in whatever way, so that a killed run can be
resumed. Only the process that owns a run takes the lock: not its ranks, engines or rollout workers,
nor a supervisor that restarts it. Not here: what is written to the folder (``checkpoint.py``,
``metrics.py``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ramify.errors import ConfigError, RunInUse
from ramify.logging import RoomLogger
from ramify.store.journal import JournalWriter, this_process

_log = RoomLogger("train")
FILE = ".lock"
_PATIENCE_S = 0.5
"""How long to retry: a reader that checks whether a run is live holds the lock for an instant."""
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of the folder ``out``. The folder is created if it is missing, and removed
    again if nothing was written to it. Raises RunInUse, naming the holder, if another process has
    the lock."""
    missing: list[Path] = []
    path = out / FILE
    try:
        missing += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        fd = _acquired(path)
    except OSError as error:
        _remove(missing)
        raise ConfigError(
            f"cannot write to the run's folder {out} ({error.strerror}): give another one with "
            "--out DIR"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        # Explicitly, since a forked child may still hold the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        _remove(missing)


def holder(out: Path) -> JournalWriter | None:
    """The process that writes to the folder ``out`` now; None if there is none."""
    path = out / FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return _holder_in(path) if error.errno in _TAKEN else None
    finally:
        os.close(fd)
    return None


def _acquired(path: Path) -> int:
    """A file descriptor that holds the lock on ``path``; this process's name is written to it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait(fd, path)
        if os.fstat(fd).st_nlink > 0:
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(this_process()), 0)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)  # removed between opening and locking, so it no longer locks the folder
    return _acquired(path)


def _wait(fd: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                text = (
                    f"{path.parent} does not support locks ({error.strerror}): a second run can "
                    "write to it at the same time"
                )
                return _log.warn(text, stacklevel=2)
            if time.monotonic() > deadline:
                raise RunInUse(
                    f"the run's folder {path.parent} is being written by {_holder_in(path)}: "
                    "wait for it, stop it, or give another folder with --out DIR"
                ) from None
        time.sleep(0.02)


def _holder_in(path: Path) -> JournalWriter:
    try:
        return msgspec.json.decode(path.read_bytes(), type=JournalWriter)
    except (OSError, msgspec.DecodeError):
        return JournalWriter(0, "an unknown host")


def _remove(folders: list[Path]) -> None:
    """Remove those folders that are empty, innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
