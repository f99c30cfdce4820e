"""The files of this room that run where ramify is not: in a fork server, in a container, on a
machine of a cloud.

Decides what they are called there and how they get there. ``shared_buffers.py`` is there the module
``ramify_shelf``, ``jail/walls.py`` is ``ramify_jail_walls``, and the folder ``guest/`` the package
``ramify_guest``. They are always loaded as files, by the same few lines, in the order in which they
are named: on this machine from where they are (so that Python finds them compiled), elsewhere from
a folder that their text was written to, and that is gone before any code of a session runs. Leaves
out what starts there (``forkserver_channel.py``, ``remote.py``) and what is done there.
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
"""Runs there before all else; ``load`` returns the last module."""


def paths(modules: Sequence[str]) -> list[Path]:
    """The files of ``modules``, a package's among them all."""
    found = []
    for name in modules:
        path = FOLDER / name
        found += sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return found


@cache
def texts(modules: tuple[str, ...]) -> dict[str, str]:
    """The same as text, by their paths below the folder that ``load`` takes."""
    return {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in paths(modules)}
