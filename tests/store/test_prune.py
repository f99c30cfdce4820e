"""Listing, deleting and the size cap."""

from __future__ import annotations

import linecache
import os
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from ramify.clients.base import Price
from ramify.errors import ConfigError, StoreError
from ramify.evaluate.run_evaluation import EvaluationPlan, EvaluationStore
from ramify.store.folder_store import Store
from ramify.store.run_summary import RunSummary
from ramify.types.message import Usage
from ramify.types.trajectory import Stop
from tests.data.golden import JOURNAL
from tests.engine.helpers import client, rlm
from tests.store.helpers import append_all, short_run, start_writer, write_run

IDS = [f"2026010{day}-000000-aaaa" for day in range(1, 6)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def set_age(path: Path, age_s: float) -> None:
    os.utime(path, (time.time() - age_s,) * 2)


def ids(store: Store) -> list[str]:
    return [run.id for run in store.runs()]


def test_run_that_may_not_ask_costs_nothing(store: Store) -> None:
    """It does not have an unknown cost, since the price of its model is known."""
    with rlm(client([], price=Price(1, 1)), limits={"max_cost": 1e-4}, store=store) as r:
        result = r.completion("text", "?")
    (summary,) = store.runs()
    assert (result.stop, result.cost, summary.cost) == (Stop.MAX_COST, 0.0, 0.0)


def test_run_summary_matches_folded_trajectory(store: Store):
    (store.root / "runs" / "golden.jsonl").write_bytes(JOURNAL.read_bytes())
    trajectory = store.load("golden")
    (summary,) = store.runs()
    assert summary == RunSummary(
        "golden",
        trajectory.question,
        "scripted:root",
        trajectory.started_at,
        trajectory.seconds,
        2,
        len(trajectory.calls),
        trajectory.depth,
        trajectory.usage,
        trajectory.cost,
        trajectory.stop,
        JOURNAL.stat().st_size,
        rewards=trajectory.rewards,
        answer=trajectory.answer,
        root_turns=len(trajectory.calls[-1].turns),
    )


def test_finished_interrupted_and_live_runs_are_listed_newest_first(store: Store):
    write_run(store, IDS[0])
    write_run(store, IDS[1], ended=False)
    with store.create(IDS[2]) as journal:
        append_all(journal, short_run(IDS[2], ended=False))
        found = store.runs()
    assert [(run.id, run.stop, run.alive) for run in found] == [
        (IDS[2], None, True),
        (IDS[1], None, False),
        (IDS[0], Stop.FINAL, False),
    ]
    assert [run.id for run in store.runs(limit=1)] == [IDS[2]]
    assert store.runs()[2].usage == Usage(10, 2, calls=1)


def test_ids_without_timestamp_sort_by_file_time(store: Store):
    write_run(store, "20200101-000000-old")
    write_run(store, "mine")
    write_run(store, "20990101-000000-new")
    assert ids(store) == ["20990101-000000-new", "mine", "20200101-000000-old"]


def test_index_follows_journals_and_is_rebuilt_if_lost_or_damaged(store: Store):
    write_run(store, IDS[0], ended=False)
    assert store.runs()[0].stop is None
    with store.reopen(IDS[0]) as journal:
        append_all(journal, short_run(IDS[0])[3:])
    assert store.runs()[0].stop is Stop.FINAL
    for damage in (b"", b"not a database" * 500):
        (store.root / "index.sqlite").write_bytes(damage)
        assert store.runs()[0].stop is Stop.FINAL
        assert ids(store) == [IDS[0]]
    (store.root / "index.sqlite").unlink()
    assert ids(store) == [IDS[0]]


def test_locked_index_does_not_block_listing(store: Store, monkeypatch: pytest.MonkeyPatch):
    write_run(store, IDS[0])
    store.runs()
    write_run(store, IDS[1])
    monkeypatch.setattr("ramify.store.run_summary_cache.PATIENCE_S", 0.05)
    other = sqlite3.connect(store.root / "index.sqlite")
    try:
        other.execute("BEGIN EXCLUSIVE")
        assert ids(store) == [IDS[1], IDS[0]]
    finally:
        other.close()


def test_processes_list_and_write_concurrently(store: Store):
    code = (
        "import sys; from ramify.store.folder_store import Store; from tests.store.helpers import "
        "write_run\n"
        "store = Store(sys.argv[1])\n"
        "for n in range(10): write_run(store, f'{sys.argv[2]}-{n}'); store.runs()"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(store.root), name], cwd=Path(__file__).parents[2]
        )
        for name in "ab"
    ]
    assert [process.wait() for process in others] == [0, 0]
    assert len(store.runs()) == 20


def test_listing_reads_index_instead_of_journals(store: Store):
    line = JOURNAL.read_bytes()
    for number in range(2000):
        (store.root / "runs" / f"20260101-{number:06}-x.jsonl").write_bytes(line)
    whole = store.runs()
    began = time.process_time()  # CPU time of this process only: others may be busy
    assert store.runs() == whole
    warm_s = time.process_time() - began
    began = time.process_time()
    store.load("last")
    assert warm_s < 2000 * (time.process_time() - began)
    assert len(whole) == 2000


def test_removing_run_deletes_blobs_that_only_it_references(store: Store):
    mine, shared = store.blobs.put(b"mine" * 100), store.blobs.put(b"both" * 100)
    write_run(store, IDS[0], digest=mine)
    write_run(store, IDS[1], digest=shared)
    write_run(store, IDS[2], digest=shared)
    size = store.path(IDS[0]).stat().st_size
    assert store.remove(IDS[0]) == size + 400
    assert (mine in store.blobs, shared in store.blobs) == (False, True)
    store.remove(IDS[1])
    assert shared in store.blobs
    store.remove("last")
    assert shared not in store.blobs
    assert ids(store) == []
    assert [path.name for path in (store.root / "runs").iterdir()] == []


