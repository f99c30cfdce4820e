"""Writing a run's journal: one writer, and one line and one ``write()`` per event.

The lock is ``flock`` on the journal itself, so that the system releases it when the writer dies;
``RUN_ID.writer`` next to it only names the writer. The store's flusher flushes replies to disk,
since they are what was paid for.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

import msgspec

from ramify.errors import RunInUse, StoreError
from ramify.secrets import SecretRedactor
from ramify.store.blobs import BlobStore
from ramify.store.event_line import encode_line
from ramify.store.flusher import FsyncFlusher
from ramify.store.private_files import FILE_MODE, Bytes, write_all
from ramify.types.event import AnyEvent, ReplyReceived

_PATIENCE_S = 0.3
"""How long to try for the lock: a reader that checks for a live writer holds it for an instant."""


class JournalWriter(msgspec.Struct, frozen=True):
    """The process that writes a journal."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> JournalWriter:
    """This process as a writer."""
    return JournalWriter(os.getpid(), socket.gethostname())


class Journal:
    """A journal open for writing. Appends events to ``path``; made by ``store.create`` and
    ``store.reopen``. Safe for several threads."""

    def __init__(
        self, path: Path, fd: int, blobs: BlobStore, flusher: FsyncFlusher, secrets: SecretRedactor
    ) -> None:
        self.id = path.stem
        self.path = path
        self._fd = fd
        self._blobs = blobs
        self._flusher = flusher
        self._secrets = secrets
        self._lock = threading.Lock()
        self._size = os.fstat(fd).st_size
        self._failure: OSError | None = None
        self._gap: StoreError | None = None
        """Why an event was not written; none is written after it."""
        self._closed = False

    def append(self, event: AnyEvent) -> None:
        """Write ``event``. It then survives the death of this process, and a reply soon also that
        of the machine.

        Raises StoreError if it cannot be written, and for every later event: the journal then ends
        like that of a killed run, which can be resumed.
        """
        line = encode_line(event, self._secrets)
        with self._lock:
            self._check()
            try:
                write_all(self._fd, line, self.path)
            except StoreError as error:
                # A smaller event might still fit, but a journal with a gap cannot be resumed.
                self._gap = error
                # Remove a partial line, which the next event would otherwise continue.
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(line)
            if type(event) is ReplyReceived:
                self._flusher.flush(self._fd, self)

    def put_blob(self, data: Bytes, digest: str | None = None) -> str:
        """Store ``data`` by content and return its digest, for a later event to refer to."""
        return self._blobs.put(data, digest)

    def close(self) -> None:
        """Flush everything to disk and release the lock. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._flusher.flush(self._fd, self)
        self._flusher.settle(self._blobs)
        self._flusher.settle(self)
        writer_file(self.path).unlink(missing_ok=True)
        # Unlock explicitly: a process forked from this one may still hold the descriptor.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        if self._failure is not None:
            raise _not_on_disk(self.path, self._failure)

    def flush_failed(self, error: OSError) -> None:
        self._failure = error

    def _check(self) -> None:
        if self._closed:
            raise StoreError(
                f"journal {self.path} is closed: open it again with store.reopen({self.id!r})"
            )
        if self._gap is not None:
            raise StoreError(str(self._gap))
        if self._failure is not None:
            raise _not_on_disk(self.path, self._failure)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def writer_file(journal: Path) -> Path:
    """The file next to a journal that names its writer."""
    return journal.with_suffix(".writer")


def open_locked(path: Path, flags: int) -> int:
    """A descriptor that appends to ``path`` and holds its writer's lock."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, FILE_MODE)
    try:
        _lock(fd, path)
        if os.fstat(fd).st_nlink > 0:
            me = msgspec.json.encode(this_process())
            writer_file(path).write_bytes(me)
            writer_file(path).chmod(FILE_MODE)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)  # pruned between opening and locking: the run's file is another one now
    return open_locked(path, flags)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = _named(path) or "another process"
                raise in_use(path, str(holder)) from None
        time.sleep(0.01)


def in_use(path: Path, holder: str) -> RunInUse:
    """The error for a journal that another process writes."""
    return RunInUse(f"run {path.stem} is being written by {holder}: stop that one first")


def writer(path: Path) -> JournalWriter | None:
    """The process that is writing the journal at ``path`` now; None if there is none, or it was
    killed."""
    named = _named(path)
    if named is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return named
    finally:
        os.close(fd)
    return None


def _named(path: Path) -> JournalWriter | None:
    try:
        return msgspec.json.decode(writer_file(path).read_bytes(), type=JournalWriter)
    except (OSError, msgspec.DecodeError):
        return None


def cut_torn_line(fd: int) -> int:
    """Truncate a journal after its last complete line; returns the bytes cut."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return size - end


def _not_on_disk(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} may not be on the disk: {error.strerror}; free some space, or set RAMIFY_HOME"
    )
