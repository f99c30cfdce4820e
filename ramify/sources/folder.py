"""Read all readable files in a folder and its subfolders.

Some files are skipped and reported: files that ``.gitignore`` excludes, hidden files (they usually
hold settings and keys; name one to load it), and links to files elsewhere in the folder, which are
read under their own names. Links that lead out of the folder are refused.

``.gitignore`` files are applied by git's rules: subfolders may have their own, and the nearest one
decides. Those of the repository around the folder and its ``.git/info/exclude`` also apply; the
user's global ignore file does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from pathspec import GitIgnoreSpec

from ramify.errors import SourceError
from ramify.sources.file_kinds import (
    BINARY_SUFFIXES,
    HEAD_BYTES,
    PICTURE_SUFFIXES,
    InputFile,
    kind_of,
    read_file,
    read_regular,
)
from ramify.sources.loaded_sources import SourceCollector, UnreadableSourceError
from ramify.sources.mapped_files import read_mapped

MAX_FILES = 200_000
_SQLITE_TAILS = ("-wal", "-shm", "-journal")


def read_folder(folder: Path, prefix: str, loading: SourceCollector) -> None:
    """Load all files in a folder and its subfolders into the context.

    Their names in the context begin with ``prefix``, which is empty or ends with a slash.
    """
    _Walk(folder, prefix, loading).run()


class _Walk:
    """A traversal that loads all files in one folder and its subfolders."""

    def __init__(self, folder: Path, prefix: str, loading: SourceCollector) -> None:
        self._root = folder.resolve()
        self._prefix = prefix
        self._loading = loading
        self._num_files = 0
        self._pictures: list[str] = []

    def run(self) -> None:
        layers, top = enclosing_ignore_files(self._root, self._loading)
        self._top = top
        pending: list[tuple[str, Layers]] = [("", layers)]
        while pending:
            below, layers = pending.pop()
            pending += reversed(self._read_one(below, layers))
        has_texts = any(item.name.startswith(self._prefix) for item in self._loading.items)
        for name in self._pictures:
            if has_texts:
                why = "pictures beside texts: name them to load them, as in folder/*.png"
                self._loading.leave_out(self._prefix + name, why)
            else:
                self._visit_file(name, is_picture=True)

    def _read_one(self, below: str, layers: Layers) -> list[tuple[str, Layers]]:
        """Load the files in one folder, and return its subfolders so that they can be visited next.

        ``below`` is the folder's path from the top of the traversal: empty, or like ``"a/b/"``.
        """
        try:
            entries = sorted(os.scandir(self._root / below), key=lambda entry: entry.name)
        except OSError as error:
            self._loading.report_problem(
                self._prefix + below, f"cannot be listed: {error.strerror}"
            )
            return []
        if any(entry.name == ".gitignore" for entry in entries):
            layers = add_ignore_file(
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
                self._visit_link(entry, name)
            else:
                self._visit_file(name)
        return folders

    def _reason(self, entry: os.DirEntry[str], name: str, layers: Layers) -> str | None:
        """Return the reason to skip a file or folder, or None if it should be read."""
        if entry.name.startswith("."):
            return "hidden"
        if layers and is_ignored(self._top + name, layers):
            return "ignored by .gitignore"
        if entry.name.endswith(_SQLITE_TAILS) and os.path.exists(
            entry.path[: entry.path.rindex("-")]
        ):
            return "part of a database"
        return None

    def _visit_link(self, entry: os.DirEntry[str], name: str) -> None:
        target = os.path.realpath(entry.path)
        if not os.path.exists(target):
            self._loading.report_problem(self._prefix + name, "is a broken link")
        elif os.path.commonpath([target, self._root]) == str(self._root):
            self._loading.leave_out(self._prefix + name, "a link to a file in the same folder")
        else:
            self._loading.report_problem(
                self._prefix + name, "is a link out of the folder: name its target to read it"
            )

    def _visit_file(self, name: str, *, is_picture: bool = False) -> None:
        if name.lower().endswith(PICTURE_SUFFIXES) and not is_picture:
            self._pictures.append(name)
            return
        self._num_files += 1
        if self._num_files > MAX_FILES:
            raise SourceError(f"{self._root} has over {MAX_FILES:,} files: name a smaller folder")
        path = os.path.join(self._root, name)
        if path in self._loading.seen:
            return
        self._loading.seen.add(path)
        suffix = os.path.splitext(name)[1].lower()
        try:
            if suffix in BINARY_SUFFIXES and not is_picture:
                raise UnreadableSourceError("is binary")
            with self._loading.discarding_oversized_file():
                self._read_file(path, name, is_picture)
        except UnreadableSourceError as error:
            self._loading.report_problem(self._prefix + name, str(error))
        except OSError as error:
            self._loading.report_problem(self._prefix + name, f"cannot be read: {error.strerror}")

    def _read_file(self, path: str, name: str, is_picture: bool) -> None:
        if read_mapped(path, self._prefix + name, self._loading):
            return
        data = read_regular(path, self._prefix + name, self._loading)
        if not is_picture and kind_of(name, data[:HEAD_BYTES]) == "picture":
            self._pictures.append(name)
            self._loading.seen.discard(path)
            return
        read_file(InputFile(self._prefix + name, data, Path(path)), self._loading)


class GitignorePatterns(msgspec.Struct, frozen=True):
    """The patterns of one ``.gitignore`` file."""

    spec: GitIgnoreSpec
    base: str
    """Folder of the file relative to the repository's top, with a trailing slash; empty for the
    top."""


Layers = tuple[GitignorePatterns, ...]


def enclosing_ignore_files(folder: Path, loading: SourceCollector) -> tuple[Layers, str]:
    """Return the enclosing repository's ignore files that apply to a folder, outermost first.

    Also return the path from the top of the repository to the folder, such as ``"src/"``.
    """
    top = next(
        (parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder
    )
    layers: Layers = add_ignore_file((), top / ".git/info/exclude", "", loading)
    base = ""
    for part in folder.relative_to(top).parts:
        layers = add_ignore_file(layers, top / base / ".gitignore", base, loading)
        base += f"{part}/"
    if is_ignored(base, layers):
        # The user named a folder that the repository ignores, so its rules do not apply.
        return (), base
    return layers, base


def add_ignore_file(layers: Layers, path: Path, base: str, loading: SourceCollector) -> Layers:
    """Extend the ignore rules of outer folders by those of the file at ``path``, if it exists."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return layers
    try:
        return (*layers, GitignorePatterns(GitIgnoreSpec.from_lines(lines), base))
    except ValueError as error:
        loading.report_problem(
            f"{base}{path.name}", f"has an invalid pattern, so none of its patterns apply: {error}"
        )
        return layers


def is_ignored(path: str, layers: Layers) -> bool:
    """Return True if the ignore files exclude a path.

    The path is relative to the top folder, and ends with a slash if it is a folder.
    """
    for layer in reversed(layers):
        included = layer.spec.check_file(path[len(layer.base) :]).include
        if included is not None:
            return included
    return False
