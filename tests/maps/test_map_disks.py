"""Maps on a full disk, and after a power failure: the same map continues, and pays nothing twice."""

from __future__ import annotations

import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import testing
from ramify.maps.map_journal import TableMapStore, read_lines
from ramify.store.durable_files import release_reserve
from ramify.types.message import Message

NUM_ROWS = 12


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class CountingModel:
    """Answers with the last word of a row, and counts the requests for each."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def reply(self, messages: tuple[Message, ...]) -> str:
        word = messages[-1].content.splitlines()[0].split()[-1]
        self.asked[word] += 1
        return word


def write_rows(path: Path) -> Path:
    rows = [{"text": f"{'long ' * 40}text w{number}"} for number in range(NUM_ROWS)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def ask(rows: Path, model: CountingModel, store: ramify.Store, **options: Any) -> ramify.MapResult:
    client = testing.ScriptedClient(model.reply)
    limits = ramify.Limits(max_concurrency=2)
    return ramify.map("Which word?", rows, client, store=store, limits=limits, **options)


def answers_of(path: Path) -> list[str]:
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


def journal_of(store: ramify.Store) -> Path:
    ((path, _),) = TableMapStore(store.root).headers()
    return path


def replies_of(path: Path) -> Counter[int]:
    return Counter(line.r.number for _, line in read_lines(path) if line.r is not None)


EVERY = [f"w{number}" for number in range(NUM_ROWS)]


@pytest.mark.parametrize("out", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_map_on_a_full_disk_stops_and_continues(tmp_path: Path, out: str) -> None:
    """The disk is full at each fifth of the journal, and its reserve is used up."""
    whole = tmp_path / "whole"
    whole.mkdir()
    rows = write_rows(tmp_path / "rows.jsonl")
    ask(rows, CountingModel(), ramify.Store(whole), out=whole / out)
    size, first = (
        journal_of(ramify.Store(whole)).stat().st_size,
        len(journal_of(ramify.Store(whole)).read_bytes().splitlines()[0]),
    )
    for fifth in range(1, 5):
        folder, model = tmp_path / str(fifth), CountingModel()
        folder.mkdir()
        store = ramify.Store(folder)
        with files_of_at_most(first + (size - first) * fifth // 5):
            stopped = ask(rows, model, store, out=folder / out)
        assert stopped.stop == "suspended"
        assert "cannot write" in stopped.reason
        assert "free some space" in stopped.reason
        assert not (folder / out).exists()
        # A reply that could not be recorded is paid again; there are at most as many as requests
        # in flight.
        num_before = sum(model.asked.values())
        recorded = sum(replies_of(journal_of(store)).values())
        assert num_before - recorded <= 2
        done = ask(rows, model, store, out=folder / out)
        assert (done.stop, done.num_answered) == ("done", NUM_ROWS)
        assert sum(model.asked.values()) - num_before == NUM_ROWS - recorded
        assert set(replies_of(journal_of(store)).values()) == {1}
        assert (folder / out).read_bytes() == (whole / out).read_bytes()


def test_the_reserve_of_a_full_disk_takes_the_last_replies(tmp_path: Path) -> None:
    """After the first line that does not fit, the reserve is freed: the map stops, and what was on
    its way is recorded."""
    rows, store, model = (
        write_rows(tmp_path / "rows.jsonl"),
        ramify.Store(tmp_path),
        CountingModel(),
    )
    ask(rows, model, store, sample=1)
    assert release_reserve(tmp_path)
    again = ask(rows, model, store, sample=2)
    assert again.stop == "done"
    assert release_reserve(tmp_path), "a map that continues keeps a reserve, too"


@pytest.mark.parametrize("out", ["a.jsonl", "a.csv", "a.parquet"])
def test_an_output_that_does_not_fit_is_one_sentence_and_written_later(
    tmp_path: Path, out: str
) -> None:
    rows, store, model = (
        write_rows(tmp_path / "rows.jsonl"),
        ramify.Store(tmp_path),
        CountingModel(),
    )
    full = tmp_path / "full"
    full.mkdir()
    (full / f"{out}.partial").symlink_to("/dev/full")
    stopped = ask(rows, model, store, out=full / out)
    assert stopped.stop == "suspended"
    assert stopped.reason == (
        f"cannot write {full / out}: no space left on device; the answers are in the map's journal: "
        "make room, and give the same command again"
    )
    (full / f"{out}.partial").unlink()
    done = ask(rows, model, store, out=full / out)
    assert (done.stop, done.num_answered) == ("done", NUM_ROWS)
    assert set(model.asked.values()) == {1}


def test_a_map_continues_after_a_power_failure(tmp_path: Path) -> None:
    """What the journal's disk has synced is not asked again."""
    machine = tmp_path / "machine"
    machine.mkdir()
    rows, model = write_rows(tmp_path / "rows.jsonl"), CountingModel()
    disk = testing.ForgetfulDisk(machine)
    first = ask(rows, model, ramify.Store(machine / "store", fsync=disk.fsync), sample=5)
    assert first.num_answered == 5
    disk.lose_power(tmp_path / "again")
    store = ramify.Store(tmp_path / "again" / "store")
    assert sum(replies_of(journal_of(store)).values()) == 5
    done = ask(rows, model, store)
    assert (done.stop, done.num_answered) == ("done", NUM_ROWS)
    assert set(model.asked.values()) == {1}
