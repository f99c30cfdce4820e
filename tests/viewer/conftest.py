"""Runs that many tests share, made once, and one browser per test file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ramify import Store
from tests.viewer import golden
from tests.viewer.browser import chromium, why_not


class World(NamedTuple):
    """Runs to view. Tests read them and do not change them."""

    folder: Path
    store: Path
    tree: str
    plain: str
    other: str
    hostile: str
    evaluated: Path
    """A store with an evaluation and its runs."""
    evaluation: str
    """Its id."""
    scored: str
    """One of its runs."""
    workbook: Path
    """A store with one run: a child for each sheet of a workbook, of which one reads too little."""
    sheets: str
    """Its id."""
    trainings: Path
    """Two folders of ``ramify train``, ``base`` and ``second``; the second run of ``base``'s
    rollouts is the hostile one."""
    markdown: str
    """A run of the store whose question, reply and answer have Markdown, formulas and text that is
    written from right to left."""
    maps: Path
    """A store with a map of three rows, of which one failed."""
    map: str
    """Its id."""

    @property
    def places(self) -> tuple[Path, ...]:
        """All of it: the four places of a viewer."""
        return self.store, self.evaluated, self.trainings, self.maps


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def make_world(folder: Path) -> World:
    """Make the runs in ``folder``."""
    store = Store(folder / "store")
    tree, hostile = golden.tree(store), golden.hostile(store)
    plain, other = golden.plain(store, "How many days has May?", "31"), golden.other_way(store)
    workbook = Store(folder / "workbook")
    rollouts = [
        golden.scored(run, store, reward)
        for run, reward in ((tree, 1.0), (hostile, 0.0), (other, 0.5))
    ]
    golden.training(folder / "train" / "base", rollouts)
    golden.training(folder / "train" / "second", rollouts[:1], seed=3)
    evaluated = Store(folder / "evaluated")
    evaluation, run = golden.evaluation(evaluated)
    maps = Store(folder / "maps")
    return World(
        folder,
        store.root,
        tree,
        plain,
        other,
        hostile,
        evaluated.root,
        evaluation,
        run,
        workbook.root,
        golden.sheets(workbook),
        folder / "train",
        golden.plain(store, golden.MARKDOWN_QUESTION, golden.MARKDOWN),
        maps.root,
        golden.map_of_three(maps, folder / "out.jsonl"),
    )


@pytest.fixture(scope="module")
def browser(world: World) -> Iterator[Any]:
    """For one file, and after the world: while it is open, this thread can run no event loop
    (``chromium``)."""
    if why_not():
        pytest.skip(f"NO BROWSER HERE: {why_not()}")
    with chromium() as made:
        yield made
