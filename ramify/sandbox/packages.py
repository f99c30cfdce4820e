"""Where the host keeps the packages that sessions may import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence

from ramify.errors import ConfigError


def locate(packages: Sequence[str]) -> list[str]:
    """The folders in which ``packages`` and what they need are found, each once. Raises ConfigError."""
    folders: list[str] = []
    for name in packages:
        folder = _folder(name)
        if folder not in folders:
            folders.append(folder)
    return folders


def _folder(name: str) -> str:
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None or not (found.origin or found.submodule_search_locations):
        raise ConfigError(f"sandbox packages: this Python has no package '{name}'; {_remedy(top)}")
    if found.submodule_search_locations:
        return os.path.dirname(os.path.abspath(next(iter(found.submodule_search_locations))))
    return os.path.dirname(os.path.abspath(found.origin or ""))


def _remedy(name: str) -> str:
    """Distributions are often named otherwise than what they are imported as."""
    wanted = name.lower().replace("_", "-")
    found = sorted(
        imported
        for imported, distributions in importlib.metadata.packages_distributions().items()
        if not imported.startswith("_") and wanted in (each.lower().replace("_", "-") for each in distributions)
    )
    if found:
        return f"it is imported as '{found[0]}'"
    return f"install it into the environment of {sys.executable}, or leave it out"
