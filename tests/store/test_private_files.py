"""Private files: complete writes, the reserve, the measured size of a store, deleted files, and the
thread that flushes."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import pytest

from ramify.errors import ConfigError, StoreError
from ramify.store.durable_files import (
    RESERVE_BYTES,
    FsyncFlusher,
    StoreSizeMonitor,
    disk_reserve_bytes,
    make_folder,
    max_store_bytes,
    release_reserve,
    remove_file,
    reserve_disk_space,
    write_all,
)
from ramify.store.folder_store import Store


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_write_that_a_signal_interrupts_is_completed(tmp_path: Path) -> None:
    """A pipe takes 64 KB; a signal then makes ``write()`` return the number of these bytes."""
    data = bytes(range(256)) * 1024
    signals = threading.Event()
    count = 0

    def interrupted(*_: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            signals.set()

    out, into = os.pipe()
    received = bytearray()

    def read() -> None:
        signals.wait()
        while piece := os.read(out, 1 << 16):
            received.extend(piece)

    reader = threading.Thread(target=read)
    before = signal.signal(signal.SIGALRM, interrupted)
    reader.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        write_all(into, data, tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(into)
        reader.join()
        os.close(out)
    assert bytes(received) == data


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StoreError, match=r"cannot write /a/b: No space left on device; free"):
            write_all(fd, b"x", Path("/a/b"))
    finally:
        os.close(fd)


def test_folders_are_private_and_their_names_are_flushed(tmp_path: Path) -> None:
    flushed: list[str] = []
    made = make_folder(
        tmp_path / "a" / "b", lambda fd: flushed.append(os.readlink(f"/dev/fd/{fd}"))
    )
    assert [mode(made), mode(made.parent)] == [0o700, 0o700]
    assert flushed == [str(tmp_path), str(tmp_path / "a")]
    with pytest.raises(ConfigError, match=r"cannot create the folder .*/c: .*; set RAMIFY_HOME"):
        make_folder(Path("/proc/self/c"))


def test_a_folder_that_another_process_creates_meanwhile_is_used(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert make_folder(wanted, lambda fd: wanted.mkdir(parents=True, exist_ok=True)) == wanted


def test_the_reserve_is_allocated_once_and_released_once(tmp_path: Path) -> None:
    assert disk_reserve_bytes(tmp_path) == 0
    reserve_disk_space(tmp_path)
    (reserve,) = tmp_path.iterdir()
    assert RESERVE_BYTES == disk_reserve_bytes(tmp_path) == 4 * 1024 * 1024
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    assert mode(reserve) == 0o600
    os.truncate(reserve, 5 * 1024 * 1024)
    reserve_disk_space(tmp_path)
    assert disk_reserve_bytes(tmp_path) == 5 * 1024 * 1024
    assert [release_reserve(tmp_path), release_reserve(tmp_path)] == [True, False]
    reserve_disk_space(tmp_path / "gone")  # no error: the store works without it
    assert disk_reserve_bytes(tmp_path) == 0


def test_a_disk_without_space_for_the_reserve_keeps_no_empty_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RESERVE_BYTES - 1, limits[1]))
    try:
        reserve_disk_space(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    assert not release_reserve(tmp_path)
    reserve_disk_space(tmp_path)
    assert release_reserve(tmp_path)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A folder of 1,000 bytes, with a link to a folder and a file outside."""
    root = tmp_path / "root"
    (root / "runs").mkdir(parents=True)
    (root / "runs" / "a").write_bytes(b"x" * 400)
    (root / "b").write_bytes(b"x" * 600)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 10_000)
    return root


def test_the_size_of_a_store_is_measured_without_links_and_the_reserve(full: Path) -> None:
    (full / "folder").symlink_to("../outside")
    (full / "file").symlink_to("../outside/large")
    links = sum((full / name).lstat().st_size for name in ("folder", "file"))
    reserve_disk_space(full)
    assert StoreSizeMonitor(full).measure() == 1000 + links
    assert mode(full / "size.json") == 0o600


def test_a_measurement_is_remembered_for_an_hour(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_STORE_MAX_BYTES", "2000")
    cache = full / "size.json"
    cache.write_text("x" * 100)  # unreadable, and longer than a measurement

    def warns_at(seconds: float) -> bool:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            StoreSizeMonitor(full, now=lambda: 1e6 + seconds).warn_if_full()
        return bool(found)

    assert not warns_at(0)
    assert msgspec.json.decode(cache.read_bytes())["at"] == 1e6
    (full / "more").write_bytes(b"x" * 5000)
    assert [warns_at(at) for at in (3599.5, -3599.5)] == [False, False]
    assert warns_at(3600)
    assert msgspec.json.decode(cache.read_bytes())["at"] == 1e6 + 3600


def test_a_folder_that_is_deleted_during_a_measurement_counts_nothing(tmp_path: Path) -> None:
    """Whichever of two folders is opened first, the other one is moved away at that moment."""
    root, gone = tmp_path / "root", tmp_path / "gone"
    folders = [root / "a", root / "b"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 10)

    def move_the_other(event: str, args: tuple[object, ...]) -> None:
        if event == "os.scandir" and args[0] in map(str, folders) and not gone.exists():
            other = folders[args[0] == str(folders[0])]
            other.rename(gone)

    sys.addaudithook(move_the_other)
    assert StoreSizeMonitor(root).measure() == 10
    assert gone.exists()


def test_a_measurement_that_cannot_be_remembered_is_still_one(full: Path) -> None:
    (full / "size.json").mkdir()
    assert StoreSizeMonitor(full).measure() == 1000


@pytest.mark.parametrize(("size", "warns"), [(10**18, False), (10**18 + 1, True)])
def test_the_warning_has_both_sizes_and_the_place_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, warns: bool
) -> None:
    monkeypatch.setenv("RAMIFY_STORE_MAX_BYTES", "1e18")
    store = Store(tmp_path)
    at = msgspec.json.decode(msgspec.json.encode({"num_bytes": size, "at": 4e9}))
    (store.root / "size.json").write_bytes(msgspec.json.encode(at))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        size_of_store = StoreSizeMonitor(store.root, now=lambda: 4e9)
        size_of_store.warn_if_full()
        size_of_store.warn_if_full()
    assert len(found) == warns
    if warns:
        assert "holds 1000000000.0 GB, more than its limit of 1000000000.0 GB" in str(
            found[0].message
        )