def test_blob_put_again_after_run_ended_is_kept(store: Store):
    digest = store.blobs.put(b"data")
    write_run(store, IDS[0], digest=digest)
    set_age(store.path(IDS[0]), 100)
    store.blobs.put(b"data")  # a run that is about to begin
    store.remove(IDS[0])
    assert digest in store.blobs


def test_blob_that_running_run_has_not_yet_referenced_is_kept(store: Store):
    write_run(store, IDS[0])
    with store.create(IDS[1]) as journal:
        digest = store.blobs.put(b"soon named")
        set_age(store.blobs.path(digest), 600)
        store.prune(keep_last=0)
        assert digest in store.blobs
        append_all(journal, short_run(IDS[1], digest=digest))
    store.prune()
    assert digest in store.blobs


def test_removing_a_journal_outside_the_store_is_refused(store: Store, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_bytes(b"")
    with pytest.raises(
        StoreError, match=r"mine\.jsonl is outside the store .*: delete the file yourself"
    ):
        store.remove(tmp_path / "mine.jsonl")


def test_prune_by_count_age_and_both(store: Store):
    for age_days, id in zip((9, 7, 5, 3, 1), IDS, strict=True):
        write_run(store, id)
        set_age(store.path(id), age_days * 86400)
    assert store.prune().runs == []
    assert store.prune(older_than_s=8 * 86400).runs == [IDS[0]]
    assert store.prune(older_than_s=4 * 86400, keep_last=3).runs == [IDS[1]]
    assert store.prune(keep_last=2).runs == [IDS[2]]
    assert ids(store) == [IDS[4], IDS[3]]
    assert store.prune(keep_last=0).runs == [IDS[3], IDS[4]]


def test_prune_to_size_removes_oldest_first(store: Store):
    for number, id in enumerate(IDS):
        write_run(store, id, digest=store.blobs.put(bytes([number]) * 100_000))
    assert store.prune(max_bytes=250_000, keep_last=1).runs == IDS[:3]
    assert store.size() <= 250_000
    assert store.prune(max_bytes=0, keep_last=1).runs == [IDS[3]]
    assert ids(store) == [IDS[4]]


def test_prune_keeps_run_that_is_being_written(store: Store):
    write_run(store, IDS[1])
    process = start_writer(store.root, IDS[0], 3)
    with process:
        assert store.prune(keep_last=0).runs == [IDS[1]]
        process.communicate("\n")
    assert list(store.events(IDS[0])) == short_run(IDS[0])


def test_prune_deletes_old_unreferenced_blobs(store: Store):
    digest = store.blobs.put(b"nobody names me")
    torn = store.blobs.path(digest).with_name(f".{digest[:16]}.1.abc")
    torn.write_bytes(b"half")
    store.prune()
    assert digest in store.blobs  # perhaps a run is about to name it
    for path in (store.blobs.path(digest), torn):
        set_age(path, 7200)
    store.prune()
    assert (digest in store.blobs, torn.exists()) == (False, False)


def test_a_full_store_warns_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAMIFY_STORE_MAX_BYTES", "1e3")
    store.blobs.put(b"x" * 5000)

    def create() -> None:
        store.create("r1").close()

    with pytest.warns(
        UserWarning,
        match=r"the store .* holds 0\.0 GB, more than its limit of 0\.0 GB: prune old runs",
    ) as found:
        create()
    assert linecache.getline(found[0].filename, found[0].lineno).strip() == "create()"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.create("r2").close()
    monkeypatch.setenv("RAMIFY_STORE_MAX_BYTES", "lots")
    with pytest.raises(
        ConfigError, match="RAMIFY_STORE_MAX_BYTES is 'lots': give a number of bytes"
    ):
        Store(store.root).create("r3")
    assert sorted(ids(store)) == ["r1", "r2"]


def test_store_folder_comes_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "a" / "b"))
    assert Store().root == tmp_path / "a" / "b"
    monkeypatch.delenv("RAMIFY_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store().root.is_relative_to(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot create the folder .*file: File exists; set RAMIFY_HOME"
    ):
        Store(tmp_path / "file" / "x")


def test_evaluations_are_pruned_by_the_same_rules(store: Store):
    records = EvaluationStore(store.root)
    old, middle, new = (
        records.create(EvaluationPlan(model="m", task=task)) for task in ("old", "middle", "new")
    )
    days = {old: 9, middle: 5, new: 0}
    for record, age in days.items():
        os.rename(
            record.path, record.path.with_name(f"2026010{9 - age}-000000-{record.plan.task}.jsonl")
        )
    paths = sorted((store.root / "evaluations").glob("*.jsonl"))
    for path, age in zip(paths, (9, 5, 0), strict=True):
        set_age(path, age * 86400.0)
    old.close()
    middle.close()
    write_run(store, IDS[0])
    # A matrix goes with the last of its evaluations.
    matrix = store.root / "evaluations" / f"{paths[2].stem.removesuffix('-new')}.matrix"
    matrix.write_text("{}")
    assert store.prune(older_than_s=7 * 86400).evaluations == [paths[0].stem]
    assert (store.prune(keep_last=2).evaluations, ids(store)) == ([], [IDS[0]])
    removed = store.prune(max_bytes=0)
    assert (removed.runs, removed.evaluations) == (
        [IDS[0]],
        [paths[1].stem],
    )  # the newest is being written
    new.close()
    assert matrix.exists()
    assert store.prune(keep_last=0).evaluations == [paths[2].stem]
    assert not list((store.root / "evaluations").iterdir())
