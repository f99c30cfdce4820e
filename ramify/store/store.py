"""Runs on disk: their location, and how they are created, found, read and deleted.

    ROOT/runs/RUN_ID.jsonl      a run's events, one per line, append-only  (journal.py)
    ROOT/runs/RUN_ID.review.json  labels, a note and corrected scores      (reviews.py)
    ROOT/runs/RUN_ID.writer     the process that writes it now
    ROOT/runs/RUN_ID.live       replies that are arriving, while a page follows  (live_text.py)
    ROOT/runs/RUN_ID.damaged    the journal from before a repair           (repair.py)
    ROOT/blobs/ab/DIGEST        contexts and long outputs, stored once     (private_files.py)
    ROOT/index.sqlite           summaries for a listing; may be deleted
    ROOT/cache/replies.sqlite   the optional call cache                    (call_cache.py)
    ROOT/ramify.reserve         space for the last replies, if the disk gets full

ROOT is the argument, otherwise ``$RAMIFY_HOME``, otherwise the platform's folder for user data. All
of it is accessible by its owner alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ramify.errors import StoreError, UnknownRun
from ramify.secrets import SecretRedactor
from ramify.store.base import RunStore, check_run_id, id_of, is_run_id
from ramify.store.journal import (
    CANNOT_DECODE,
    Journal,
    chain_at_end,
    cut_torn_line,
    damaged,
    follow,
    in_use,
    lines,
    open_locked,
    read_events,
    writer,
    writer_file,
)
from ramify.store.line_checksums import ChecksumChain
from ramify.store.private_files import (
    BlobStore,
    Fsync,
    FsyncFlusher,
    StoreSize,
    keep_reserve,
    make_folder,
)
from ramify.store.prune import PruneResult, StorePruner
from ramify.store.repair import JournalCheck, JournalRepair, check_journal, repair_journal
from ramify.store.reviews import RunReview, listed_reviews, read_reviews, write_review
from ramify.store.short_events import (
    AnyShortEvent,
    ShortCallStart,
    ShortCell,
    ShortReply,
    ShortRequest,
    short_event,
)
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Usage
from ramify.types.trajectory import Stop, as_text, cut

if TYPE_CHECKING:
    import sqlite3

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs "
    "(id TEXT PRIMARY KEY, size INTEGER, changed INTEGER, summary BLOB)"
)
PATIENCE_S = 2.0
"""How long to wait for another process that writes the index before reading the journals
instead."""
_VERSION = 4
"""Version of the summaries; an index with another version is rebuilt."""


class RunSummary(msgspec.Struct, omit_defaults=True):
    """What a listing shows of one run."""

    id: str
    question: str = ""
    """The first question of a conversation."""
    model: str = ""
    """Model of the root call."""
    started_at: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    """From the start to the last event."""
    num_questions: int = 0
    num_calls: int = 0
    """Calls in the tree, including the root."""
    depth: int = 0
    usage: Usage = Usage()
    cost: float | None = None
    """Dollars; None if no model had a price."""
    stop: Stop | None = None
    """None while the run is being written, and if it was killed."""
    num_bytes: int = 0
    """Size of the journal, without blobs."""
    alive: bool = False
    """Whether a process is writing it now."""
    problem: str | None = None
    """Why the journal could not be read."""
    rewards: dict[str, float] = {}
    """Rewards of the whole run, if it was scored."""
    answer: str | None = None
    """Beginning of the answer; None if there is none."""
    reason: str = ""
    """One sentence on why the run ended; empty for a final answer."""
    root_turns: int = 0
    """Turns of the root call of the last question."""
    task: str = ""
    num_files: int = 0
    """Files that the context of the first question refers to instead of containing them."""
    review: RunReview | None = None
    """Labels, note and corrected scores; None if the run has none."""


MAX_ANSWER = 200
"""Characters of an answer in a listing."""


def summarise(path: Path) -> RunSummary:
    """Read the journal at ``path`` for its summary: the same numbers as ``TrajectoryFold``, several
    times faster."""
    summary, number, chain = RunSummary(path.stem), 0, ChecksumChain()
    try:
        for line in lines(path):
            number += 1
            if problem := chain.problem(line):
                raise damaged(path, number, problem)
            chain.advance(line)
            _add(summary, short_event(line, path))
            summary.num_bytes += len(line) + 1
    except CANNOT_DECODE as error:
        summary.problem = str(damaged(path, number, error))
    except StoreError as error:
        summary.problem = str(error)
    return summary


def _add(summary: RunSummary, event: AnyShortEvent) -> None:
    if isinstance(event, ScoreAdded):
        if not event.call:
            summary.rewards |= event.rewards
        return
    summary.seconds = max(summary.seconds, event.at_s)
    match event:  # the most frequent ones first
        case ShortRequest() | CallEnded() | ShortCell():
            pass
        case ShortReply():
            _charge(summary, event.reply.usage, event.reply.cost)
            summary.root_turns += event.call.isdecimal()
        case ShortCallStart():
            summary.num_calls += 1
            summary.depth = max(summary.depth, event.depth)
            summary.model = summary.model or event.model
        case AttemptFailed():
            _charge(summary, event.usage, event.cost)
        case RunStarted():
            summary.num_questions, summary.stop = summary.num_questions + 1, None
            summary.root_turns = 0
            if summary.num_questions == 1:
                summary.question, summary.started_at = event.question, event.started_at
                summary.task = event.task
                summary.num_files = 0 if event.context is None else len(event.context.files)
        case RunEnded():
            summary.stop, summary.reason = event.stop, event.reason or event.error or ""
            summary.answer = (
                None if event.answer is None else cut(as_text(event.answer), MAX_ANSWER)
            )
        case RunResumed():
            summary.stop, summary.reason, summary.answer = None, "", None
        case _:
            pass


def _charge(summary: RunSummary, usage: Usage, cost: float | None) -> None:
    summary.usage += usage
    if cost is not None:
        summary.cost = (summary.cost or 0.0) + cost


class RunIndex:
    """Summaries of journals, cached while they are unchanged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def summaries(self, journals: Iterable[Path]) -> list[RunSummary]:
        """Summaries in the given order, without journals that no longer exist."""
        stats = {}
        for path in journals:
            try:
                stats[path] = path.stat()
            except FileNotFoundError:
                continue
        cached = self._read([path.stem for path in stats])
        summaries: list[RunSummary] = []
        fresh: list[tuple[str, int, int, bytes]] = []
        for path, stat in stats.items():
            size, changed, data = cached.get(path.stem, (-1, -1, b""))
            if (size, changed) == (stat.st_size, stat.st_mtime_ns):
                summaries.append(msgspec.json.decode(data, type=RunSummary))
                continue
            summary = summarise(path)
            summaries.append(summary)
            if summary.problem is None:
                fresh.append(
                    (path.stem, stat.st_size, stat.st_mtime_ns, msgspec.json.encode(summary))
                )
        self._write(fresh)
        return summaries

    def forget(self, ids: Iterable[str]) -> None:
        """Delete the entries of these runs."""
        import sqlite3

        try:
            database = self._open()
            with database:
                database.executemany("DELETE FROM runs WHERE id = ?", [(id,) for id in ids])
            database.close()
        except sqlite3.Error:
            self.path.unlink(missing_ok=True)

    def _read(self, ids: list[str]) -> dict[str, tuple[int, int, bytes]]:
        import sqlite3

        try:
            database = self._open()
            try:
                rows = database.execute(
                    "SELECT id, size, changed, summary FROM runs WHERE id >= ?",
                    (min(ids, default=""),),
                )
                return {id: (size, changed, data) for id, size, changed, data in rows}
            finally:
                database.close()
        except (sqlite3.OperationalError, OSError):
            return {}  # locked, or not writable: slower, but still correct
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)
            return {}

    def _write(self, rows: list[tuple[str, int, int, bytes]]) -> None:
        import sqlite3

        if not rows:
            return
        try:
            database = self._open()
            try:
                with database:
                    database.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", rows)
            finally:
                database.close()
        except (sqlite3.Error, OSError):
            return  # the next listing tries again

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        from ramify.store.private_files import FILE_MODE

        if not self.path.exists():
            self.path.touch(FILE_MODE)
        database = sqlite3.connect(self.path, timeout=PATIENCE_S)
        try:
            if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                with database:
                    database.execute("DROP TABLE IF EXISTS runs")
                    database.execute(_SCHEMA)
                    database.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            database.close()
            raise
        return database