def test_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAMIFY_STORE_MAX_BYTES", raising=False)
    assert max_store_bytes() == 20 * 1024**3
    monkeypatch.setenv("RAMIFY_STORE_MAX_BYTES", "1.5e3")
    assert max_store_bytes() == 1500


def test_a_deleted_file_gives_its_bytes_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    assert [remove_file(tmp_path / "a"), remove_file(tmp_path / "a")] == [3, 0]
    with pytest.raises(StoreError, match=f"cannot delete {tmp_path}: Is a directory"):
        remove_file(tmp_path)


class Owner:
    """Owner of flushed files that keeps the errors."""

    def __init__(self) -> None:
        self.errors: list[OSError] = []

    def handle_flush_failure(self, error: OSError) -> None:
        self.errors.append(error)


def test_requests_for_one_file_become_one_flush_and_settle_waits_for_its_own(
    tmp_path: Path,
) -> None:
    """The first flush is held until more were requested."""
    begun, goes_on = threading.Event(), threading.Event()
    flushed: list[str] = []

    def fsync(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/dev/fd/{fd}")).name)
        if len(flushed) == 1:
            begun.set()
            goes_on.wait()

    flusher, mine, other = FsyncFlusher(fsync), Owner(), Owner()
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file in files:
        file.touch()
    flusher.request_flush(files[0], mine)
    begun.wait()
    for file in (files[1], files[1], tmp_path / "deleted"):
        flusher.request_flush(file, mine)
    flusher.request_flush(files[2], other)
    settling = threading.Thread(target=flusher.wait_for_flushes, args=(mine,))
    settling.start()
    assert all(each.daemon for each in threading.enumerate() if each.name == "ramify-flusher")
    goes_on.set()
    settling.join()
    flusher.wait_for_flushes(other)
    assert sorted(flushed) == ["a", "b", "c"]
    assert mine.errors == other.errors == []


def test_an_error_of_a_flush_reaches_the_owner_of_the_file(tmp_path: Path) -> None:
    def fsync(fd: int) -> None:
        raise OSError(5, "Input/output error")

    flusher, mine, other = FsyncFlusher(fsync), Owner(), Owner()
    flusher.request_flush(tmp_path, mine)
    flusher.wait_for_flushes(mine)
    flusher.wait_for_flushes(other)
    assert [error.strerror for error in mine.errors] == ["Input/output error"]
    assert other.errors == []


def test_without_a_thread_the_owner_flushes_and_the_next_request_tries_again(
    tmp_path: Path,
) -> None:
    """As at the end of the interpreter, no thread can be started: its stack is too large."""
    flushed_by: list[str] = []
    is_flushed = threading.Event()

    def fsync(fd: int) -> None:
        flushed_by.append(threading.current_thread().name)
        is_flushed.set()

    flusher, mine = FsyncFlusher(fsync), Owner()
    size = threading.stack_size(1 << 50)
    try:
        flusher.request_flush(tmp_path, mine)
    finally:
        threading.stack_size(size)
    flusher.wait_for_flushes(mine)
    is_flushed.clear()
    flusher.request_flush(tmp_path, mine)
    is_flushed.wait(60)
    assert flushed_by == [threading.current_thread().name, "ramify-flusher"]


def test_an_idle_thread_ends_and_the_next_request_starts_another(tmp_path: Path) -> None:
    flushed_by: list[threading.Thread] = []
    is_flushed = threading.Event()

    def fsync(fd: int) -> None:
        flushed_by.append(threading.current_thread())
        is_flushed.set()

    flusher, mine = FsyncFlusher(fsync), Owner()
    flusher.request_flush(tmp_path, mine)
    is_flushed.wait(60)
    flushed_by[0].join(60)
    assert not flushed_by[0].is_alive()
    is_flushed.clear()
    flusher.request_flush(tmp_path, mine)
    is_flushed.wait(60)
    first, second = flushed_by
    assert first is not second


def test_settling_waits_for_no_other_owner(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    flushed: list[str] = []

    def fsync(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/dev/fd/{fd}")).name)
        if len(flushed) == 1:
            begun.set()
            goes_on.wait(60)

    flusher, mine, other = FsyncFlusher(fsync), Owner(), Owner()
    for name, owner in (("a", other), ("b", mine), ("c", other)):
        (tmp_path / name).touch()
        flusher.request_flush(tmp_path / name, owner)
        begun.wait(60)
    flusher.wait_for_flushes(mine)
    assert flushed == ["a", "b"]
    goes_on.set()
    flusher.wait_for_flushes(other)
    assert flushed == ["a", "b", "c"]
