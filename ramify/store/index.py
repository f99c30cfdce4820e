"""Summaries of runs for a listing, cached so that thousands of journals need not be read again.

The index is only a cache: an entry is valid while the journal's size and modification time are
unchanged. Writers do not touch it. If it is lost, locked or damaged, a listing reads the journals.
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

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs "
    "(id TEXT PRIMARY KEY, size INTEGER, changed INTEGER, summary BLOB)"
)
PATIENCE_S = 2.0
"""How long to wait for another process that writes the index before reading the journals
instead."""
_VERSION = 2
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


class _Bill(msgspec.Struct):
    """The costs in a reply."""

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
    """Read the journal at ``path`` for its summary: the same numbers as ``TrajectoryFold``, several
    times faster."""
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
        except sqlite3.OperationalError:
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
