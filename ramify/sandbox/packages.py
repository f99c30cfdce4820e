"""Where the host keeps the packages that sessions may import, and which files of them a jail shows.

Decides that a folder into which packages were installed is shown as a whole, and that of any other,
such as a checkout, only what can be imported under the names that were asked for: never the
``.env``, ``.git`` or keys beside it.

    site-packages/numpy       asked for ──> site-packages           what it needs is there too
    checkout/src/mine/        asked for ──> checkout/src/mine       without its hidden files
    checkout/mine.py          asked for ──> checkout/mine.py
    checkout/mine/            no __init__.py (a namespace), or the root of a project: its modules and packages only
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec

from ramify.errors import ConfigError

_PROJECT = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg")
"""A folder that holds one of these is the root of a project."""


def locate(packages: Sequence[str]) -> list[str]:
    """The folders in which ``packages`` and what they need are found, each once. Raises
    ConfigError."""
    return list(
        dict.fromkeys(os.path.dirname(place) for name in packages for place in _places(name))
    )


def readable(packages: Sequence[str]) -> list[str]:
    """The files and folders of ``packages`` that sessions of a jail may read. Raises
    ConfigError."""
    found: list[str] = []
    for place in (place for name in packages for place in _places(name)):
        if _is_installed(os.path.dirname(place)):
            found.append(os.path.dirname(place))
        found += _shown(os.path.realpath(place))
    return list(dict.fromkeys(found))


def listed(packages: Sequence[str]) -> list[str]:
    """Folders of ``packages`` of which a jail shows a part: imports look for names there. Raises
    ConfigError."""
    places = [os.path.realpath(place) for name in packages for place in _places(name)]
    shown = {*readable(packages)}
    return [place for place in dict.fromkeys(places) if os.path.isdir(place) and place not in shown]


def _places(name: str) -> list[str]:
    """The folder or file of a package, or each folder of a namespace; also where a link in their
    place leads."""
    spec = _spec(name)
    found = [
        place
        for place in spec.submodule_search_locations or ()
        if os.path.isabs(place) and os.path.isdir(place)
    ]
    if not found and spec.origin and os.path.exists(spec.origin):
        found = [os.path.abspath(spec.origin)]
    real = [
        real
        for place in found
        if os.path.basename(real := os.path.realpath(place)) == os.path.basename(place)
    ]
    return list(dict.fromkeys([*found, *real]))


def _spec(name: str) -> ModuleSpec:
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None or not (found.origin or found.submodule_search_locations):
        raise ConfigError(f"sandbox packages: this Python has no package '{name}'; {_remedy(top)}")
    return found


def _is_installed(folder: str) -> bool:
    """Packages were installed into it, and nothing else is there."""
    known = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    ]
    real = os.path.realpath(folder)
    if real in map(os.path.realpath, known) or os.path.basename(real) in (
        "site-packages",
        "dist-packages",
    ):
        return not _is_project(real)
    return False


def _is_project(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in _PROJECT)


def _shown(place: str) -> list[str]:
    """What of a package's folder, or of the file of a module, sessions may read."""
    if _is_installed(os.path.dirname(place)):
        return [os.path.dirname(place)]
    if not os.path.isdir(place):
        return [place]
    return (
        _package(place)
        if _is_package(place) and not _is_project(place)
        else list(_importable(place))
    )


def _package(folder: str) -> list[str]:
    """Everything in it but hidden files: the folder itself, if there are none."""
    found, is_whole = [], True
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            is_whole = False
        elif entry.is_symlink():
            continue  # where it leads was not asked for
        elif entry.is_dir(follow_symlinks=False):
            below = _package(entry.path)
            is_whole = is_whole and below == [entry.path]
            found += below
        else:
            found.append(entry.path)
    return [folder] if is_whole else found


def _importable(folder: str) -> Iterator[str]:
    """The modules and packages in a folder that holds other things too."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_symlink() or not entry.name.split(".")[0].isidentifier():
            continue
        if not entry.is_dir():
            if entry.name.endswith(tuple(importlib.machinery.all_suffixes())):
                yield entry.path
        elif os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
            continue
        elif _is_package(entry.path) and not _is_project(entry.path):
            yield from _package(entry.path)
        else:
            yield from _importable(entry.path)


def _is_package(folder: str) -> bool:
    return any(
        os.path.isfile(os.path.join(folder, f"__init__{end}"))
        for end in importlib.machinery.all_suffixes()
    )


def _remedy(name: str) -> str:
    """Distributions are often named otherwise than what they are imported as."""
    wanted = name.lower().replace("_", "-")
    found = sorted(
        imported
        for imported, distributions in importlib.metadata.packages_distributions().items()
        if not imported.startswith("_")
        and wanted in (each.lower().replace("_", "-") for each in distributions)
    )
    if found:
        return f"it is imported as '{found[0]}'"
    return f"install it into the environment of {sys.executable}, or leave it out"
