"""Private folders and files, writes that are complete or raise an error that names the file, and
one thread per store that flushes written files, so that no event loop waits for the disk.

    append ── flush(file) ──▶ due {file: owner} ──▶ thread: one fsync for all requests so far
    close  ── settle(owner): runs what is due, and waits for what is in progress
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Protocol

from ramify.errors import ConfigError, StoreError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
EVALUATIONS = "evaluations"
"""Folder of a store with one file per evaluation; ``evaluate/run.py`` writes them."""
Bytes = bytes | bytearray | memoryview


def make_folder(path: Path) -> Path:
    """Create the folder ``path`` and its missing parents, accessible by their owner alone."""
    if path.is_dir():
        return path
    if path.parent != path:
        make_folder(path.parent)
    try:
        path.mkdir(FOLDER_MODE, exist_ok=True)
    except OSError as error:
        kind = StoreError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
        raise kind(
            f"cannot create the folder {path}: {error.strerror}; set RAMIFY_HOME to a writable one"
        ) from error
    return path


def write_all(fd: int, data: Bytes, path: Path) -> None:
    """Write all of ``data``, in a single ``write()`` if the system accepts it. Raises StoreError,
    which names ``path``."""
    try:
        written = os.write(fd, data)
        if written == len(data):
            return
        view = memoryview(data)
        while written < len(view):
            written += os.write(fd, view[written:])
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free some space, or set RAMIFY_HOME"
        ) from error


RESERVE_BYTES = 4 << 20
"""Space that a store keeps free on its disk, so that the replies that arrive after the disk is full
can still be written."""
_RESERVE = "ramify.reserve"


def keep_reserve(root: Path) -> None:
    """Reserve space on the disk of the store at ``root``, if there is enough."""
    path = root / _RESERVE
    if reserve_bytes(root) >= RESERVE_BYTES:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return  # the disk is nearly full


def reserve_bytes(root: Path) -> int:
    """Size of the reserve of the store at ``root``."""
    try:
        return (root / _RESERVE).stat().st_size
    except OSError:
        return 0


def release_reserve(root: Path) -> bool:
    """Free the reserve of the store at ``root``. Returns False if there is none."""
    try:
        (root / _RESERVE).unlink()
    except OSError:
        return False
    return True


def remove_file(path: Path) -> int:
    """Delete a file and return the bytes freed; 0 if it did not exist."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error.strerror}") from error
    return size


IDLE_S = 2.0
"""Seconds without work after which the thread ends."""


File = int | Path
"""An open descriptor, or a file to open when it is flushed, so that waiting files hold no
descriptors."""


class FlushTarget(Protocol):
    """Owner of flushed files, which is notified of errors."""

    def flush_failed(self, error: OSError) -> None:
        """The bytes may not be on disk."""
        ...


class FsyncFlusher:
    """``fsync`` in a background thread; several requests for one file become one."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._due: dict[File, FlushTarget] = {}
        self._busy: File | None = None
        self._busy_owner: FlushTarget | None = None
        self._running = False

    def flush(self, file: File, owner: FlushTarget) -> None:
        """Queue ``file`` for a flush, and return at once."""
        with self._turn:
            self._due[file] = owner
            if self._running:
                self._turn.notify_all()
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="ramify-flusher", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down: ``settle`` does the work
            self._running = False

    def settle(self, owner: FlushTarget) -> None:
        """Return once no file of ``owner`` is due or in progress."""
        with self._turn:
            mine = [file for file, other in self._due.items() if other is owner]
            for file in mine:
                del self._due[file]
            while self._busy_owner is owner:
                self._turn.wait()
        for file in mine:
            _sync(file, owner)

    def _run(self) -> None:
        while self._next():
            file, owner = self._busy, self._busy_owner
            assert file is not None
            assert owner is not None
            _sync(file, owner)
            with self._turn:
                self._busy = self._busy_owner = None
                self._turn.notify_all()

    def _next(self) -> bool:
        """Take the oldest due file; False after ``IDLE_S`` without one, which ends the thread."""
        with self._turn:
            if not self._due:
                self._turn.wait_for(lambda: bool(self._due), IDLE_S)
            if not self._due:
                self._running = False
                return False
            self._busy = next(iter(self._due))
            self._busy_owner = self._due.pop(self._busy)
            return True


def _sync(file: File, owner: FlushTarget) -> None:
    try:
        if isinstance(file, int):
            os.fsync(file)
            return
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return  # deleted meanwhile: nothing to flush
    except OSError as error:
        owner.flush_failed(error)
