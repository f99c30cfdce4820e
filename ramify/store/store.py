"""Runs on disk: where they are, how one is begun, found, read and deleted.

    ROOT/runs/RUN_ID.jsonl      a run's events, one a line, appended only     (journal.py, journal_reader.py)
    ROOT/runs/RUN_ID.writer     who is writing it now
    ROOT/blobs/ab/DIGEST        contexts and long outputs, once by content    (blobs.py)
    ROOT/index.sqlite           summaries for a listing; may be deleted       (index.py)
    ROOT/cache/replies.sqlite   the optional call cache                       (call_cache.py)
ROOT is the argument, else ``$RAMIFY_HOME``, else the platform's folder for user data. All of it is for its owner alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from ramify.errors import StoreError, UnknownRun
from ramify.secrets import SecretRedactor
from ramify.store.blobs import BlobStore
from ramify.store.flusher import FsyncFlusher
from ramify.store.index import RunIndex, RunSummary
from ramify.store.journal import Journal, cut_torn_line, in_use, open_locked, writer
from ramify.store.journal_reader import follow, read_events
from ramify.store.private_files import make_folder
from ramify.store.prune import PruneResult, StorePruner
from ramify.types.event import AnyEvent, TrajectoryFold
from ramify.types.trajectory import Trajectory

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_STAMP = re.compile(r"\d{8}-\d{6}-")
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 in ascending order, without letters that look alike."""


