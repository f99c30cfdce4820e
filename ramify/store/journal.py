"""Reads and writes the journal of a run, a file with one event per line.

Only one process can write a journal at a time. It can be read even if it is incomplete or damaged.

The writer holds a lock (``flock``) on the journal itself, so the system releases it if the writer
dies. The file ``RUN_ID.writer`` beside the journal only names the writer. Replies are also flushed
to disk by a background thread of the store, since they have been paid for.

Each line is encoded by a single call of the JSON encoder and carries a checksum that also covers
the line before it (see ``line_checksums.py``). A slower path handles secrets and values that JSON
or UTF-8 cannot represent: lone surrogates become ``\\udc80`` escapes, an infinite number becomes
the largest finite one, and a secret becomes ``«redacted NAME»``. A last line without a newline is
incomplete and is skipped. Anything else that cannot be read, or was changed, raises an error that
names the file and the line.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from ramify.errors import RunInUse, StoreError
from ramify.secret_redaction import SecretRedactor
from ramify.store.durable_files import (
    FILE_MODE,
    BlobStore,
    FsyncFlusher,
    release_reserve,
    write_all,
)
from ramify.store.line_checksums import ChecksumChain, has_checksum
from ramify.store.live_replies import LiveReplyFileWriter
from ramify.store.reviews import HumanRunReview, read_reviews, write_review
from ramify.store.stored_run import StoredRun, is_run_id
from ramify.types.event import AnyEvent, ReplyReceived, RunEnded, RunStarted, TrajectoryBuilder
from ramify.types.trajectory import SCHEMA_VERSION, Stop

_PATIENCE_S = 0.3
"""Seconds to keep trying for the lock. A reader that checks whether a journal has a live writer
holds the lock very briefly.
"""


class WriterProcessId(msgspec.Struct, frozen=True):
    """Identifies the process that is writing a journal, by its process id and its host."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> WriterProcessId:
    """Return the process id and host name that identify this process as the writer of a journal."""
    return WriterProcessId(os.getpid(), socket.gethostname())


class ChecksummedLineWriter:
    """Appends lines with checksums to a locked file in the folder of a store.

    Safe for several threads.
    """

    def __init__(self, path: Path, fd: int, flusher: FsyncFlusher, chain: ChecksumChain) -> None:
        """Create a writer for the file that ``open_locked`` has opened as ``fd``.

        ``chain`` holds the checksum of the file's last line. ``path`` is in the folder of a store.
        """
        self.path = path
        self.size = os.fstat(fd).st_size
        """Size of the file in bytes, including what earlier writers wrote."""
        self.trouble: StoreError | None = None
        """The error that occurred when the disk was full and the reserved disk space had to be
        used, after which the run should end soon; otherwise None."""
        self._fd = fd
        self._flusher = flusher
        self._chain = chain
        self._lock = threading.Lock()
        self._failure: OSError | None = None
        self._gap: StoreError | None = None
        """The error that kept a line from being written, or None. Later lines are then rejected
        unless ``append`` allows a gap."""
        self._closed = False

    def append(self, line: bytes, *, flushes: bool = False, allow_gap: bool = False) -> int:
        """Append one line of JSON with its newline, and return its byte offset in the file.

        The line survives the death of this process. With ``flushes=True``, it is also flushed to
        disk in the background, so that it survives a crash of the machine.

        If the disk is full, the line is written to space that the store has reserved, and
        ``trouble`` is set. Raises StoreError if the line cannot be written. Unless ``allow_gap``
        is set, every later call then raises, too, so the file ends like that of a killed process.
        """
        with self._lock:
            self._check(allow_gap=allow_gap)
            line, crc = self._chain.add_checksum(line)
            try:
                self._write(line)
            except StoreError as error:
                # A smaller line might still fit, but what has a gap cannot be continued.
                self._gap = error
                raise
            offset, self.size = self.size, self.size + len(line)
            self._chain.crc = crc
            if flushes:
                self._flusher.request_flush(self._fd, self)
            return offset

    def _write(self, line: bytes) -> None:
        """Write a line to the journal, and use the reserved disk space if the disk is full.

        If the disk is full, free the store's reserved space and try again.
        """
        try:
            write_all(self._fd, line, self.path)
        except StoreError as error:
            # Remove a partial line, which the next one would otherwise continue.
            os.ftruncate(self._fd, self.size)
            if self.trouble is not None or not release_reserve(self.path.parent.parent):
                raise
            self.trouble = error
            self._write(line)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return at most ``num_bytes`` bytes of the file, starting at byte ``offset``."""
        return os.pread(self._fd, num_bytes, offset)

    def close(self) -> None:
        """Flush everything to disk, and release the lock.

        Idempotent.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._flusher.request_flush(self._fd, self)
        self._flusher.wait_for_flushes(self)
        # Before the lock is released, or this could delete the file of the next writer.
        writer_process_file(self.path).unlink(missing_ok=True)
        # Unlock explicitly: a process forked from this one may still hold the descriptor.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        if self._failure is not None:
            raise _not_on_disk(self.path, self._failure)

    def handle_flush_failure(self, error: OSError) -> None:
        self._failure = error

    def _check(self, *, allow_gap: bool) -> None:
        if self._closed:
            raise StoreError(
                f"journal {self.path} is closed: open it again with "
                f"store.reopen({self.path.stem!r})"
            )
        if self._gap is not None and not allow_gap:
            raise StoreError(str(self._gap))
        if self._failure is not None:
            raise _not_on_disk(self.path, self._failure)


