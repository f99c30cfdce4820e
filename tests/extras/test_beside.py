"""The code beside the core: nothing imports it, names lead to it, and so do places of old runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import ramify.extras
from ramify.extras import ENTRY_POINTS, EXTRA_COMMANDS
from ramify.plugins import Registry, registries
from tests.test_house import check_house

FOLDERS = sorted(path.parent.name for path in Path(ramify.extras.__path__[0]).glob("*/__init__.py"))
OLD_PLACES = {
    "ramify.cluster.plan:ClusterPlan": "ramify.extras.cluster.plan",
    "ramify.cluster.shape:DeviceSpec": "ramify.extras.cluster.shape",
}
"""Place that an earlier version stored -> module in which the object is today."""


def folder_of(module: str) -> str | None:
    """The folder of ``ramify.extras`` that has ``module``; None for a module of the core."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["ramify", "extras"] and len(parts) > 2 else None


def test_only_names_lead_to_the_code_beside_the_core() -> None:
    imported = [
        f"{module} imports {other}"
        for module, others in check_house.imported_modules().items()
        for other in others
        if folder_of(other) not in (None, folder_of(module))
    ]
    assert imported == []


def test_every_folder_beside_the_core_has_names() -> None:
    places = [
        *(place for names in ENTRY_POINTS.values() for place in names.values()),
        *(module for module, _ in EXTRA_COMMANDS.values()),
    ]
    assert sorted({folder_of(place.partition(":")[0]) for place in places}) == FOLDERS


def test_every_group_of_names_has_a_registry() -> None:
    groups = {each.group for each in registries() if isinstance(each, Registry)}
    assert set(ENTRY_POINTS) <= groups


@pytest.mark.parametrize(("old", "module"), OLD_PLACES.items())
def test_a_place_that_an_old_run_stored_resolves(old: str, module: str) -> None:
    found = Registry("part", "ramify.tests", {}).of(old)
    name = old.partition(":")[2]
    assert (found.__module__, found.__qualname__) == (module, name)
