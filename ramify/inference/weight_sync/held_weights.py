"""Files and folders of weights that last as long as the process which made them.

Whoever makes one holds a lock on it. One that nobody locks is of a trainer that was killed: the
next that opens a carrier removes it (``sweep``). Locks and not process numbers, which are given out
again. Leaves out what is written there.
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
"""Where files are in memory, on Linux."""
_HELD = "held-"
"""In the names of those whose makers hold a lock."""


def new_name() -> str:
    """One that nobody has, and that ``sweep`` looks for."""
    return f"{PREFIX}{_HELD}{secrets.token_hex(8)}"


def hold_file(path: Path) -> int:
    """A descriptor of a new file that holds its lock."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # swept before it was locked


def hold_folder(below: Path) -> tuple[Path, int]:
    """(a new folder of this user alone, a descriptor that holds its lock)"""
    while True:
        path = below / new_name()
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if path.is_dir():
                return path, handle
            os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what is in ``folder`` and whose makers are no more."""
    for path in folder.glob(f"{PREFIX}{_HELD}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(handle)
