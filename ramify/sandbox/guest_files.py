"""The files of this package that run where ramify is not installed: in a fork server, a container,
or a cloud machine.

Decides the module names there and how the files get there. ``shared_buffers.py`` becomes the module
``ramify_shared_buffers``, ``jail/walls.py`` becomes ``ramify_jail_walls``, and the folder
``guest/`` becomes the package ``ramify_guest``. The same few lines always load them as files, in
the order in which they are listed. On this machine they are loaded from their own folder, so Python
finds them compiled. Elsewhere they are loaded from a temporary folder, which is deleted before any
code of a session runs. Not here: the programs that start there (see ``forkserver_channel.py``,
``remote.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LOADER = """
import importlib.util, os, sys

def load(folder, names):
    for name in names:
        path = f"{folder}/{name}"
        path = f"{path}/__init__.py" if os.path.isdir(path) else f"{path}.py"
        spec = importlib.util.spec_from_file_location("ramify_" + name.replace("/", "_"), path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
"""
"""Runs first in the other process; ``load`` returns the last module."""


def paths(modules: Sequence[str]) -> list[Path]:
    """Return the files of ``modules``; for a package, all its files."""
    files = []
    for name in modules:
        path = FOLDER / name
        files += sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return files


@cache
def texts(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the source of ``modules``, by path relative to the folder that ``load`` takes."""
    return {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in paths(modules)}
