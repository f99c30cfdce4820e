"""Rules for all tests: their order, and a visible skip of the folders that need the default sandbox on
machines without one. Also the records of our loggers, as a fixture."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec, open_sandbox

IN_THE_DEFAULT = ("engine", "cli", "docs", "real")
"""Test folders whose runs use the default sandbox."""
LONGEST = (
    "sandbox/attacks/test_attacks.py",
    "test_gpu_kit.py",
    "docs/test_notebooks.py",
    "train/backends/test_ranks.py",
    "extras/cluster/test_launch.py",
    "train/test_gpu_recipes.py",
    "train/placement/test_nodes.py",
    "train/placement/test_on_ray.py",
    "docs/test_pages.py",
    "train/backends/test_fsdp.py",
    "train/backends/test_meshes.py",
    "docs/test_demo.py",
    "maps/test_map_on_ray.py",
    "extras/cluster/test_ray_jobs.py",
)
"""Files that take minutes, the longest first. They run before all others, so that no worker process
is left alone with one at the end."""
FIRST = ("sandbox", "viewer", "docs", "train", "cli", "inference", "serve")
"""Test folders with the slowest of the other files. They run next."""
_HERE = Path(__file__).parent
for _name in [name for name in os.environ if name.startswith("RAMIFY_")]:
    del os.environ[_name]  # a developer's settings must not affect tests
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as in scripts/test: two threads would round sums differently


@functools.cache
def why_not() -> str:
    """Return why this machine has no default sandbox; empty if it has one."""
    try:
        open_sandbox(SandboxSpec())
    except SandboxError as error:
        return str(error)
    return ""


def room(path: Path) -> str:
    """``tests/cli/test_ask.py`` -> ``cli``"""
    return path.relative_to(_HERE).parts[0] if path.is_relative_to(_HERE) else ""


def place_in_order(path: Path) -> tuple[int, int]:
    """Position of a file among the longest, then that of its folder."""
    name = path.relative_to(_HERE).as_posix() if path.is_relative_to(_HERE) else ""
    return _index(name, LONGEST), _index(room(path), FIRST)


def _index(name: str, names: tuple[str, ...]) -> int:
    return names.index(name) if name in names else len(names)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep all that was imported and collected, a million objects, out of garbage collections."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_in_order(item.path))
    affected = [item for item in items if room(item.path) in IN_THE_DEFAULT]
    if affected and why_not():
        for item in affected:
            item.add_marker(pytest.mark.skip(reason=f"NO DEFAULT SANDBOX HERE: {why_not()}"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    was_split = bool(
        getattr(config.option, "numprocesses", None)
    )  # the tests ran in other processes
    if (was_split or why_not.cache_info().currsize) and why_not():
        terminalreporter.write_sep("=", "NOT TESTED HERE", red=True)
        terminalreporter.write_line(
            f"tests of {', '.join(IN_THE_DEFAULT)} need the default sandbox: {why_not()}"
        )
    if was_split:
        importlib.import_module("tests.viewer.browser")
    browser = sys.modules.get("tests.viewer.browser")  # loaded if its tests were selected
    if browser is not None and browser.why_not():
        terminalreporter.write_sep("=", "NOT TESTED HERE", red=True)
        terminalreporter.write_line(f"the pages of ramify view need a browser: {browser.why_not()}")


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """All records of the tree, as an application's own handler sees them."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("ramify")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)
