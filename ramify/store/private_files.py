"""Private folders and files, and writes that are complete or raise an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path

from ramify.errors import StoreError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
EVALUATIONS = "evaluations"
"""Folder of a store with one file per evaluation; ``evaluate/record.py`` writes them."""
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
        raise StoreError(
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
