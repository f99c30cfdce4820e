"""Large values stored by content: ``blobs/ab/abcd…`` holds the bytes whose SHA-256 is ``abcd…``,
once.

A blob is written to a separate file and renamed into place, so a reader sees all of it or nothing.

Not here: which blobs are still needed (see ``prune.py``) and what the bytes mean (the caller
decides).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ramify.errors import StoreError
from ramify.store.private_files import FILE_MODE, Bytes, FsyncFlusher, make_folder, write_all

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """The blobs of one store. Safe for several threads and processes at once."""

    def __init__(self, root: Path, flusher: FsyncFlusher) -> None:
        self.root = root
        self._flusher = flusher

    def path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} is not a blob's name: expected 64 hexadecimal digits")
        return self.root / digest[:2] / digest

    def put(self, data: Bytes, digest: str | None = None) -> str:
        """Store ``data`` and return its digest. Pass ``digest`` to skip the hashing if it is
        known."""
        data = memoryview(data).cast("B")
        digest = digest or hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        make_folder(path.parent)
        with self._hold(fcntl.LOCK_SH):
            if _refresh(path, len(data)):
                return digest
        temporary = path.with_name(f".{digest[:16]}.{os.getpid()}.{os.urandom(6).hex()}")
        try:
            _write(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._flusher.flush(path, self)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes, verified against their digest."""
        with self.map(digest) as view:
            data = bytes(view)
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(
                f"blob {self.path(digest)} is damaged: its bytes do not have the digest that names "
                "it"
            )
        return data

    @contextmanager
    def map(self, digest: str) -> Iterator[memoryview]:
        """The bytes as a read-only view of the file, without a copy or verification."""
        path = self.path(digest)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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

    def flush_failed(self, error: OSError) -> None:
        """Nothing to do: a blob that did not reach the disk is found damaged when it is read, and
        its run can still be shown."""

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).exists()

    def list(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every file, including those that a killed writer left behind (their names begin with a
        dot)."""
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
        """Delete the blob unless it was put again after ``spare_after`` (Unix time); returns the
        bytes freed."""
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
        """Lock that separates "it exists, so I do not write it" from "it is not needed, so I delete
        it"."""
        lock = self.root / ".lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise StoreError(
                f"cannot write {lock}: {error.strerror}; free some space, or set RAMIFY_HOME"
            ) from error
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


def _refresh(path: Path, size: int) -> bool:
    """Whether the complete blob exists; if so, its time is renewed as if it had just been put."""
    try:
        if path.stat().st_size != size:
            return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _write(path: Path, data: memoryview) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise StoreError(f"cannot write the blob {path}: {error.strerror}") from error
    try:
        write_all(fd, data, path)
    finally:
        os.close(fd)
