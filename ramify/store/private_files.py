"""Private folders and files, and writes that are whole or an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path

from ramify.errors import StoreError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
EVALUATIONS = "evaluations"
"""Folder of a store with a file for each evaluation; ``evaluate/record.py`` writes them."""
Bytes = bytes | bytearray | memoryview


def make_folder(path: Path) -> Path:
    """``path`` as a folder; it and every parent that was missing are for their owner alone."""
    if path.is_dir():
        return path
    if path.parent != path:
        make_folder(path.parent)
    try:
        path.mkdir(FOLDER_MODE, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {path}: {error.strerror}; set RAMIFY_HOME to one that is "
            "writable"
        ) from error
    return path


def write_all(fd: int, data: Bytes, path: Path) -> None:
    """All of ``data`` in one ``write()`` where the system takes it so; StoreError naming ``path``
    otherwise."""
    try:
        written = os.write(fd, data)
        if written == len(data):
            return
        rest = memoryview(data)
        while written < len(rest):
            written += os.write(fd, rest[written:])
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free some space, or set RAMIFY_HOME"
        ) from error


def remove_file(path: Path) -> int:
    """The bytes freed; 0 where it was gone already."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error.strerror}") from error
    return size
