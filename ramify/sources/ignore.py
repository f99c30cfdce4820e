"""What ``.gitignore`` files leave out, with git's rules: nested ones count, the nearest one
decides.

The files of the repository around the folder count too, and its ``.git/info/exclude``. The user's
global one does not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from pathspec import GitIgnoreSpec

from ramify.sources.base import SourceLoader


class IgnoreFile(msgspec.Struct, frozen=True):
    """One ``.gitignore``."""

    spec: GitIgnoreSpec
    base: str
    """The folder that it is about, relative to the top, with a slash at its end; empty for the
    top."""


Layers = tuple[IgnoreFile, ...]


def outer_layers(folder: Path, loading: SourceLoader) -> tuple[Layers, str]:
    """The layers of the repository above ``folder``, and the path from its top to ``folder``
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
        return (
            (),
            base,
        )  # the user named a folder that the repository around it leaves out: its rules are not about it
    return layers, base


def extend(layers: Layers, path: Path, base: str, loading: SourceLoader) -> Layers:
    """``layers`` and, if it is there, the file at ``path``."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return layers
    try:
        return (*layers, IgnoreFile(GitIgnoreSpec.from_lines(lines), base))
    except ValueError as error:
        loading.problem(
            f"{base}{path.name}", f"has a pattern that cannot be used, so none of it is: {error}"
        )
        return layers


def is_ignored(path: str, layers: Layers) -> bool:
    """Whether ``path``, relative to the top, is left out; a folder's path ends with a slash."""
    for layer in reversed(layers):
        included = layer.spec.check_file(path[len(layer.base) :]).include
        if included is not None:
            return included
    return False
