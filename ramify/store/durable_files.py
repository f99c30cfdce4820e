"""Files that survive crashes.

This module writes data completely or raises an error, flushes files to disk in a background thread,
and stores large values by their hash.

A failed write raises an error that names the file. The background thread keeps event loops from
waiting for the disk. The module also creates private folders, and measures and reserves the space
of a store.

    append ── flush(file) ──▶ due {file: owner} ──▶ thread: one fsync for all requests so far
    close  ── settle(owner): runs what is due, and waits for what is in progress

    blobs/ab/abcd…            the bytes whose SHA-256 is ``abcd…``, once: written to a separate file
                              and renamed into place, so a reader sees all of it or nothing

Which blobs are still needed is decided in ``prune.py``; what their bytes mean is known only to the
caller.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.logging import ComponentLogger

_log = ComponentLogger("store")

FOLDER_MODE = 0o700
FILE_MODE = 0o600
EVALUATIONS = "evaluations"
"""Folder of a store with one file per evaluation, which ``evaluate/run_evaluation.py`` writes."""
MATRIX = ".matrix"
"""Suffix of the file of a matrix of evaluations in that folder. The names of its evaluations begin
with the matrix's name; ``evaluate/evaluation_matrix.py`` writes it.
"""
TOKENIZED = "tokenized"
"""Folder of a store for the token ids of conversations; ``train/data/tokenization_cache.py`` writes
it.
"""
Bytes = bytes | bytearray | memoryview
Fsync = Callable[[int], object]
"""``os.fsync``, or a replacement for it in tests."""


def make_folder(path: Path, fsync: Fsync | None = None) -> Path:
    """Create a folder and its missing parents, accessible only to their owner.

    With ``fsync``, the new directory entries are flushed to disk.
    """
    if path.is_dir():
        return path
    if path.parent != path:
        make_folder(path.parent, fsync)
    try:
        path.mkdir(FOLDER_MODE, exist_ok=True)
        if fsync is not None:
            sync_folder(path.parent, fsync)
    except OSError as error:
        kind = StoreError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
        raise kind(
            f"cannot create the folder {path}: {error.strerror}; set RAMIFY_HOME to a writable one"
        ) from error
    return path


def write_all(fd: int, data: Bytes, path: Path) -> None:
    """Write all of ``data`` to an open file of the store, in one ``write()`` call if possible.

    Raises StoreError, which names ``path``.
    """
    try:
        written = os.write(fd, data) if data else 0
        if written < len(data):
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free some space, or set RAMIFY_HOME"
        ) from error


def sync_folder(path: Path, fsync: Fsync) -> None:
    """Flush the directory entries of a folder to disk, so that new and renamed files in it survive
    a crash.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        fsync(fd)
    finally:
        os.close(fd)


RESERVE_BYTES = 4 << 20
"""Bytes of disk space that a store reserves, so that replies that arrive once the disk is full can
still be written.
"""
_RESERVE = "ramify.reserve"


def reserve_disk_space(root: Path) -> None:
    """Reserve disk space for the store at ``root``, if enough is free.

    When the disk becomes full, the reserve is freed for replies that still arrive.
    """
    path = root / _RESERVE
    if disk_reserve_bytes(root) >= RESERVE_BYTES:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, FILE_MODE)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)
    except OSError:  # the disk is nearly full: an empty file would pass for a reserve
        release_reserve(root)


def disk_reserve_bytes(root: Path) -> int:
    """Return the size in bytes of the reserve file of the store at ``root``, or 0 if there is none.

    The file keeps disk space free for the store.
    """
    try:
        return (root / _RESERVE).stat().st_size
    except OSError:
        return 0


def release_reserve(root: Path) -> bool:
    """Free the reserved disk space of the store at ``root``.

    Returns False if there is none.
    """
    try:
        (root / _RESERVE).unlink()
    except OSError:
        return False
    return True


DEFAULT_MAX_BYTES = 20 << 30
"""Store size in bytes above which a warning is given; ``$RAMIFY_STORE_MAX_BYTES`` sets another
limit.
"""
_STALE_S = 3600.0
"""Seconds after which the size of a store is measured again."""


class _Size(msgspec.Struct):
    num_bytes: int
    at: float


