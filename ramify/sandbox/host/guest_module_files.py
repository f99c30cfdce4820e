"""Maps this package's source files to the module names under which other processes load them.

Ramify is not installed in a fork server or a container. The same few lines of code (``LOADER``)
load each file from its folder, in the order in which a provider lists them. A file's module name
there is its path below ``sandbox/`` with the prefix ``ramify_``; a folder becomes a package:

    guest/                      ramify_guest                    in every session
    server/process_setup.py     ramify_server_process_setup     in the fork server
    jail/walls.py               ramify_jail_walls               in the fork server of a jail

On this machine the files are loaded from their own folder, so Python finds them compiled. Elsewhere
they are loaded from a temporary folder, which is deleted before any code of a session runs. Each
provider lists the files that it needs (``MODULES``). Processes are started by
``forkserver_process.py`` and ``providers/remote.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

TYPE_CHECKING = False  # not from typing: a fork server is started before anything heavy is imported
if TYPE_CHECKING:
    from pathlib import Path

FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
"""The folder ``sandbox/``."""
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
"""Code that runs first in the other process. It defines ``load``, which returns the last module."""


def paths(modules: Sequence[str]) -> list[Path]:
    """Return the paths of the source files of the given guest modules.

    For a package, these are all files in its folder.
    """
    from pathlib import Path

    files = []
    for name in modules:
        path = Path(FOLDER, name)
        files += sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return files


@cache
def module_sources(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the source code of the given modules, by relative file path.

    The keys are file paths relative to the folder that the function ``load`` takes.
    """
    return {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in paths(modules)}
