"""Large values: stored once per content, complete or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ramify.errors import StoreError
from ramify.store.folder_store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", b"text", bytes(range(256)) * 1000])
def test_a_blob_is_named_by_its_content(store: Store, data: bytes):
    digest = store.blobs.put(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert store.blobs.get(digest) == data
    assert digest in store.blobs
    assert store.blobs.path(digest) == store.root / "blobs" / digest[:2] / digest
    with store.blobs.memory_map(digest) as view:
        assert bytes(view) == data


def test_memoryviews_and_precomputed_digests_are_accepted(store: Store):
    data = bytearray(b"abcd" * 1000)
    digest = hashlib.sha256(data).hexdigest()
    assert store.blobs.put(memoryview(data), digest) == digest
    assert store.blobs.put(memoryview(data)[::1]) == digest
    assert store.blobs.get(digest) == bytes(data)


def test_the_same_content_is_stored_once(store: Store):
    for _ in range(3):
        digest = store.blobs.put(b"x" * 1000)
    assert [path.name for path, _ in store.blobs.list_files()] == [digest]


def test_truncated_blob_is_detected_and_rewritten(store: Store):
    digest = store.blobs.put(b"x" * 1000)
    store.blobs.path(digest).write_bytes(b"x" * 10)
    with pytest.raises(StoreError, match="is damaged: its bytes do not have the digest"):
        store.blobs.get(digest)
    assert store.blobs.put(b"x" * 1000) == digest
    assert store.blobs.get(digest) == b"x" * 1000


def test_missing_blob_and_invalid_name_are_reported(store: Store):
    with pytest.raises(
        StoreError, match=f"blob {'0' * 64} is not in .*: deleted, or from another store"
    ):
        store.blobs.get("0" * 64)
    with pytest.raises(
        StoreError, match=r"'\.\./x' is not a blob's name: expected 64 hexadecimal digits"
    ):
        store.blobs.get("../x")


def test_threads_and_processes_put_same_blobs_concurrently(store: Store):
    code = (
        "import sys; from ramify.store.folder_store import Store; s = Store(sys.argv[1])\n"
        "for n in range(40): s.blobs.put(b'%d' % n * 5000)"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(store.root)], cwd=Path(__file__).parents[2]
        )
        for _ in range(2)
    ]
    threads = [
        threading.Thread(
            target=lambda: [store.blobs.put(b"%d" % number * 5000) for number in range(40)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in others] == [0, 0]
    found = {path.name for path, _ in store.blobs.list_files()}
    assert found == {hashlib.sha256(b"%d" % number * 5000).hexdigest() for number in range(40)}
    assert all(store.blobs.get(digest) for digest in found)


def test_a_blob_is_kept_if_it_was_put_again_after_a_time(store: Store):
    digest = store.blobs.put(b"x" * 1000)
    os.utime(store.blobs.path(digest), (500.0, 500.0))
    assert store.blobs.delete(digest, 499.9) == 0
    assert digest in store.blobs
    assert [store.blobs.delete(digest, 500.0), store.blobs.delete(digest, 500.0)] == [1000, 0]
    assert digest not in store.blobs


def test_a_blob_that_is_put_again_is_as_new(store: Store):
    digest = store.blobs.put(b"x")
    path = store.blobs.path(digest)
    os.utime(path, (500.0, 500.0))
    file = path.stat().st_ino
    store.blobs.put(b"x")
    assert path.stat().st_mtime > 500.0
    assert path.stat().st_ino == file


def test_files_of_blobs_are_private(store: Store):
    path = store.blobs.path(store.blobs.put(b"x"))
    modes = [
        each.stat().st_mode & 0o777 for each in (path, path.parent, store.blobs.root / ".lock")
    ]
    assert modes == [0o600, 0o700, 0o600]


def test_a_list_follows_no_link(store: Store, tmp_path: Path):
    digest = store.blobs.put(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 100_000)
    (store.blobs.root / "folder").symlink_to(outside)
    link = store.blobs.path(digest).with_name("link")
    link.symlink_to(outside / "large")
    sizes = {path.name: stat.st_size for path, stat in store.blobs.list_files()}
    assert sizes == {digest: 1, "link": link.lstat().st_size}


def test_a_list_has_files_that_still_exist(store: Store, tmp_path: Path):
    digests = [store.blobs.put(b"x", "ab" + 62 * each) for each in "0123"]
    listed = store.blobs.list_files()
    seen = [next(listed)[0].name]
    last = next(digest for digest in digests if digest not in seen)
    for digest in digests:
        if digest not in (*seen, last):
            store.blobs.path(digest).unlink()
    assert {*seen, *(path.name for path, _ in listed)} == {*seen, last}
    empty = Store(tmp_path / "empty").blobs
    empty.root.rmdir()
    assert list(empty.list_files()) == []


def test_a_file_that_cannot_be_opened_is_named(store: Store):
    digest = store.blobs.put(b"x")
    path = store.blobs.path(digest)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(StoreError, match=f"cannot read the blob {path}: Too many levels"):
        store.blobs.get(digest)
    lock = store.blobs.root / ".lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(StoreError, match=f"cannot write {lock}: Is a directory; free some space"):
        store.blobs.put(b"y")


def test_a_blob_whose_folder_disappears_cannot_be_written(tmp_path: Path):
    """The folder is removed as soon as it was made."""

    def fsync(fd: int) -> None:
        folder = tmp_path / "blobs" / "ab"
        if folder.exists():
            folder.rmdir()

    store = Store(tmp_path, fsync=fsync)
    with pytest.raises(StoreError, match=r"cannot write the blob .*: No such file or directory"):
        store.blobs.put(b"x", "ab" + 62 * "0")


def test_a_blob_that_cannot_be_named_leaves_no_file(store: Store):
    digest = "ab" + 62 * "0"
    path = store.blobs.path(digest)
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(StoreError, match=f"cannot write the blob {path}: .*[Dd]irectory"):
        store.blobs.put(b"x", digest)
    assert [path.name for path, _ in store.blobs.list_files()] == [digest]
