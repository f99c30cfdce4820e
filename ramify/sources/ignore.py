"""Files excluded by ``.gitignore``, with git's rules: nested files count, and the nearest one
decides.

The ``.gitignore`` files of the repository around the folder and its ``.git/info/exclude`` also
apply. The user's global ignore file does not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from pathspec import GitIgnoreSpec

from ramify.sources.base import SourceLoader


class IgnoreFile(msgspec.Struct, frozen=True):
    """Patterns of one ``.gitignore`` file."""

    spec: GitIgnoreSpec
    base: str
    """Folder of the file relative to the top of the repository, with a trailing slash; empty for
    the top."""


Layers = tuple[IgnoreFile, ...]


def outer_layers(folder: Path, loading: SourceLoader) -> tuple[Layers, str]:
    """Return the layers of the repository above ``folder``, and the path from its top to ``folder``
    (``"src/"``)."""
    top = next(
        (parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder
    )
    layers: Layers = extend((), top / ".git/info/exclude", "", loading)
    base = ""
    for part in folder.relative_to(top).parts:
        layers = extend(layers, top / base / ".gitignore", base, loading)
        base += f"{part}/"
    if is_ignored(base, layers):
        # The user named a folder that the repository ignores, so its rules do not apply.
        return (), base
    return layers, base


def extend(layers: Layers, path: Path, base: str, loading: SourceLoader) -> Layers:
    """Append the ignore file at ``path`` to ``layers``, if it exists."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return layers
    try:
        return (*layers, IgnoreFile(GitIgnoreSpec.from_lines(lines), base))
    except ValueError as error:
        loading.problem(
            f"{base}{path.name}", f"has an invalid pattern, so none of its patterns apply: {error}"
        )
        return layers


def is_ignored(path: str, layers: Layers) -> bool:
    """Return True if ``path``, relative to the top, is excluded. A folder's path ends with a
    slash."""
    for layer in reversed(layers):
        included = layer.spec.check_file(path[len(layer.base) :]).include
        if included is not None:
            return included
    return False