class FileRunJournal:
    """The journal of one run in a file, open for writing.

    ``Store.create`` and ``Store.reopen`` create it. Safe for several threads.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        blobs: BlobStore,
        flusher: FsyncFlusher,
        secrets: SecretRedactor,
        chain: ChecksumChain,
    ) -> None:
        """Create a journal from the open, locked file ``fd`` at ``path``.

        ``chain`` holds the checksum of its last line.
        """
        self.id = path.stem
        self.path = path
        self.file = ChecksummedLineWriter(path, fd, flusher, chain)
        self._blobs = blobs
        self._flusher = flusher
        self._secrets = secrets

    @property
    def is_empty(self) -> bool:
        """True if the journal has no events yet."""
        return self.file.size == 0

    @property
    def trouble(self) -> StoreError | None:
        """The error that should make the run end soon because the disk is full, or None.

        Otherwise None.
        """
        return self.file.trouble

    def append(self, event: AnyEvent) -> None:
        """Append ``event`` to the journal.

        It survives the death of this process, and a reply soon also survives a machine crash.

        If the disk is full, the event is written to space that the store has reserved, and
        ``trouble`` is set. Raises StoreError if the event cannot be written. Every later call then
        raises, too, so the journal ends like that of a killed run, which can be resumed.
        """
        # The end of a suspended run leaves no gap: what is missing is done again.
        allow_gap = isinstance(event, RunEnded) and event.stop is Stop.SUSPENDED
        line = encode_line(event, self._secrets)
        self.file.append(line, flushes=type(event) is ReplyReceived, allow_gap=allow_gap)

    def close(self) -> None:
        """Flush everything to disk, and release the lock.

        Idempotent.
        """
        self._flusher.wait_for_flushes(self._blobs)
        self.file.close()

    def live_text(self) -> LiveReplyFileWriter:
        """Return the writer of the live file, which holds the replies that are still arriving.

        The file is kept beside the journal.
        """
        return LiveReplyFileWriter(self.path, self._secrets)

    def __enter__(self) -> FileRunJournal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def writer_process_file(journal: Path) -> Path:
    """Return the path of the file beside a journal that names its writing process."""
    return journal.with_suffix(".writer")


def open_locked(path: Path, flags: int) -> int:
    """Open the journal at ``path`` for appending, lock it against other writers, and return its
    file descriptor.

    Raises RunInUse if another process is writing the journal.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | flags, FILE_MODE)
    try:
        _lock(fd, path)
        if _is_at(path, fd):
            me = msgspec.json.encode(this_process())
            writer_process_file(path).write_bytes(me)
            writer_process_file(path).chmod(FILE_MODE)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)  # deleted or repaired between opening and locking: the run's file is another one
    return open_locked(path, flags)


