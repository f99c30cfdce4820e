"""Files and folders of weights that exist as long as the process that made them.

The process that makes one holds a lock on it. An unlocked one belongs to a trainer that was killed,
and the next trainer that opens a weight sync removes it (``sweep``). Locks are used instead of
process ids, because process ids are reused.

Not here: the contents of the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

PREFIX = "ramify-weights-"
MEMORY = Path("/dev/shm")
"""Folder whose files are in memory, on Linux."""
_HELD = "held-"
"""Marks the names of files and folders whose makers hold a lock."""


def new_name() -> str:
    """A unique name that ``sweep`` recognizes."""
    return f"{PREFIX}{_HELD}{secrets.token_hex(8)}"


def hold_file(path: Path) -> int:
    """A descriptor of a new, locked file."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # removed by another process before it was locked


def hold_folder(below: Path) -> tuple[Path, int]:
    """(a new folder that only this user can access, a descriptor that holds its lock)"""
    while True:
        path = below / new_name()
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if path.is_dir():
                return path, handle
            os.close(handle)


def sweep(folder: Path) -> None:
    """Remove files and folders in ``folder`` whose makers have exited."""
    for path in folder.glob(f"{PREFIX}{_HELD}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(handle)
