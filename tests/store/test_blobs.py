"""Large values: stored once per content, complete or not at all."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ramify.errors import StoreError
from ramify.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.parametrize("data", [b"", b"text", bytes(range(256)) * 1000])
def test_a_blob_is_named_by_its_content(store: Store, data: bytes):
    digest = store.blobs.put(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert store.blobs.get(digest) == data
    assert digest in store.blobs
    with store.blobs.map(digest) as view:
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
    assert [path.name for path, _ in store.blobs.list()] == [digest]


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
        "import sys; from ramify.store.store import Store; s = Store(sys.argv[1])\n"
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
    found = {path.name for path, _ in store.blobs.list()}
    assert found == {hashlib.sha256(b"%d" % number * 5000).hexdigest() for number in range(40)}
    assert all(store.blobs.get(digest) for digest in found)
