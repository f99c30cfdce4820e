"""Stores runs in a folder on disk.

This module lays out the files of a run, and creates, finds, reads and deletes runs.

    ROOT/runs/RUN_ID.jsonl      a run's events, one per line, append-only  (journal.py)
    ROOT/runs/RUN_ID.review.json  labels, a note and corrected scores      (reviews.py)
    ROOT/runs/RUN_ID.writer     the process that writes it now
    ROOT/runs/RUN_ID.live       replies that are arriving, while a page follows  (live_replies.py)
    ROOT/runs/RUN_ID.damaged    the journal from before a repair           (repair.py)
    ROOT/maps/MAP_ID.jsonl      a map: a few lines for each row           (ramify/maps)
    ROOT/blobs/ab/DIGEST        contexts and long outputs, stored once     (durable_files.py)
    ROOT/index.sqlite           summaries for a listing; may be deleted  (run_summary_cache.py)
    ROOT/cache/replies.sqlite   the optional call cache                    (reply_cache.py)
    ROOT/ramify.reserve         space for the last replies, if the disk gets full

ROOT is given by the caller; the default is ``$RAMIFY_HOME``, or else the platform's folder for user
data. Only its owner can access its files.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.errors import StoreError, UnknownRun
from ramify.secret_redaction import SecretRedactor
from ramify.store.base import RunStore, check_run_id, resolve_run_id
from ramify.store.durable_files import (
    BlobStore,
    Fsync,
    FsyncFlusher,
    StoreSizeMonitor,
    make_folder,
    reserve_disk_space,
)
from ramify.store.journal import (
    FileRunJournal,
    FileStoredRun,
    checksum_chain_at_end,
    cut_torn_line,
    find_writer_process,
    follow,
    open_locked,
    run_in_use_error,
    writer_process_file,
)
from ramify.store.line_checksums import ChecksumChain
from ramify.store.reviews import HumanRunReview, read_reviews_for_listing
from ramify.store.stored_run import is_run_id
from ramify.types.event import AnyEvent
from ramify.user_folders import user_folder

if TYPE_CHECKING:
    from ramify.store.prune import StorePruner, StorePruneResult
    from ramify.store.repair import JournalCheckResult, JournalRepairResult
    from ramify.store.run_summary import RunSummary
    from ramify.store.run_summary_cache import RunSummaryCache

_STAMP = re.compile(r"\d{8}-\d{6}-")
_WRITER = ".writer"
SETTLED_NS = 2_000_000_000
"""Minimum age in nanoseconds of a folder's modification time that can be trusted. If the folder
was changed more recently, another change could follow that leaves the same modification time.
"""
_EVERY_S = 30.0
"""Seconds after which all journals are checked again even if the folder is unchanged, since another
program may have written to one without its lock.
"""


class Store(RunStore):
    """A store that keeps its runs in one folder.

    Safe for several threads and processes at once.

    Methods that take a ``run`` also accept the path of a ``.jsonl`` file.
    """

    def __init__(self, root: str | Path | None = None, *, fsync: Fsync = os.fsync) -> None:
        """Open the store in the folder ``root``, by default the user's store.

        ``fsync`` flushes an open file to disk. Tests pass the method of a ``testing.ForgetfulDisk``
        to simulate a crash.
        """
        folder = Path(root).expanduser() if root is not None else default_root()
        self.root = make_folder(folder, fsync)
        self._runs = make_folder(self.root / "runs", fsync)
        self.fsync = fsync
        self._flusher = FsyncFlusher(fsync)
        self.blobs = BlobStore(make_folder(self.root / "blobs", fsync), self._flusher)
        self._size = StoreSizeMonitor(self.root)
        self._claimed: tuple[int, frozenset[str]] = (-1, frozenset())
        """Modification time of the runs folder when it was last read, and the ids of the runs that
        were being written then."""

    def create(self, run_id: str, secrets: Mapping[str, str] | None = None) -> FileRunJournal:
        """Create the journal of a new run.

        ``secrets`` maps names to values that are redacted in the journal, in addition to the
        secrets in environment variables.
        """
        check_run_id(run_id)
        self._size.warn_if_full()
        reserve_disk_space(self.root)
        path = self._runs / f"{run_id}.jsonl"
        try:
            fd = open_locked(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise StoreError(
                f"run {run_id} already exists in {self._runs}: resume it, or use another id"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}") from error
        journal = FileRunJournal(
            path, fd, self.blobs, self._flusher, SecretRedactor(secrets), ChecksumChain()
        )
        self._flusher.request_flush(self._runs, journal.file)  # the file's name
        return journal

    def reopen(self, run: str | Path, secrets: Mapping[str, str] | None = None) -> FileRunJournal:
        """Reopen the journal of an earlier run so that the run can continue.

        An incomplete last line is cut off.
        """
        path = self.path(run)
        try:
            fd = open_locked(path, 0)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        try:
            cut_torn_line(fd)
            chain = checksum_chain_at_end(fd, path)
        except BaseException:
            writer_process_file(path).unlink(missing_ok=True)
            os.close(fd)
            raise
        return FileRunJournal(path, fd, self.blobs, self._flusher, SecretRedactor(secrets), chain)

    def check(self, run: str | Path) -> JournalCheckResult:
        """Verify the checksums of a run's journal and its stored contexts, and return the result.

        It is safe to call this while a process is writing the run.
        """
        from ramify.store.repair import check_journal

        return check_journal(self.path(run), self.blobs)

    def repair(self, run: str | Path) -> JournalRepairResult:
        """Cut a damaged journal before its first damaged line, so that the run can be resumed from
        there.

        The damaged file is kept beside it.

        Raises StoreError if nothing can be kept, and RunInUse while a process is writing the run.
        """
        from ramify.store.repair import repair_journal

        return repair_journal(self.path(run), self._flusher.fsync)

    def check_free(self, run: str | Path) -> None:
        """Raise RunInUse if a process is writing ``run`` now.

        The error names the process.
        """
        holder = find_writer_process(self.path(run))
        if holder is not None:
            raise run_in_use_error(self.path(run), str(holder))

    def path(self, run: str | Path) -> Path:
        """Return the path of the journal of a run.

        ``run`` is a run's id, the unique beginning of an id, ``"last"``, or a ``.jsonl`` file.
        """
        name = str(run)
        if name.endswith(".jsonl"):
            path = Path(name).expanduser()
            if not path.is_file():
                raise UnknownRun(f"the journal {path} does not exist")
            return path
        exact = self._runs / f"{name}.jsonl"
        if is_run_id(name) and exact.is_file():
            return exact
        return self._runs / f"{resolve_run_id(name, self.ids(), self._runs)}.jsonl"

    def lines(self, id: str, offset: int = 0) -> Iterator[bytes]:
        return (line + b"\n" for line in self.stored(id).lines(offset))

    def find(self, run: str | Path) -> str:
        return self.path(run).stem

    def stored(self, run: str | Path) -> FileStoredRun:
        return FileStoredRun(self.path(run))

    def follow(self, run: str | Path, poll_s: float = 0.1) -> AsyncIterator[AnyEvent]:
        """Yield the events of ``run`` from the first one on, and then new events as they are
        written.
        """
        return follow(self.path(run), poll_s)

    def ids(self) -> list[str]:
        return _ids_in(list(os.scandir(self._runs)))

    def runs(self, limit: int | None = None) -> list[RunSummary]:
        entries = list(os.scandir(self._runs))
        summaries = self._index().summaries(self._runs, _ids_in(entries)[:limit])
        claimed, reviewed = (_ids_of(entries, end) for end in (_WRITER, ".review.json"))
        for summary in summaries:
            if summary.id in reviewed:
                summary.review = read_reviews_for_listing(self._runs / f"{summary.id}.jsonl")[
                    summary.id
                ]
            summary.alive = (
                summary.id in claimed
                and find_writer_process(self._runs / f"{summary.id}.jsonl") is not None
            )
        return summaries

    def listing_state(self) -> object | None:
        # A writer of a journal first creates the file that has its name, and a review
        # replaces a file. So only journals with a writer can change while the folder does not.
        changed = self._runs.stat().st_mtime_ns
        if time.time_ns() - changed < SETTLED_NS:
            return None
        known, claimed = self._claimed
        if known != changed:
            claimed = frozenset(_ids_of(list(os.scandir(self._runs)), _WRITER))
            self._claimed = changed, claimed
        journals = []
        for id in sorted(claimed):
            path = self._runs / f"{id}.jsonl"
            try:
                status = path.stat()
            except FileNotFoundError:
                return None
            is_alive = find_writer_process(path) is not None
            journals.append((id, status.st_size, status.st_mtime_ns, is_alive))
        return changed, tuple(journals), time.monotonic() // _EVERY_S

    def review(self, run: str | Path) -> HumanRunReview:
        return self.stored(run).reviews_by_run().get(self.find(run), HumanRunReview())

    def write_review(self, run: str | Path, review: HumanRunReview) -> HumanRunReview:
        return self.stored(run).write_review(self.find(run), review)

    def remove(self, run: str | Path) -> int:
        """Delete a run, and the stored contexts and outputs that no other run needs.

        Returns the number of bytes freed. Raises StoreError while a process is writing the run.
        """
        path = self.path(run)
        if path.parent.resolve() != self._runs.resolve():
            raise StoreError(f"{path} is outside the store {self.root}: delete the file yourself")
        freed = self._pruner().remove(path)
        self._index().forget([path.stem])
        return freed

    def prune(
        self,
        older_than_s: float | None = None,
        keep_last: int | None = None,
        max_bytes: int | None = None,
    ) -> StorePruneResult:
        """Delete the oldest runs and evaluations, and the blobs that no remaining run needs.

        The blobs hold contexts and outputs. Returns the ids of the deleted runs and evaluations.

        The ``keep_last`` newest runs, and as many evaluations, always stay. Of the others, those
        whose last event is older than ``older_than_s`` are deleted (all of them if neither this nor
        ``max_bytes`` is given), then as many as necessary for the store to fit ``max_bytes``. Runs
        that are being written stay. Without arguments, only unreferenced blobs and leftover files
        are deleted.
        """
        removed = self._pruner().prune(self._journals(), older_than_s, keep_last, max_bytes)
        self._index().forget(removed.runs)
        return removed

    def _index(self) -> RunSummaryCache:
        from ramify.store.run_summary_cache import RunSummaryCache

        return RunSummaryCache(self.root / "index.sqlite")

    def _pruner(self) -> StorePruner:
        from ramify.store.prune import StorePruner

        return StorePruner(self.root, self._runs, self.blobs, self._size)

    def size(self, id: str | None = None) -> int:
        """Return the size in bytes of the journal of run ``id``.

        Without an id, return the size of the whole store on disk: journals, stored contexts and
        outputs, index and cache.
        """
        return self._size.measure() if id is None else self.stored(id).journal_version()[1]

    def _journals(self) -> list[Path]:
        return [self._runs / f"{id}.jsonl" for id in self.ids()]


def _ids_in(entries: Iterable[os.DirEntry[str]]) -> list[str]:
    """Return the ids of the runs whose journals are in a folder, newest first.

    The time is part of the id. For an id without a time, the file's modification time is used.
    """
    keyed = []
    for entry in entries:
        if entry.name.endswith(".jsonl"):
            try:
                keyed.append((_time_sort_key(entry), entry.name.removesuffix(".jsonl")))
            except FileNotFoundError:
                continue
    return [id for _, id in sorted(keyed, reverse=True)]


def _ids_of(entries: Iterable[os.DirEntry[str]], end: str) -> set[str]:
    """Return the ids of the runs that have a file with the suffix ``end`` in a folder."""
    return {entry.name.removesuffix(end) for entry in entries if entry.name.endswith(end)}


def default_root() -> Path:
    """Return the folder of the default store."""
    home = os.environ.get("RAMIFY_HOME")
    if home:
        return Path(home).expanduser()
    return user_folder("data")


def _time_sort_key(entry: os.DirEntry[str]) -> str:
    if _STAMP.match(entry.name):
        return entry.name
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(entry.stat().st_mtime)) + entry.name
