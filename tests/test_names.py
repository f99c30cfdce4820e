"""One name, one thing: stack traces, searches and jumps to definitions must be unambiguous."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ramify.plugins import PluginRegistry, registries

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ramify"


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_bytes())


def classes() -> Iterator[tuple[str, str]]:
    """Yield (name, file) of each class at the top level of a module."""
    for name, tree in trees():
        yield from ((node.name, name) for node in tree.body if isinstance(node, ast.ClassDef))


def test_a_public_class_name_stands_for_one_class() -> None:
    homes = defaultdict(list)
    for name, path in classes():
        if not name.startswith("_"):
            homes[name].append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_our_own_types_are_imported_under_their_own_names() -> None:
    renamed = [
        f"{path}: {alias.name} as {alias.asname}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").startswith("ramify"))
        for alias in node.names
        if alias.asname
        and alias.asname != alias.name
        and alias.name[:1].isupper()
        and not alias.name.isupper()
    ]
    assert renamed == []


def test_every_built_in_registry_entry_loads_and_is_described() -> None:
    found = list(registries())
    assert [each for each in found if not isinstance(each, PluginRegistry)] == []
    entries = [
        entry for each in found if isinstance(each, PluginRegistry) for entry in each.entries()
    ]
    ours = [entry for entry in entries if entry.origin == "ramify"]
    assert ours
    assert [entry for entry in ours if entry.error or not entry.about] == []