class StoreSizeMonitor:
    """Measures the size of one run store, and warns if it exceeds the store's limit."""

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        """Create a monitor for the store in the folder ``root``.

        ``now`` returns the Unix time.
        """
        self._root = root
        self._now = now
        self._warned = False

    def measure(self) -> int:
        """Return the total size of the store's folder in bytes.

        The result is cached for ``warn_if_full``.
        """
        total = sum(_file_sizes(self._root)) - disk_reserve_bytes(self._root)
        data = msgspec.json.encode(_Size(total, self._now()))
        try:
            fd = os.open(
                self._root / "size.json",
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                FILE_MODE,
            )
            with os.fdopen(fd, "wb") as file:
                file.write(data)
        except OSError:
            pass  # it is only a cache: the next call measures again
        return total

    def warn_if_full(self) -> None:
        """Warn, once per store object, if the store exceeds its size limit.

        Measures at most once an hour.
        """
        if self._warned:
            return
        size = self._cached_size()
        cap = max_store_bytes()
        if size > cap:
            self._warned = True
            _log.issue_python_warning(
                f"the store {self._root} holds {size / 1e9:.1f} GB, more than its limit of "
                f"{cap / 1e9:.1f} GB: prune old runs, or set RAMIFY_STORE_MAX_BYTES",
                stacklevel=4,
            )

    def _cached_size(self) -> int:
        try:
            size = msgspec.json.decode((self._root / "size.json").read_bytes(), type=_Size)
        except (OSError, msgspec.DecodeError):
            return self.measure()
        return size.num_bytes if abs(self._now() - size.at) < _STALE_S else self.measure()


def max_store_bytes() -> int:
    """Return the size limit of a store in bytes, from the environment variable or by default.

    Raises ConfigError if the environment variable is invalid.
    """
    text = os.environ.get("RAMIFY_STORE_MAX_BYTES")
    if not text:
        return DEFAULT_MAX_BYTES
    try:
        return int(float(text))
    except ValueError:
        raise ConfigError(
            f"RAMIFY_STORE_MAX_BYTES is {text!r}: give a number of bytes, such as 20e9"
        ) from None