def _is_at(path: Path, fd: int) -> bool:
    """Return True if ``fd`` is still the file at ``path`` and the file has not been replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = _read_writer(path) or "another process"
                raise run_in_use_error(path, str(holder)) from None
        time.sleep(0.01)


def run_in_use_error(path: Path, holder: str) -> RunInUse:
    """Return the error for a run whose journal another process is already writing."""
    return RunInUse(f"run {path.stem} is being written by {holder}: stop that one first")


def find_writer_process(path: Path) -> WriterProcessId | None:
    """Return the live process that is writing the journal at ``path``, or None."""
    named = _read_writer(path)
    if named is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # A live writer holds the exclusive lock, and the system releases it if the writer dies.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return named
    finally:
        os.close(fd)
    return None


def _read_writer(path: Path) -> WriterProcessId | None:
    try:
        return msgspec.json.decode(writer_process_file(path).read_bytes(), type=WriterProcessId)
    except (OSError, msgspec.DecodeError):
        return None


def cut_torn_line(fd: int) -> None:
    """Truncate a journal after its last complete line.

    A killed writer may have left half a line.
    """
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


def checksum_chain_at_end(fd: int, path: Path) -> ChecksumChain:
    """Return the checksum state after a journal's last line, so that more lines can be appended.

    The last line must be complete. Raises StoreError if a line lacks its checksum.
    """
    size = os.fstat(fd).st_size
    chain, tail = ChecksumChain(), os.pread(fd, 64, max(0, size - 64))[:-1]
    if has_checksum(tail):
        chain.advance_past_line(tail)
        return chain
    # In a journal of an earlier version: the next checksum also covers all of its lines.
    for number, line in enumerate(lines(path), start=1):
        problem = chain.damage_reason(line)
        if problem and not has_checksum(line):
            raise damaged_line_error(FileStoredRun(path), number, problem)
        chain.advance_past_line(line)
    return chain


def _not_on_disk(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} may not be on the disk: {error.strerror}; free some space, or set RAMIFY_HOME"
    )


_encoder = msgspec.json.Encoder()


def encode_line(event: msgspec.Struct, secrets: SecretRedactor) -> bytes:
    """Encode ``event`` as a line of JSON with a newline.

    Secrets are redacted.
    """
    # The encoder would write null, which cannot be read as a log-probability.
    if (
        type(event) is ReplyReceived
        and event.reply.logprobs
        and not math.isfinite(sum(event.reply.logprobs))
    ):
        return _plain_line(event, secrets)
    try:
        line = _encoder.encode(event)
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        return _plain_line(event, secrets, error)
    return _plain_line(event, secrets) if secrets.contains_secret(line) else line + b"\n"


def _plain_line(
    event: msgspec.Struct, secrets: SecretRedactor, cause: Exception | None = None
) -> bytes:
    try:
        plain = msgspec.to_builtins(event)
        # A session may return any value, but log-probabilities must be numbers.
        may_be_nan = type(event) is not ReplyReceived
        return (
            _encoder.encode(
                {key: _clean(value, secrets, may_be_nan) for key, value in plain.items()}
            )
            + b"\n"
        )
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        raise StoreError(
            f"a {event.__struct_config__.tag} event cannot be written as JSON: {cause or error}; "
            "give it plain values"
        ) from error


def _clean(value: Any, secrets: SecretRedactor, may_be_nan: bool) -> Any:
    match value:
        case str():
            return secrets.redact(value.encode("utf-8", "backslashreplace").decode())
        case float() if math.isnan(value):
            if may_be_nan:
                return None
            raise TypeError("a number in it is NaN")
        case float() if math.isinf(value):
            return math.copysign(sys.float_info.max, value)
        case dict():
            return {
                _clean(key, secrets, may_be_nan): _clean(item, secrets, may_be_nan)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_clean(item, secrets, may_be_nan) for item in value]
        case _:
            return value


_BLOCK_BYTES = 1 << 20
_MANY_BYTES = 1 << 18
_RETRIES = 3
"""Number of times that a follower retries an unreadable line while the writer is alive."""


@functools.cache
def _decoder() -> msgspec.json.Decoder[AnyEvent]:
    """Return the decoder that turns lines of a journal into events.

    It is created on first use, because that takes two milliseconds.
    """
    return msgspec.json.Decoder(AnyEvent)


CANNOT_DECODE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Version(msgspec.Struct):
    schema_version: int = 0


def lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the complete lines of a journal from byte ``offset`` on, without their newlines.

    Raises StoreError if the file cannot be read.
    """
    try:
        with open(path, "rb", buffering=_BLOCK_BYTES) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line[:-1]
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def line_blocks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield a journal's complete lines from byte ``offset`` on, in blocks of many lines.

    The lines keep their newlines. Decoding a block is faster than decoding single lines. Raises
    StoreError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while block := file.read(_MANY_BYTES) + file.readline():
                complete = block[: block.rfind(b"\n") + 1]
                if complete:
                    yield complete
                if len(complete) < len(block):
                    return  # the rest of this line is not written yet
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def read_events(run: StoredRun) -> Iterator[AnyEvent]:
    """Yield the events of ``run`` in the order in which they were recorded.

    Raises StoreError at the first damaged line.
    """
    chain, fold, number = ChecksumChain(), TrajectoryBuilder(), 0
    for block in run.line_blocks():
        lines = block[:-1].split(b"\n")
        for line, decoded in zip(lines, _decode_block(block, len(lines)), strict=True):
            number += 1
            if decoded is None or type(decoded) is RunStarted:
                event = decode_line(line, run, number, chain)
            elif problem := chain.check_and_advance(line):
                raise damaged_line_error(run, number, problem)
            else:
                event = decoded
            if not chain.is_checked:  # then only its sense shows that a line is missing before it
                try:
                    fold.apply(event)
                except (KeyError, IndexError) as error:
                    raise damaged_line_error(run, number, MISFIT) from error
            yield event


