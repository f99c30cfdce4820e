"""Files that are read while they are written: half lines, cut characters, damage, and files that
are replaced."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from ramify.errors import StoreError
from ramify.store.folder_store import Store
from ramify.store.journal import line_blocks
from ramify.types.event import AnyEvent
from tests.clients.helpers import run_skipping
from tests.store.helpers import append_all, short_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize(
    "long", [1, 300_000, 3_000_000], ids=["short", "a block", "several blocks"]
)
def test_block_ends_before_incomplete_line(tmp_path: Path, long: int) -> None:
    path, line = tmp_path / "growing.jsonl", "é".encode() * long
    path.write_bytes(b"one\n" + line[: long | 1])  # in the middle of a character
    reading = line_blocks(path)
    assert next(reading) == b"one\n"
    append(path, line[long | 1 :] + b"\ntwo\n")
    assert list(reading) == []  # its end alone is not a line
    assert b"".join(line_blocks(path, 4)) == line + b"\ntwo\n"
    with pytest.raises(StoreError, match=f"cannot read {tmp_path}: Is a directory"):
        next(line_blocks(tmp_path))


def test_blocks_of_growing_file_contain_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "growing.jsonl"
    path.touch()
    lines = [b"%d %s\n" % (number, b"x" * (number * 977 % 5000)) for number in range(500)]
    whole = b"".join(lines)

    def write() -> None:
        with path.open("ab", buffering=0) as file:
            for at in range(0, len(whole), 701):
                file.write(whole[at : at + 701])

    writer = threading.Thread(target=write)
    writer.start()
    offset, seen = 0, b""
    while offset < len(whole):
        for block in line_blocks(path, offset):
            assert block.endswith(b"\n")
            offset, seen = offset + len(block), seen + block
            assert whole.startswith(seen)
    writer.join()


def test_follow_rereads_line_that_its_writer_repairs(store: Store) -> None:
    async def main() -> list[AnyEvent]:
        seen = []
        with store.create("r1") as journal:
            append_all(journal, short_run("r1")[:3])
            path = store.path("r1")
            size = path.stat().st_size
            append(path, b"\0" * 50 + b"\n")
            following = store.follow("r1", poll_s=0.2)
            while len(seen) < 3:
                seen.append(await anext(following))
            rest = asyncio.ensure_future(anext(following))
            await asyncio.sleep(0)  # it has read the damaged line
            os.truncate(path, size)
            append_all(journal, short_run("r1")[3:])
            seen.append(await rest)
            journal.close()
            return seen + [event async for event in following]

    assert asyncio.run(asyncio.wait_for(main(), 100)) == short_run("r1")


@pytest.mark.parametrize("at", [0, 2])
def test_follow_reports_line_that_stays_damaged_after_three_retries(store: Store, at: int) -> None:
    async def main() -> float:
        began_s = asyncio.get_running_loop().time()
        with store.create("r1") as journal:
            append_all(journal, short_run("r1")[:at])
            append(store.path("r1"), b"oops\n")
            append_all(journal, short_run("r1")[at:])
            with pytest.raises(StoreError, match=f"line {at + 1} is damaged"):
                async for _ in store.follow("r1", poll_s=100.0):
                    pass
        return asyncio.get_running_loop().time() - began_s

    assert run_skipping(main()) == pytest.approx(300.0, abs=90.0)


@pytest.mark.parametrize("how", ["cut", "replaced", "gone"])
def test_follow_fails_if_journal_is_cut_replaced_or_gone(store: Store, how: str) -> None:
    async def main() -> None:
        with store.create("r1") as journal:
            append_all(journal, short_run("r1")[:3])
            path = store.path("r1")
            seen = 0
            async for _ in store.follow("r1", poll_s=0.01):
                seen += 1
                if seen == 3 and how == "cut":
                    os.truncate(path, 10)
                elif seen == 3 and how == "gone":
                    path.rename(path.with_suffix(".old"))
                elif seen == 3:
                    path.rename(path.with_suffix(".old"))
                    path.write_bytes(path.with_suffix(".old").read_bytes() * 2)

    words = "cannot read" if how == "gone" else "was truncated or replaced"
    with pytest.raises(StoreError, match=words):
        asyncio.run(asyncio.wait_for(main(), 100))
