"""Finding, reading and following runs, whole or damaged."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from ramify.errors import StoreError
from ramify.store.folder_store import Store
from ramify.store.recorded_replies import RunEventIndex
from ramify.types.event import AnyEvent, RunEnded, ScoreAdded
from tests.store.helpers import append_all, short_run, start_writer, write_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_run_ids_sort_by_time_and_are_readable_and_unique(store: Store):
    ids = [store.new_id("Which host failed FIRST, and why? größer") for _ in range(500)]
    assert len(set(ids)) == 500
    stamps = [id[:20] for id in ids]  # to the microsecond; what follows is chance
    assert stamps == sorted(stamps)
    assert all(id.endswith("-which-host-failed-first") for id in ids)
    assert store.new_id("???").count("-") == 2
    store.create(store.new_id("x" * 500)).close()


def test_a_run_is_found_by_id_prefix_last_and_path(store: Store, tmp_path: Path):
    for id in ("20260101-000000-aaaa", "20260101-000000-abbb", "20260102-000000-cccc"):
        write_run(store, id)
    assert store.path("20260102").stem == "20260102-000000-cccc"
    assert store.path("20260101-000000-a" + "a").stem == "20260101-000000-aaaa"
    assert store.path("last").stem == "20260102-000000-cccc"
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(store.path("last").read_bytes())
    assert list(store.events(copy)) == list(store.events("last"))


def test_unknown_run_id_suggests_nearest(store: Store):
    with pytest.raises(StoreError, match="has no runs"):
        store.path("last")
    write_run(store, "20260101-000000-aaaa")
    write_run(store, "20260101-000000-abbb")
    with pytest.raises(
        StoreError, match="2 runs begin with '20260101-000000', such as 20260101-000000-aaaa"
    ):
        store.path("20260101-000000")
    with pytest.raises(
        StoreError, match=r"no run '20260101-000000-aaax' .*did you mean 20260101-000000-aaaa?"
    ):
        store.path("20260101-000000-aaax")
    with pytest.raises(StoreError, match=r"the journal .*gone\.jsonl does not exist"):
        store.path("gone.jsonl")
    with pytest.raises(StoreError, match="found no run ''"):
        store.path("")
    with pytest.raises(StoreError, match=r"found no run '../../etc/passwd'"):
        store.path("../../etc/passwd")


def test_a_damaged_line_is_named(store: Store):
    write_run(store, "r1")
    path = store.path("r1")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0\0\n", *lines[2:]]))
    events = store.events("r1")
    assert [next(events), next(events)] == short_run("r1")[:2]
    with pytest.raises(StoreError, match=r"r1\.jsonl, line 3 is damaged: it has no checksum"):
        next(events)
    assert [run.problem is None for run in store.runs()] == [False]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("damage", [b"\0", b"[" * 100_000], ids=["a zero", "too deep"])
def test_a_line_that_cannot_be_decoded_is_named(store: Store, damage: bytes, at: int):
    write_run(store, "r1")
    path = store.path("r1")
    lines = [line[:-18] + b"}\n" for line in path.read_bytes().splitlines()]  # no checksums
    lines[at] = lines[at].replace(b"{", b'{"type":"RunStarted","new_field":' + damage, 1)
    path.write_bytes(b"".join(lines))
    with pytest.raises(StoreError, match=rf"r1\.jsonl, line {at + 1} is damaged: "):
        store.load("r1")


def test_newer_schema_is_refused_and_unknown_fields_are_ignored(store: Store):
    write_run(store, "r1")
    path = store.path("r1")
    text = re.sub(r',"crc":"\w{8}"}', "}", path.read_text())
    path.write_text(text.replace('"schema_version":2', '"schema_version":99', 1))
    with pytest.raises(
        StoreError,
        match=r"written by a newer Ramify \(schema 99; this one reads up to 2\): pip install",
    ):
        store.load("r1")
    path.write_text(text.replace('"schema_version":2', '"schema_version":2,"new_field":[1]', 1))
    assert list(store.events("r1")) == short_run("r1")


def test_scores_can_be_appended_after_run_ended(store: Store):
    write_run(store, "r1")
    seconds = store.runs()[0].seconds
    store.append(
        "r1", [ScoreAdded(at_s=900.0, by="task", rewards={"correct": 0.5}, values={"f1": 0.25})]
    )
    store.append(
        "r1",
        [
            ScoreAdded(
                at_s=950.0, by="judge", call="0", turn=0, values={"clear": 1.0}, text="says why"
            )
        ],
    )
    assert store.load("r1").rewards == {"correct": 0.5}
    assert [(mark.by, mark.text) for mark in store.load("r1").marks] == [("judge", "says why")]
    (row,) = store.runs()
    assert (row.rewards, row.seconds, row.alive) == ({"correct": 0.5}, seconds, False)
    assert RunEventIndex(store.events("r1")).last_s < 900


def test_follow_yields_existing_and_new_events(store: Store):
    process = start_writer(store.root, "r1", 3)

    async def main() -> list[AnyEvent]:
        seen: list[AnyEvent] = []
        async for event in store.follow("r1", poll_s=0.01):
            seen.append(event)
            if len(seen) == 3:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        return seen

    with process:
        assert asyncio.run(asyncio.wait_for(main(), 100)) == short_run("r1")


def test_follow_ends_when_writer_is_killed(store: Store):
    process = start_writer(store.root, "r1", 3)

    async def main() -> list[AnyEvent]:
        seen: list[AnyEvent] = []
        async for event in store.follow("r1", poll_s=0.01):
            seen.append(event)
            if len(seen) == 3:
                process.kill()
        return seen

    with process:
        assert asyncio.run(asyncio.wait_for(main(), 100)) == short_run("r1", ended=False)


def test_follow_waits_for_next_question_of_conversation(store: Store):
    async def main() -> int:
        num_ends = 0
        with store.create("r1") as journal:
            append_all(journal, short_run("r1"))
            async for event in store.follow("r1", poll_s=0.01):
                if isinstance(event, RunEnded):
                    num_ends += 1
                    if num_ends == 1:
                        append_all(journal, short_run("r1"))
                    else:
                        journal.close()
        return num_ends

    assert asyncio.run(asyncio.wait_for(main(), 100)) == 2
