"""Rules for all tests: their order, and a visible skip of the folders that need the default sandbox on
machines without one."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec, open_sandbox

IN_THE_DEFAULT = ("engine", "cli", "docs", "real")
"""Rooms of tests whose runs name no sandbox."""
FIRST = ("sandbox", "viewer", "docs", "train", "cli", "inference", "serve")
"""Rooms whose files take longest. They come first, so that no process of many is left alone with
one at the end."""
_HERE = Path(__file__).parent
for _name in [name for name in os.environ if name.startswith("RAMIFY_")]:
    del os.environ[_name]  # a developer's settings are no part of a test
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as in scripts/test: sums of two threads are rounded otherwise


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: FIRST.index(room(item.path)) if room(item.path) in FIRST else len(FIRST)
    )
    affected = [item for item in items if room(item.path) in IN_THE_DEFAULT]
    if affected and why_not():
        for item in affected:
            item.add_marker(pytest.mark.skip(reason=f"NO DEFAULT SANDBOX HERE: {why_not()}"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    was_split = bool(
        getattr(config.option, "numprocesses", None)
    )  # the tests were in other processes
    if (was_split or why_not.cache_info().currsize) and why_not():
        terminalreporter.write_sep("=", "NOT TESTED HERE", red=True)
        terminalreporter.write_line(
            f"tests of {', '.join(IN_THE_DEFAULT)} need the default sandbox: {why_not()}"
        )
    if was_split:
        importlib.import_module("tests.viewer.browser")
    browser = sys.modules.get("tests.viewer.browser")  # where its tests were asked for
    if browser is not None and browser.why_not():
        terminalreporter.write_sep("=", "NOT TESTED HERE", red=True)
        terminalreporter.write_line(f"the pages of ramify view need a browser: {browser.why_not()}")