_STAMP = re.compile(r"\d{8}-\d{6}-")


class Store(RunStore):
    """The runs in one folder. Safe for several threads and processes at once.

    ``run`` may also be the path of a ``.jsonl`` file."""

    def __init__(self, root: str | Path | None = None, *, fsync: Fsync = os.fsync) -> None:
        """``fsync`` flushes an open file to disk. Tests pass the method of a
        ``testing.ForgetfulDisk``."""
        folder = Path(root).expanduser() if root is not None else default_root()
        self.root = make_folder(folder, fsync)
        self._runs = make_folder(self.root / "runs", fsync)
        self._flusher = FsyncFlusher(fsync)
        self.blobs = BlobStore(make_folder(self.root / "blobs", fsync), self._flusher)
        self._index = RunIndex(self.root / "index.sqlite")
        self._size = StoreSize(self.root)

    def create(self, run_id: str, secrets: Mapping[str, str] | None = None) -> Journal:
        """A journal for a new run. ``secrets`` (name -> value) are redacted in it, as are those of
        the environment."""
        check_run_id(run_id)
        self._size.warn_if_full()
        keep_reserve(self.root)
        path = self._runs / f"{run_id}.jsonl"
        try:
            fd = open_locked(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise StoreError(
                f"run {run_id} already exists in {self._runs}: resume it, or use another id"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}") from error
        journal = Journal(
            path, fd, self.blobs, self._flusher, SecretRedactor(secrets), ChecksumChain()
        )
        self._flusher.flush(self._runs, journal)  # the file's name
        return journal

    def reopen(self, run: str | Path, secrets: Mapping[str, str] | None = None) -> Journal:
        """The journal of an earlier run, to continue it. An incomplete last line is cut off."""
        path = self.path(run)
        try:
            fd = open_locked(path, 0)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        try:
            cut_torn_line(fd)
            chain = chain_at_end(fd, path)
        except BaseException:
            writer_file(path).unlink(missing_ok=True)
            os.close(fd)
            raise
        return Journal(path, fd, self.blobs, self._flusher, SecretRedactor(secrets), chain)

    def check(self, run: str | Path) -> JournalCheck:
        """Check the checksums of a run's journal and its stored contexts. This also works while the
        run is being written."""
        return check_journal(self.path(run), self.blobs)

    def repair(self, run: str | Path) -> JournalRepair:
        """Cut a damaged journal before its damage, so that the run can be resumed from there. The
        damaged file is kept beside it. Raises StoreError if nothing can be kept, and RunInUse while
        the run is being written."""
        return repair_journal(self.path(run), self._flusher.fsync)

    def check_free(self, run: str | Path) -> None:
        """Raise RunInUse, which names the process, while ``run`` is being written."""
        holder = writer(self.path(run))
        if holder is not None:
            raise in_use(self.path(run), str(holder))

    def path(self, run: str | Path) -> Path:
        """The journal that ``run`` refers to: a run's id, the unique beginning of one, ``"last"``,
        or a ``.jsonl`` file."""
        name = str(run)
        if name.endswith(".jsonl"):
            path = Path(name).expanduser()
            if not path.is_file():
                raise UnknownRun(f"the journal {path} does not exist")
            return path
        exact = self._runs / f"{name}.jsonl"
        if is_run_id(name) and exact.is_file():
            return exact
        ids = [path.stem for path in self._journals()]
        return self._runs / f"{id_of(name, ids, self._runs)}.jsonl"

    def events(self, run: str | Path) -> Iterator[AnyEvent]:
        """The events of ``run``, oldest first; also readable while it is being written."""
        return read_events(self.path(run))

    def follow(self, run: str | Path, poll_s: float = 0.1) -> AsyncIterator[AnyEvent]:
        """The events of ``run`` from the first, and new ones while it is being written."""
        return follow(self.path(run), poll_s)

    def runs(self, limit: int | None = None) -> list[RunSummary]:
        """Summaries, newest first."""
        journals = self._journals()[:limit]
        summaries = self._index.summaries(journals)
        claimed = {path.stem for path in self._runs.glob("*.writer")}
        reviewed = {path.name for path in self._runs.glob("*.review.json")}
        for summary in summaries:
            if f"{summary.id}.review.json" in reviewed:
                summary.review = listed_reviews(self._runs / f"{summary.id}.jsonl")[summary.id]
            summary.alive = (
                summary.id in claimed and writer(self._runs / f"{summary.id}.jsonl") is not None
            )
        return summaries

    def review(self, run: str | Path) -> RunReview:
        """Labels, note and corrected scores of ``run``; an empty one if there are none."""
        return read_reviews(path := self.path(run)).get(path.stem, RunReview())

    def write_review(self, run: str | Path, review: RunReview) -> RunReview:
        """Replace the review of ``run``, beside its journal, and return it with its time."""
        return write_review(path := self.path(run), path.stem, review)

    def remove(self, run: str | Path) -> int:
        """Delete a run and the blobs that no other run needs; returns the bytes freed. Not possible
        while it is being written."""
        path = self.path(run)
        if path.parent.resolve() != self._runs.resolve():
            raise StoreError(f"{path} is outside the store {self.root}: delete the file yourself")
        freed = self._pruner().remove(path)
        self._index.forget([path.stem])
        return freed

    def prune(
        self,
        older_than_s: float | None = None,
        keep_last: int | None = None,
        max_bytes: int | None = None,
    ) -> PruneResult:
        """Delete runs and evaluations, oldest first, and the blobs that no run needs; returns the
        ids.

        The ``keep_last`` newest runs, and as many evaluations, always stay. Of the others, those
        whose last event is older than ``older_than_s`` are deleted (all of them if neither this nor
        ``max_bytes`` is given), then as many as necessary for the store to fit ``max_bytes``. Runs
        that are being written stay. Without arguments, only unreferenced blobs and leftover files
        are deleted.
        """
        removed = self._pruner().prune(self._journals(), older_than_s, keep_last, max_bytes)
        self._index.forget(removed.runs)
        return removed

    def _pruner(self) -> StorePruner:
        return StorePruner(self.root, self._runs, self.blobs, self._size)

    def size(self) -> int:
        """Size in bytes on disk: journals, blobs, index and cache."""
        return self._size.measure()

    def _journals(self) -> list[Path]:
        """Journals, newest first. An id that does not begin with its time is sorted by the file's
        modification time."""
        keyed = []
        for entry in os.scandir(self._runs):
            if entry.name.endswith(".jsonl"):
                try:
                    keyed.append((_when(entry), Path(entry.path)))
                except FileNotFoundError:
                    continue
        return [path for _, path in sorted(keyed, reverse=True)]


def default_root() -> Path:
    """The store's folder if none is given."""
    home = os.environ.get("RAMIFY_HOME")
    if home:
        return Path(home).expanduser()
    from platformdirs import user_data_path

    return user_data_path("ramify")


def _when(entry: os.DirEntry[str]) -> str:
    if _STAMP.match(entry.name):
        return entry.name
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(entry.stat().st_mtime)) + entry.name
