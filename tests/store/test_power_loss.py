"""The contents of a store after its machine lost power: a disk forgets what was not synced."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ramify.errors import StoreError
from ramify.store.folder_store import Store
from ramify.store.journal import FileRunJournal
from ramify.testing import ForgetfulDisk
from ramify.types.event import AnyEvent, ReplyReceived
from tests.store.helpers import append_all, short_run


class SlowDisk(ForgetfulDisk):
    """A disk that takes a while for each flush."""

    def fsync(self, fd: int) -> None:
        time.sleep(0.05)
        super().fsync(fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "machine").mkdir()
    return tmp_path / "machine"


def after_power_loss(disk: ForgetfulDisk) -> Store:
    """The store, as the machine finds it when it starts again."""
    again = disk.root.parent / "again"
    disk.lose_power(again)
    return Store(again / "store")


def test_a_disk_forgets_what_was_not_synced(folder: Path) -> None:
    disk = ForgetfulDisk(folder)
    for name in ("synced", "unnamed", "forgotten"):
        (folder / name).write_text("old")
    with open(folder / "synced", "r+b") as file:
        disk.fsync(file.fileno())
        file.write(b"new")
    fd = os.open(folder, os.O_RDONLY)
    disk.fsync(fd)
    os.close(fd)
    (folder / "late").write_text("x")
    with open(folder / "late", "rb") as file:
        disk.fsync(file.fileno())
    disk.lose_power(folder.parent / "again")
    left = {path.name: path.read_text() for path in (folder.parent / "again").iterdir()}
    assert left == {"synced": "old", "unnamed": "", "forgotten": ""}


def test_a_reply_is_soon_on_the_disk_while_its_run_goes_on(folder: Path) -> None:
    disk = ForgetfulDisk(folder)
    store = Store(folder / "store", fsync=disk.fsync)
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:3])
        time.sleep(0.3)  # so that no earlier flush could take the reply along
        journal.append(short_run("r1")[3])
        assert disk.wait_for(lambda: b"Replied" in disk.content(journal.path))
        assert disk.wait_for(lambda: "r1.jsonl" in disk.names(journal.path.parent))
        found = after_power_loss(disk)
        assert isinstance(list(found.events("r1"))[-1], ReplyReceived)


def test_everything_is_on_the_disk_when_a_journal_is_closed(folder: Path) -> None:
    disk = SlowDisk(folder)
    store = Store(folder / "store", fsync=disk.fsync)
    digest = store.blobs.put(b"a long context")
    with store.create("r1") as journal:
        append_all(journal, short_run("r1", digest=digest))
    found = after_power_loss(disk)
    assert list(found.events("r1")) == short_run("r1", digest=digest)
    assert found.blobs.get(digest) == b"a long context"


def test_an_event_after_the_last_reply_may_be_lost_but_leaves_a_whole_run(folder: Path) -> None:
    disk = ForgetfulDisk(folder)
    store = Store(folder / "store", fsync=disk.fsync)
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:4])
        assert disk.wait_for(lambda: b"Replied" in disk.content(journal.path))
        assert disk.wait_for(lambda: "r1.jsonl" in disk.names(journal.path.parent))
        journal.append(short_run("r1")[4])
        found = after_power_loss(disk)
        assert len(list(found.events("r1"))) in (4, 5)
        assert found.check("r1").is_whole


def test_a_continued_journal_is_on_the_disk_when_it_is_closed(folder: Path) -> None:
    disk = SlowDisk(folder)
    store = Store(folder / "store", fsync=disk.fsync)
    with store.create("r1") as journal:
        append_all(journal, short_run("r1")[:2])
    store.append("r1", short_run("r1")[2:])
    assert list(after_power_loss(disk).events("r1")) == short_run("r1")


def test_a_repaired_journal_and_its_backup_are_on_the_disk(folder: Path) -> None:
    disk = ForgetfulDisk(folder)
    store = Store(folder / "store", fsync=disk.fsync)
    with store.create("r1") as journal:
        append_all(journal, short_run("r1"))
    path = store.path("r1")
    damaged = path.read_bytes().replace(b'"value":"1"', b'"value":"7"')
    path.write_bytes(damaged)
    with open(path, "rb") as file:
        disk.fsync(file.fileno())
    store.repair("r1")
    found = after_power_loss(disk)
    assert list(found.events("r1")) == short_run("r1")[:4]
    assert found.path("r1").with_suffix(".damaged").read_bytes() == damaged


def append_until_it_fails(journal: FileRunJournal, event: AnyEvent) -> None:
    while True:  # the flush of a reply fails in the background
        journal.append(event)
        time.sleep(0.01)


def test_a_disk_that_cannot_flush_is_reported(folder: Path) -> None:
    is_broken = False

    def fsync(fd: int) -> None:
        if is_broken:
            raise OSError(5, "Input/output error")

    store = Store(folder / "store", fsync=fsync)
    journal = store.create("r1")
    append_all(journal, short_run("r1")[:3])
    is_broken = True
    with pytest.raises(StoreError, match=r"r1\.jsonl may not be on the disk: Input/output error"):
        append_until_it_fails(journal, short_run("r1")[3])
    with pytest.raises(StoreError, match="may not be on the disk"):
        journal.close()
