"""One line per run for a listing, remembered so that thousands of journals need not be read again.

The index is a cache of the journals and is never trusted over them: an entry counts while the
journal's size and time of change are what they were. Writers do not touch it. If it is lost, locked
or damaged, a listing reads the journals.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ramify.errors import StoreError
from ramify.store.journal_reader import check_version, lines
from ramify.types.message import Usage
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    import sqlite3

_SCHEMA = "CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, size INTEGER, changed INTEGER, summary BLOB)"
PATIENCE_S = 2.0
"""To wait for another process that writes the index, before the journals are read instead."""
_VERSION = 2
"""Of the summaries; a file with another one is made anew."""


class RunSummary(msgspec.Struct, omit_defaults=True):
    """What a listing shows of one run."""

    id: str
    question: str = ""
    """The first one of a conversation."""
    model: str = ""
    """Of the root call."""
    started_at: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    """From the start to the last event."""
    num_questions: int = 0
    num_calls: int = 0
    """Calls in the tree, the root included."""
    depth: int = 0
    usage: Usage = Usage()
    cost: float | None = None
    """Dollars; None where no model had a price."""
    stop: Stop | None = None
    """None while the run is written, and where it was killed."""
    num_bytes: int = 0
    """Of the journal, without blobs."""
    alive: bool = False
    """Whether a process is writing it now."""
    problem: str | None = None
    """Why the journal could not be read."""
    rewards: dict[str, float] = {}
    """Of the whole run, where it was scored."""


class _Bill(msgspec.Struct):
    usage: Usage = Usage()
    cost: float | None = None


class _Glance(msgspec.Struct):
    """The fields of any event that a summary needs; the decoder skips all others."""

    type: str
    at_s: float = 0.0
    question: str = ""
    started_at: float = 0.0
    model: str = ""
    depth: int = 0
    reply: _Bill = msgspec.field(default_factory=_Bill)
    usage: Usage = Usage()
    cost: float | None = None
    stop: Stop | None = None
    call: str = ""
    rewards: dict[str, float] = {}


_glance = msgspec.json.Decoder(_Glance)


def summarise(path: Path) -> RunSummary:
    """Read the journal at ``path`` for its summary: the numbers that ``TrajectoryFold`` would give,
    several times faster."""
    summary, number = RunSummary(path.stem), 0
    try:
        for line in lines(path):
            number += 1
            if line.startswith(b'{"type":"RunStarted"'):
                check_version(line, path)
            _add(summary, _glance.decode(line))
            summary.num_bytes += len(line) + 1
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        summary.problem = f"{path}, line {number} is damaged: {error}"
    except StoreError as error:
        summary.problem = str(error)
    return summary


def _add(summary: RunSummary, event: _Glance) -> None:
    if event.type == "Scored":
        if not event.call:
            summary.rewards |= event.rewards
        return
    summary.seconds = max(summary.seconds, event.at_s)
    match event.type:
        case "RunStarted":
            summary.num_questions, summary.stop = summary.num_questions + 1, None
            if summary.num_questions == 1:
                summary.question, summary.started_at = event.question, event.started_at
        case "CallStarted":
            summary.num_calls, summary.depth = (
                summary.num_calls + 1,
                max(summary.depth, event.depth),
            )
            summary.model = summary.model or event.model
        case "Replied":
            _charge(summary, event.reply.usage, event.reply.cost)
        case "Attempted":
            _charge(summary, event.usage, event.cost)
        case "RunEnded":
            summary.stop = event.stop


def _charge(summary: RunSummary, usage: Usage, cost: float | None) -> None:
    summary.usage += usage
    if cost is not None:
        summary.cost = (summary.cost or 0.0) + cost


class RunIndex:
    """Summaries of the journals given, from memory where they have not changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def summaries(self, journals: Iterable[Path]) -> list[RunSummary]:
        """In the order given; journals that are gone are left out."""
        stats = {}
        for path in journals:
            try:
                stats[path] = path.stat()
            except FileNotFoundError:
                continue
        known = self._read([path.stem for path in stats])
        found: list[RunSummary] = []
        fresh: list[tuple[str, int, int, bytes]] = []
        for path, stat in stats.items():
            size, changed, data = known.get(path.stem, (-1, -1, b""))
            if (size, changed) == (stat.st_size, stat.st_mtime_ns):
                found.append(msgspec.json.decode(data, type=RunSummary))
                continue
            summary = summarise(path)
            found.append(summary)
            if summary.problem is None:
                fresh.append(
                    (path.stem, stat.st_size, stat.st_mtime_ns, msgspec.json.encode(summary))
                )
        self._write(fresh)
        return found

    def forget(self, ids: Iterable[str]) -> None:
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
        except sqlite3.OperationalError:
            return {}  # locked, or a disk that cannot be written: slower, not wrong
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
        except sqlite3.Error:
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
