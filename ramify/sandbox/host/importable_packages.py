"""Finds the packages that sessions may import, and the files that a jail must expose for them.

A folder into which packages were installed is visible in a jail as a whole. From any other folder,
such as a checkout, only the modules that can be imported under the requested names are visible:
never the ``.env``, ``.git`` or keys beside them.

    site-packages/numpy       requested ──> site-packages           its dependencies are there too
    checkout/src/mine/        requested ──> checkout/src/mine       without its hidden files
    checkout/mine.py          requested ──> checkout/mine.py
    checkout/mine/            no __init__.py (a namespace), or the root of a project:
                              only its modules and packages

The packages are imported ahead of time by ``server/forkserver.py``, and made visible in a jail by
``jail/walls.py``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import site
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec

from ramify.errors import ConfigError

_PROJECT = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg")
"""Files and folders that mark the root of a project."""


def locate(packages: Sequence[str]) -> list[str]:
    """Return the folders that Python must search to import the given packages and their
    dependencies.

    Each folder is listed once. Raises ConfigError if a package is not installed.
    """
    return list(
        dict.fromkeys(os.path.dirname(place) for name in packages for place in _package_paths(name))
    )


def readable_paths(packages: Sequence[str]) -> list[str]:
    """Return the paths that sessions in a jail must be able to read to import the given packages.

    Raises ConfigError if a package is not installed.
    """
    paths: list[str] = []
    for place in (place for name in packages for place in _package_paths(name)):
        if _is_installed(os.path.dirname(place)):
            paths.append(os.path.dirname(place))
        paths += _readable_paths(os.path.realpath(place))
    return list(dict.fromkeys(paths))


def partly_visible_folders(packages: Sequence[str]) -> list[str]:
    """Return the folders of the given packages that sessions in a jail may read only in part.

    Imports need to look up names in these folders. Raises ConfigError if a package is not
    installed.
    """
    places = [os.path.realpath(place) for name in packages for place in _package_paths(name)]
    shown = {*readable_paths(packages)}
    return [place for place in dict.fromkeys(places) if os.path.isdir(place) and place not in shown]


def _package_paths(name: str) -> list[str]:
    """Return the folders of a package, or the file of a single-file module.

    A namespace package can have several folders. If a folder is a symbolic link, its target is
    included, provided that both have the same name.
    """
    spec = _spec(name)
    folders = [
        place
        for place in spec.submodule_search_locations or ()
        if os.path.isabs(place) and os.path.isdir(place)
    ]
    if not folders and spec.origin and os.path.exists(spec.origin):
        folders = [os.path.abspath(spec.origin)]
    real = [
        real
        for place in folders
        if os.path.basename(real := os.path.realpath(place)) == os.path.basename(place)
    ]
    return list(dict.fromkeys([*folders, *real]))


def _spec(name: str) -> ModuleSpec:
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise ConfigError(f"sandbox packages: this Python has no package '{name}'; {_remedy(top)}")
    return spec


def _is_installed(folder: str) -> bool:
    """Return True if packages are installed into this folder, as into site-packages.

    Returns False if it is also the root of a project.
    """
    import sysconfig  # most sandboxes have no packages

    install_folders = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    ]
    real = os.path.realpath(folder)
    if real in map(os.path.realpath, install_folders) or os.path.basename(real) in (
        "site-packages",
        "dist-packages",
    ):
        return not _is_project(real)
    return False


def _is_project(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in _PROJECT)


def _readable_paths(place: str) -> list[str]:
    """Return the paths that sessions must be able to read to import one package or module."""
    if _is_installed(os.path.dirname(place)):
        return [os.path.dirname(place)]
    if not os.path.isdir(place):
        return [place]
    return (
        _visible_package_paths(place)
        if _is_package(place) and not _is_project(place)
        else list(_importable_entries(place))
    )


def _visible_package_paths(folder: str) -> list[str]:
    """Return the files and folders inside a package that sessions may read.

    Hidden files and links are left out. If nothing in the folder is hidden, return only the folder
    itself.
    """
    paths, shows_all = [], True
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            shows_all = False
        elif entry.is_symlink():
            continue  # its target was not requested
        elif entry.is_dir(follow_symlinks=False):
            below = _visible_package_paths(entry.path)
            shows_all = shows_all and below == [entry.path]
            paths += below
        else:
            paths.append(entry.path)
    return [folder] if shows_all else paths


def _importable_entries(folder: str) -> Iterator[str]:
    """Yield the paths of the modules and packages in a folder.

    The folder may also contain other files, which are skipped.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_symlink() or not entry.name.split(".")[0].isidentifier():
            continue
        if not entry.is_dir():
            if entry.name.endswith(tuple(importlib.machinery.all_suffixes())):
                yield entry.path
        elif os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
            continue
        elif _is_package(entry.path) and not _is_project(entry.path):
            yield from _visible_package_paths(entry.path)
        else:
            yield from _importable_entries(entry.path)


def _is_package(folder: str) -> bool:
    return any(
        os.path.isfile(os.path.join(folder, f"__init__{end}"))
        for end in importlib.machinery.all_suffixes()
    )


def _remedy(name: str) -> str:
    """Return advice for an error message about a package that cannot be imported.

    The name under which it is imported often differs from the name under which it is installed.
    """
    import importlib.metadata  # 15 ms, only for an error

    normalized = name.lower().replace("_", "-")
    import_names = sorted(
        imported
        for imported, distributions in importlib.metadata.packages_distributions().items()
        if not imported.startswith("_")
        and normalized in (name.lower().replace("_", "-") for name in distributions)
    )
    if import_names:
        return f"it is imported as '{import_names[0]}'"
    return f"install it into the environment of {sys.executable}, or remove it from packages"