def _file_sizes(folder: Path) -> Iterator[int]:
    for entry in os.scandir(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _file_sizes(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue


def remove_file(path: Path) -> int:
    """Delete a file and return the number of bytes freed, or 0 if the file did not exist."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error.strerror}") from error
    return size


IDLE_S = 2.0
"""Seconds without work after which the background thread ends."""
_REST_S = 0.05
"""Minimum seconds between two flushes of a file that is written constantly. Without this pause,
flushing a thousand times per second would take more CPU time than writing.
"""


File = int | Path
"""An open file descriptor, or a path that is opened only when the file is flushed. With paths,
files that wait for their flush use no descriptors. A path may be a folder: flushing it makes sure
that its entries survive a crash.
"""


class FlushErrorHandler(Protocol):
    """Interface of an object that is notified if the background flush of a file fails.

    It is notified if a flush fails.
    """

    def handle_flush_failure(self, error: OSError) -> None:
        """Handle a failed flush, after which the written bytes may not be on disk."""
        ...


class FsyncFlusher:
    """Calls ``fsync`` on files in a background thread.

    Several requests for one file are combined into one.
    """

    def __init__(self, fsync: Fsync = os.fsync) -> None:
        self.fsync = fsync
        self._turn = threading.Condition()
        self._due: dict[File, FlushErrorHandler] = {}
        self._busy: File | None = None
        self._busy_owner: FlushErrorHandler | None = None
        self._running = False
        self._is_waiting = False
        """True while the background thread waits for work."""

    def request_flush(self, file: File, owner: FlushErrorHandler) -> None:
        """Request a flush of ``file`` in the background and return at once."""
        with self._turn:
            self._due[file] = owner
            if self._running:
                if self._is_waiting:
                    self._turn.notify_all()
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="ramify-flusher", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down: ``wait_for_flushes`` does the work
            self._running = False

    def wait_for_flushes(self, owner: FlushErrorHandler) -> None:
        """Wait until all pending flushes of the files of ``owner``, such as a journal, are done."""
        with self._turn:
            mine = [file for file, other in self._due.items() if other is owner]
            for file in mine:
                del self._due[file]
            while self._busy_owner is owner:
                self._turn.wait()
        # Flushed here and not by the background thread, which may be pausing or not running.
        for file in mine:
            self._sync(file, owner)

    def _run(self) -> None:
        while self._next():
            file, owner = self._busy, self._busy_owner
            assert file is not None
            assert owner is not None
            self._sync(file, owner)
            with self._turn:
                self._busy = self._busy_owner = None
                self._turn.notify_all()
                has_others = bool(self._due.keys() - {file})
            if not has_others:
                time.sleep(_REST_S)

    def _next(self) -> bool:
        """Wait for a file that must be flushed, and take the one that was requested first.

        Returns False if nothing was requested for ``IDLE_S`` seconds, after which the thread ends.
        """
        with self._turn:
            self._is_waiting = True
            has_work = self._turn.wait_for(lambda: bool(self._due), IDLE_S)
            self._is_waiting = False
            if not has_work:
                self._running = False
                return False
            self._busy = next(iter(self._due))
            self._busy_owner = self._due.pop(self._busy)
            return True

    def _sync(self, file: File, owner: FlushErrorHandler) -> None:
        try:
            if isinstance(file, int):
                self.fsync(file)
                return
            fd = os.open(file, os.O_RDONLY)
            try:
                self.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return  # deleted meanwhile: nothing to flush
        except OSError as error:
            owner.handle_flush_failure(error)


_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """Stores large values (blobs) once each, in files named by their SHA-256 hash.

    Safe for several threads and processes at once.
    """

    def __init__(self, root: Path, flusher: FsyncFlusher) -> None:
        self.root = root
        self._flusher = flusher

    def path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} is not a blob's name: expected 64 hexadecimal digits")
        return self.root / digest[:2] / digest

    def put(self, data: Bytes, digest: str | None = None) -> str:
        """Store ``data`` and return its SHA-256 hash.

        A caller that already knows the hash passes it as ``digest`` to save time.
        """
        import hashlib

        data = memoryview(data).cast("B")
        digest = digest or hashlib.sha256(data).hexdigest()
        self.put_pieces([data], len(data), digest)
        return digest

    def put_pieces(self, pieces: Iterable[Bytes], num_bytes: int, digest: str) -> None:
        """Store a blob that the caller provides in pieces, under its SHA-256 hash."""
        path = self.path(digest)
        make_folder(path.parent, self._flusher.fsync)
        # A new file needs no lock: it is recent, and recent blobs are not deleted.
        with self._hold(fcntl.LOCK_SH):
            if _touch_if_complete(path, num_bytes):
                return
        temporary = path.with_name(f".{digest[:16]}.{os.getpid()}.{os.urandom(6).hex()}")
        try:
            _write(temporary, pieces)
            # Not flushed first, since that takes milliseconds: ``get`` finds what a crash damaged.
            _rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._flusher.request_flush(path, self)
        self._flusher.request_flush(path.parent, self)

    def get(self, digest: str) -> bytes:
        """Return the bytes with this SHA-256 hash, after verifying the hash."""
        import hashlib

        with self.memory_map(digest) as view:
            data = bytes(view)
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(
                f"blob {self.path(digest)} is damaged: its bytes do not have the digest that names "
                "it"
            )
        return data

    @contextmanager
    def memory_map(self, digest: str) -> Iterator[memoryview]:
        """Map a blob's file into memory, read-only, until the ``with`` block ends.

        Nothing is copied, and the hash is not verified.
        """
        path = self.path(digest)
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise StoreError(
                f"blob {digest} is not in {self.root}: deleted, or from another store"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot read the blob {path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_size == 0:
                yield memoryview(b"")
                return
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                yield view
        finally:
            os.close(fd)

    def handle_flush_failure(self, error: OSError) -> None:
        """Ignore a failed flush.

        A blob that did not reach the disk is reported as damaged when it is read.
        """

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).exists()

    def list_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the path and attributes of every blob's file.

        Temporary files that a killed writer left behind are included; their names begin with a dot.
        """
        if not self.root.is_dir():
            return
        for folder in os.scandir(self.root):
            if folder.is_dir(follow_symlinks=False):
                for entry in os.scandir(folder.path):
                    try:
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue

    def delete(self, digest: str, spare_after: float) -> int:
        """Delete a blob, unless it was stored again recently, and return the number of bytes freed.

        The blob is kept if it was stored after the Unix time ``spare_after``.
        """
        path = self.path(digest)
        with self._hold(fcntl.LOCK_EX):
            try:
                stat = path.stat()
                if stat.st_mtime > spare_after:
                    return 0
                path.unlink()
            except FileNotFoundError:
                return 0
            return stat.st_size

    @contextmanager
    def _hold(self, how: int) -> Iterator[None]:
        """Hold the lock on the store's blobs until the ``with`` block ends.

        Other processes respect the lock. It prevents one process from deleting a blob while another
        skips writing it because it exists.
        """
        # Opened each time: threads that share an open file also share its lock.
        lock = self.root / ".lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError as error:
            raise StoreError(
                f"cannot write {lock}: {error.strerror}; free some space, or set RAMIFY_HOME"
            ) from error
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


def _touch_if_complete(path: Path, size: int) -> bool:
    """Return True if a blob's complete file exists, after marking it as just stored.

    The blob then counts as just stored.
    """
    try:
        # A crash of the machine may have left an incomplete file, which is then replaced.
        if path.stat().st_size != size:
            return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _write(path: Path, pieces: Iterable[Bytes]) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except OSError as error:
        raise StoreError(f"cannot write the blob {path}: {error.strerror}") from error
    try:
        for piece in pieces:
            write_all(fd, piece, path)
    finally:
        os.close(fd)


def _rename(path: Path, to: Path) -> None:
    try:
        os.replace(path, to)
    except OSError as error:
        raise StoreError(f"cannot write the blob {to}: {error.strerror}") from error
