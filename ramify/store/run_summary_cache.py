"""A cache of run summaries, so that a listing reads only journals that have changed.

It is a database, ``index.sqlite``, that may be deleted at any time. The summaries themselves are
made by ``run_summary.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ramify.store.durable_files import FILE_MODE
from ramify.store.journal import FileStoredRun
from ramify.store.run_summary import RunSummary, summarise

if TYPE_CHECKING:
    import sqlite3

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs "
    "(id TEXT PRIMARY KEY, size INTEGER, changed INTEGER, summary BLOB)"
)
PATIENCE_S = 2.0
"""Seconds to wait for another process that writes the index, before the journals are read
instead."""
_VERSION = 4
"""Version of the summaries; an index with another version is rebuilt."""
_decoder = msgspec.json.Decoder(RunSummary)


class RunSummaryCache:
    """A cache of the summaries that listings show for stored runs.

    A summary is used as long as its journal is unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def summaries(self, folder: Path, ids: Sequence[str]) -> list[RunSummary]:
        """Return the summaries of the journals in ``folder``, in the order of ``ids``.

        Journals that no longer exist are left out.
        """
        cached = self._read(ids)
        summaries: list[RunSummary] = []
        fresh: list[tuple[str, int, int, bytes]] = []
        for id in ids:
            # A Path for each of thousands of journals would take longer than all the rest.
            name = f"{folder}/{id}.jsonl"
            try:
                stat = os.stat(name)
            except FileNotFoundError:
                continue
            size, changed, data = cached.get(id, (-1, -1, b""))
            if (size, changed) == (stat.st_size, stat.st_mtime_ns):
                summaries.append(_decoder.decode(data))
                continue
            summary = summarise(FileStoredRun(Path(name)))
            summaries.append(summary)
            if summary.problem is None:
                fresh.append((id, stat.st_size, stat.st_mtime_ns, msgspec.json.encode(summary)))
        self._write(fresh)
        return summaries

    def forget(self, ids: Iterable[str]) -> None:
        """Delete the cached summaries of these runs."""
        import sqlite3

        try:
            database = self._open()
            with database:
                database.executemany("DELETE FROM runs WHERE id = ?", [(id,) for id in ids])
            database.close()
        except sqlite3.Error:
            self.path.unlink(missing_ok=True)

    def _read(self, ids: Sequence[str]) -> dict[str, tuple[int, int, bytes]]:
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