def _decode_block(block: bytes, num_lines: int) -> Iterable[AnyEvent | None]:
    """Decode a block of journal lines in one step, which is faster than line by line.

    If any line is damaged, return None for every line of the block.
    """
    with contextlib.suppress(*CANNOT_DECODE):
        events: list[AnyEvent] = _decoder().decode_lines(block)
        if len(events) == num_lines:  # it skips empty lines, which are damaged
            return events
    return itertools.repeat(None, num_lines)


class FileStoredRun(NamedTuple):
    """A run that is read from its journal file.

    Implements ``StoredRun``.

    For reading and writing reviews, the path may also be that of a file of trajectories.
    """

    path: Path

    @property
    def id(self) -> str:
        return self.path.stem

    def __str__(self) -> str:
        return str(self.path)

    def journal_version(self) -> tuple[int, int]:
        """Return the journal file's inode number and its size in bytes."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from error
        return stat.st_ino, stat.st_size

    def has_active_writer(self) -> bool:
        return find_writer_process(self.path) is not None

    def lines(self, offset: int = 0) -> Iterator[bytes]:
        return lines(self.path, offset)

    def line_blocks(self, offset: int = 0) -> Iterator[bytes]:
        return line_blocks(self.path, offset)

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                for offset in offsets:
                    file.seek(offset)
                    yield file.readline()[:-1]
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from error

    def blob(self, digest: str) -> bytes:
        path = self.path.parent.parent / "blobs" / digest[:2] / digest
        try:
            return path.read_bytes()
        except OSError as error:
            raise StoreError(f"blob {digest[:12]}… is not in the store: {error.strerror}") from None

    def is_run_in_store(self, id: str) -> bool:
        return is_run_id(id) and (self.path.parent / f"{id}.jsonl").is_file()

    def reviews_by_run(self) -> dict[str, HumanRunReview]:
        return read_reviews(self.path)

    def write_review(self, id: str, review: HumanRunReview) -> HumanRunReview:
        return write_review(self.path, id, review)

    def damaged_line_advice(self, number: int) -> str:
        if number == 1:
            return f"{NOTHING_KEPT}: delete it with `ramify runs rm {self.id}`"
        return f"the events before it can be read, and `ramify runs repair {self.id}` keeps them"


MISFIT = "it does not fit the lines before it, some of which must be missing"


def damaged_line_error(run: StoredRun, number: int, why: object) -> StoreError:
    """Return the error to raise for a damaged line in a journal."""
    return StoreError(f"{run}, line {number} is damaged: {why}; {run.damaged_line_advice(number)}")


NOTHING_KEPT = "it says what the run is about, so nothing can be kept"
"""Text that says why a journal with a damaged first line cannot be repaired. It is part of error
messages and advice.
"""


def decode_line(
    line: bytes, run: StoredRun, number: int, chain: ChecksumChain | None = None
) -> AnyEvent:
    """Decode one line of ``run`` and return its event.

    Raises StoreError, which names the run and the line.

    If ``chain`` is given, the checksum of the line is verified, and the chain advances past the
    line.
    """
    problem = "" if chain is None else chain.damage_reason(line)
    if problem:
        raise damaged_line_error(run, number, problem)
    if line.startswith(b'{"type":"RunStarted"'):
        check_version(line, run)
    try:
        event = _decoder().decode(line)
    except CANNOT_DECODE as error:
        raise damaged_line_error(run, number, error) from error
    if chain is not None:
        chain.advance_past_line(line)
    return event


def check_version(line: bytes, run: StoredRun) -> None:
    """Raise StoreError if a newer version of Ramify wrote the run.

    ``line`` is the first line of its journal.
    """
    try:
        version = msgspec.json.decode(line, type=_Version).schema_version
    except (msgspec.DecodeError, RecursionError):
        return  # decoding the whole line gives a better error
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{run} was written by a newer Ramify (schema {version}; this one reads up to "
            f"{SCHEMA_VERSION}): "
            "pip install -U ramify"
        )


async def follow(path: Path, poll_s: float) -> AsyncIterator[AnyEvent]:
    """Yield all events of a journal, and then each new event as it arrives.

    Ends once everything is read and the writing process has exited.

    The writer of a conversation stays alive between two questions, so following continues. An
    unreadable line is retried a few times, in case it was just being written. Raises StoreError if
    it stays unreadable, or if the journal was replaced by another file.
    """
    import asyncio  # slow to import, and only used here

    offset, number, failures, inode, chain = 0, 0, 0, 0, ChecksumChain()
    while True:
        alive = find_writer_process(path) is not None  # first: its last lines are still read below
        try:
            inode = _same_file(path, inode, offset)
            for line in lines(path, offset):
                event = decode_line(line, FileStoredRun(path), number + 1, chain)
                offset, number, failures = offset + len(line) + 1, number + 1, 0
                yield event
        except StoreError:
            failures += 1
            if not alive or failures > _RETRIES:
                raise
        else:
            if not alive:
                return
        await asyncio.sleep(poll_s)


def _same_file(path: Path, inode: int, offset: int) -> int:
    """Check that a journal was neither replaced nor truncated, and return its inode number.

    Raises StoreError if the journal was replaced, so that the number differs from ``inode``, or
    truncated, so that it is shorter than ``offset``. An ``inode`` of 0 accepts any number.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    if inode not in (0, stat.st_ino) or stat.st_size < offset:
        raise StoreError(
            f"{path} was truncated or replaced while being followed: follow it again from the "
            "beginning"
        )
    return stat.st_ino
