"""All readable files below a folder.

Skipped and reported: files that ``.gitignore`` excludes, hidden files (they usually hold settings
and keys; name one to load it), and links to files that are in the folder anyway. Links that lead
out of the folder are refused.
"""

from __future__ import annotations

import os
from pathlib import Path

from ramify.errors import SourceError
from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import BINARY_SUFFIXES, SourceFile, read_file, read_regular
from ramify.sources.ignore import Layers, extend, is_ignored, outer_layers

MAX_FILES = 200_000
_SQLITE_TAILS = ("-wal", "-shm", "-journal")


def read_folder(folder: Path, prefix: str, loading: SourceLoader) -> None:
    """Load the files below ``folder``. Their names begin with ``prefix``, which is empty or ends
    with a slash."""
    _Walk(folder, prefix, loading).run()


class _Walk:
    """State of one traversal of a folder."""

    def __init__(self, folder: Path, prefix: str, loading: SourceLoader) -> None:
        self._root = folder.resolve()
        self._prefix = prefix
        self._loading = loading
        self._num_files = 0

    def run(self) -> None:
        layers, top = outer_layers(self._root, self._loading)
        self._top = top
        pending: list[tuple[str, Layers]] = [("", layers)]
        while pending:
            below, layers = pending.pop()
            pending += reversed(self._read_one(below, layers))

    def _read_one(self, below: str, layers: Layers) -> list[tuple[str, Layers]]:
        """Load the files of the folder ``below`` (``""`` or ``"a/b/"``) and return its
        subfolders."""
        try:
            entries = sorted(os.scandir(self._root / below), key=lambda entry: entry.name)
        except OSError as error:
            self._loading.problem(self._prefix + below, f"cannot be listed: {error.strerror}")
            return []
        if any(entry.name == ".gitignore" for entry in entries):
            layers = extend(
                layers, self._root / below / ".gitignore", self._top + below, self._loading
            )
        folders: list[tuple[str, Layers]] = []
        for entry in entries:
            name = below + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            reason = self._reason(entry, name + "/" * is_folder, layers)
            if reason is not None:
                if entry.name != ".git":
                    self._loading.leave_out(self._prefix + name + "/" * is_folder, reason)
            elif is_folder:
                folders.append((name + "/", layers))
            elif entry.is_symlink():
                self._link(entry, name)
            else:
                self._file(name)
        return folders

    def _reason(self, entry: os.DirEntry[str], name: str, layers: Layers) -> str | None:
        """Return the reason to skip ``entry``, or None."""
        if entry.name.startswith("."):
            return "hidden"
        if layers and is_ignored(self._top + name, layers):
            return "ignored by .gitignore"
        if entry.name.endswith(_SQLITE_TAILS) and os.path.exists(
            entry.path[: entry.path.rindex("-")]
        ):
            return "part of a database"
        return None

    def _link(self, entry: os.DirEntry[str], name: str) -> None:
        target = os.path.realpath(entry.path)
        if not os.path.exists(target):
            self._loading.problem(self._prefix + name, "is a broken link")
        elif os.path.commonpath([target, self._root]) == str(self._root):
            self._loading.leave_out(self._prefix + name, "a link to a file in the same folder")
        else:
            self._loading.problem(
                self._prefix + name, "is a link out of the folder: name its target to read it"
            )

    def _file(self, name: str) -> None:
        self._num_files += 1
        if self._num_files > MAX_FILES:
            raise SourceError(f"{self._root} has over {MAX_FILES:,} files: name a smaller folder")
        path = os.path.join(self._root, name)
        if path in self._loading.seen:
            return
        self._loading.seen.add(path)
        suffix = os.path.splitext(name)[1].lower()
        try:
            if suffix in BINARY_SUFFIXES:
                raise UnreadableSource("is binary")
            data = read_regular(path, self._prefix + name, self._loading)
            read_file(SourceFile(self._prefix + name, data, Path(path)), self._loading)
        except UnreadableSource as error:
            self._loading.problem(self._prefix + name, str(error))
        except OSError as error:
            self._loading.problem(self._prefix + name, f"cannot be read: {error.strerror}")