class Store:
    """The runs under one folder. Safe for several threads and processes at once."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = make_folder(Path(root).expanduser() if root is not None else default_root())
        self._runs = make_folder(self.root / "runs")
        self._flusher = FsyncFlusher()
        self.blobs = BlobStore(make_folder(self.root / "blobs"), self._flusher)
        self._index = RunIndex(self.root / "index.sqlite")
        self._pruner = StorePruner(self.root, self._runs, self.blobs)

    def new_id(self, question: str) -> str:
        """``20260301-142501-5gk0x7m-which-host-failed``: sorts by time (UTC, to the microsecond),
        reads, is unique."""
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        fraction = _base32(int(now % 1 * 1e6), 4)
        unique = "".join(_DIGITS[byte % 32] for byte in os.urandom(3))
        words = re.findall(r"[a-z0-9]+", question.lower())[:4]
        return "-".join([stamp, fraction + unique, *(word[:16] for word in words)])

    def create(self, run_id: str, secrets: Mapping[str, str] | None = None) -> Journal:
        """A journal for a new run. ``secrets`` (name -> value) are kept out of it, as are those of
        the environment."""
        if not _ID.fullmatch(run_id):
            raise StoreError(
                f"{run_id!r} cannot name a run: use letters, digits, '-', '_' and '.', at most 128"
            )
        self._pruner.warn_if_full()
        path = self._runs / f"{run_id}.jsonl"
        try:
            fd = open_locked(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise StoreError(
                f"run {run_id} exists already in {self._runs}: resume it, or take another id"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}") from error
        return Journal(path, fd, self.blobs, self._flusher, SecretRedactor(secrets))

    def reopen(self, run: str | Path, secrets: Mapping[str, str] | None = None) -> Journal:
        """The journal of an earlier run, to go on with. A line that its writer did not finish is
        cut off."""
        path = self.path(run)
        try:
            fd = open_locked(path, 0)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        cut_torn_line(fd)
        return Journal(path, fd, self.blobs, self._flusher, SecretRedactor(secrets))

    def check_free(self, run: str | Path) -> None:
        """Raises RunInUse, naming the process, while one is writing ``run``."""
        found = writer(self.path(run))
        if found is not None:
            raise in_use(self.path(run), str(found))

    def append(self, run: str | Path, events: Iterable[AnyEvent]) -> None:
        """Add to a run that nobody writes: what became known after its end, as a ``Scored``."""
        with self.reopen(run) as journal:
            for event in events:
                journal.append(event)

    def path(self, run: str | Path) -> Path:
        """The journal that ``run`` means: a run's id, the unique beginning of one, ``"last"``, or a
        ``.jsonl`` file."""
        name = str(run)
        if name.endswith(".jsonl"):
            path = Path(name).expanduser()
            if not path.is_file():
                raise UnknownRun(f"there is no journal {path}")
            return path
        exact = self._runs / f"{name}.jsonl"
        if _ID.fullmatch(name) and exact.is_file():
            return exact
        journals = self._journals()
        if name == "last" and journals:
            return journals[0]
        found = [path for path in journals if path.stem.startswith(name)] if name else []
        if len(found) == 1:
            return found[0]
        raise UnknownRun(self._not_found(name, journals, found))

    def events(self, run: str | Path) -> Iterator[AnyEvent]:
        """The events of ``run``, oldest first; readable while it is written."""
        return read_events(self.path(run))

    def follow(self, run: str | Path, poll_s: float = 0.1) -> AsyncIterator[AnyEvent]:
        """The events of ``run`` from the first on, and those to come while somebody writes it."""
        return follow(self.path(run), poll_s)

    def load(self, run: str | Path) -> Trajectory:
        fold = TrajectoryFold()
        for event in self.events(run):
            fold.apply(event)
        return fold.trajectory

    def runs(self, limit: int | None = None) -> list[RunSummary]:
        """Summaries, newest first."""
        journals = self._journals()[:limit]
        summaries = self._index.summaries(journals)
        claimed = {path.stem for path in self._runs.glob("*.writer")}
        for summary in summaries:
            summary.alive = (
                summary.id in claimed and writer(self._runs / f"{summary.id}.jsonl") is not None
            )
        return summaries

    def remove(self, run: str | Path) -> int:
        """Delete a run and the blobs that no other run needs; the bytes freed. Refused while it is
        written."""
        path = self.path(run)
        if path.parent.resolve() != self._runs.resolve():
            raise StoreError(f"{path} is outside the store {self.root}: delete the file yourself")
        freed = self._pruner.remove(path)
        self._index.forget([path.stem])
        return freed

    def prune(
        self,
        older_than_s: float | None = None,
        keep_last: int | None = None,
        max_bytes: int | None = None,
    ) -> PruneResult:
        """Delete runs and evaluations, oldest first, and the blobs that no run needs; the ids
        deleted.

        ``keep_last`` newest runs, and as many evaluations, stay in any case. Of the others go those
        whose last event is older than ``older_than_s`` (all of them where neither this nor
        ``max_bytes`` is given), then as many as it takes for the store to fit ``max_bytes``. What
        is being written stays. Without arguments, only litter goes."""
        removed = self._pruner.prune(self._journals(), older_than_s, keep_last, max_bytes)
        self._index.forget(removed.runs)
        return removed

    def size(self) -> int:
        """Bytes on disk: journals, blobs, index and cache."""
        return self._pruner.measure()

    def _journals(self) -> list[Path]:
        """Newest first. An id that does not begin with its time is placed by the file's time of
        change."""
        keyed = []
        for entry in os.scandir(self._runs):
            if entry.name.endswith(".jsonl"):
                try:
                    keyed.append((_when(entry), Path(entry.path)))
                except FileNotFoundError:
                    continue
        return [path for _, path in sorted(keyed, reverse=True)]

    def _not_found(self, name: str, journals: list[Path], found: list[Path]) -> str:
        if found:
            return f"{len(found)} runs begin with {name!r}, {found[-1].stem} among them: give more of the id"
        if not journals:
            return f"there is no run in {self._runs}"
        close = get_close_matches(name, [path.stem for path in journals], n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"there is no run {name!r} in {self._runs}: {hint}the last one is {journals[0].stem}"


def default_root() -> Path:
    home = os.environ.get("RAMIFY_HOME")
    if home:
        return Path(home).expanduser()
    from platformdirs import user_data_path

    return user_data_path("ramify")


def _when(entry: os.DirEntry[str]) -> str:
    if _STAMP.match(entry.name):
        return entry.name
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(entry.stat().st_mtime)) + entry.name


def _base32(number: int, width: int) -> str:
    digits = ""
    for _ in range(width):
        number, digit = divmod(number, 32)
        digits = _DIGITS[digit] + digits
    return digits
