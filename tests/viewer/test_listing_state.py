"""A list that nothing has changed is not read again, and every change of it is seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ramify import Store
from ramify.store.reviews import HumanRunReview
from ramify.types.event import CallStarted, RunEnded, RunStarted, ScoreAdded
from ramify.types.trajectory import Stop
from ramify.viewer.run_catalog import RunCatalog
from tests.viewer import golden


def written(store: Store, id: str) -> None:
    with store.create(id) as journal:
        journal.append(RunStarted(id=id, question="q", started_at=1.0))
        journal.append(RunEnded(at_s=1.0, stop=Stop.FINAL, answer="a"))


def settle(folder: Path) -> None:
    """Give every folder below ``folder`` an old time, as if the last change were long ago."""
    for each, _, _ in os.walk(folder):
        os.utime(each, (time.time() - 60, time.time() - 60))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    for n in range(3):
        written(store, f"20260301-00000{n}-run")
    settle(store.root)
    return store


def test_unchanged_list_has_the_same_rows(store: Store) -> None:
    library = RunCatalog([store.root])
    first, again = library.runs(), library.runs()
    assert len(first) == 3
    assert [one is other for one, other in zip(first, again, strict=True)] == [True] * 3


CHANGES: dict[str, Callable[[Store], object]] = {
    "a new run": lambda store: written(store, "20260301-000009-run"),
    "a deleted run": lambda store: store.remove("20260301-000001-run"),
    "a score": lambda store: store.append(
        "20260301-000001-run", [ScoreAdded(at_s=2.0, by="task", rewards={"correct": 1.0})]
    ),
    "a review": lambda store: store.write_review(
        "20260301-000001-run", HumanRunReview(labels=("odd",))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_at_once_and_once_it_has_settled(store: Store, change: str) -> None:
    library = RunCatalog([store.root])
    before = [(row.id, row.reward, row.labels) for row in library.runs()]
    CHANGES[change](store)
    assert [(row.id, row.reward, row.labels) for row in library.runs()] != before
    settle(store.root)
    after = [(row.id, row.reward, row.labels) for row in library.runs()]
    assert after == [(row.id, row.reward, row.labels) for row in RunCatalog([store.root]).runs()]


def test_events_of_a_run_in_progress_are_seen_while_its_folder_stays_the_same(store: Store) -> None:
    library = RunCatalog([store.root])
    id = "20260301-000005-live"
    with store.create(id) as journal:
        journal.append(RunStarted(id=id, question="live?", started_at=1.0))
        settle(store.root)
        assert (library.runs()[0].alive, library.runs()[0].num_calls) == (True, 0)
        journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question="live?"))
        assert library.runs()[0].num_calls == 1
    settle(store.root)
    assert library.runs()[0].alive is False


def test_new_training_folders_are_seen(tmp_path: Path) -> None:
    golden.training(tmp_path / "a", [], steps=1)
    library = RunCatalog([tmp_path])
    settle(tmp_path)
    assert [row.name for row in library.trainings()] == ["a"]
    assert [row.name for row in library.trainings()] == ["a"]
    golden.training(tmp_path / "deep" / "b", [], steps=1)
    assert [row.name for row in library.trainings()] == ["a", "b"]
