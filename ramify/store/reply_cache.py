"""A cache of model replies that all runs of a store share.

A run uses it only if it is asked to.

Replies are looked up by the hash of the request. The cache also records the positions of replies in
journals, so it finds the replies of runs that did not use the cache as well.

The hash covers the model, the whole prompt and the sampling settings, so a hit is a reply to
exactly the same request. A cache that cannot be read or written raises StoreError instead of
missing silently, because a miss costs money.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ramify.errors import StoreError
from ramify.store.durable_files import FILE_MODE, make_folder
from ramify.types.message import Reply

if TYPE_CHECKING:
    from ramify.store.folder_store import Store


class JournalReplyOffset(NamedTuple):
    """The position of a recorded reply in a journal."""

    run: str
    offset: int
    """Byte offset of the reply's line in the journal."""
    crc_before: int
    """Checksum of the journal line before the reply's line. It is needed to verify the reply's
    line."""


_TABLES = (
    "replies (hash TEXT PRIMARY KEY, at REAL, reply BLOB)",
    "places (hash TEXT PRIMARY KEY, run TEXT, offset INTEGER, crc_before INTEGER)",
    "read_journals (run TEXT PRIMARY KEY, bytes INTEGER)",
)
_FORMER_TABLES = ("recorded", "read_runs")


class ModelReplyCache:
    """A cache of model replies on disk.

    Safe for several threads and processes at once.
    """

    def __init__(self, store: Store) -> None:
        self.path = make_folder(store.root / "cache") / "replies.sqlite"
        self.path.touch(FILE_MODE)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(self.path, timeout=10.0, check_same_thread=False)
        # A run drops its cache; since Python 3.13, a database that was not closed warns.
        self._finalizer = weakref.finalize(self, self._database.close)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            self._database.execute("PRAGMA synchronous = NORMAL")
            with self._database:
                for table in _FORMER_TABLES:
                    self._database.execute(f"DROP TABLE IF EXISTS {table}")
                for table in _TABLES:
                    self._database.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except sqlite3.Error as error:
            self._finalizer()
            raise self._cache_error(error) from error

    def get(self, prompt_hash: str) -> Reply | None:
        row = self._fetch_row("SELECT reply FROM replies WHERE hash = ?", prompt_hash)
        try:
            return None if row is None else msgspec.msgpack.decode(row[0], type=Reply)
        except msgspec.DecodeError as error:
            raise self._cache_error(error) from error

    def reply_journal_position(self, prompt_hash: str) -> JournalReplyOffset | None:
        """Return where a journal holds the registered reply to the request with this hash, or
        None."""
        row = self._fetch_row(
            "SELECT run, offset, crc_before FROM places WHERE hash = ?", prompt_hash
        )
        return None if row is None else JournalReplyOffset(*row)

    def registered_journal_bytes(self, run: str) -> int:
        """Return the size of a run's journal in bytes when the cache last registered its replies.

        Returns 0 if it never did. A larger journal has new replies.
        """
        row = self._fetch_row("SELECT bytes FROM read_journals WHERE run = ?", run)
        return 0 if row is None else int(row[0])

    def register_run_replies(
        self, run: str, num_bytes: int, places: Iterable[tuple[str, JournalReplyOffset]]
    ) -> None:
        """Register where the journal of ``run`` holds each of its replies.

        The journal is ``num_bytes`` bytes long. ``places`` has pairs of a request's hash and the
        position of its reply.
        """
        rows = [(prompt_hash, *place) for prompt_hash, place in places]
        try:
            with self._lock, self._database:
                self._database.executemany(
                    "INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?)", rows
                )
                self._database.execute(
                    "INSERT OR REPLACE INTO read_journals VALUES (?, ?)", (run, num_bytes)
                )
        except sqlite3.Error as error:
            raise self._cache_error(error) from error

    def put(self, prompt_hash: str, reply: Reply) -> None:
        """Cache ``reply`` under the hash of its request.

        Skips a reply whose text is not valid Unicode, since it could not be read back exactly.
        """
        try:
            data = msgspec.msgpack.encode(reply)
        except UnicodeEncodeError:
            return
        self._execute_write(
            "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", prompt_hash, time.time(), data
        )

    def delete_older_than(self, older_than_s: float = 0.0) -> int:
        """Delete cached replies older than ``older_than_s`` seconds, and return how many were
        deleted.
        """
        deleted = self._execute_write(
            "DELETE FROM replies WHERE at <= ?", time.time() - older_than_s
        )
        with self._lock:
            self._database.execute("VACUUM")
        return deleted

    def close(self) -> None:
        with self._lock:
            self._finalizer()

    def __len__(self) -> int:
        with self._lock:
            return int(self._database.execute("SELECT count(*) FROM replies").fetchone()[0])

    def _fetch_row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        try:
            with self._lock:
                row: tuple[Any, ...] | None = self._database.execute(query, values).fetchone()
                return row
        except sqlite3.Error as error:
            raise self._cache_error(error) from error

    def _execute_write(self, statement: str, *values: object) -> int:
        try:
            with self._lock, self._database:
                return self._database.execute(statement, values).rowcount
        except sqlite3.Error as error:
            raise self._cache_error(error) from error

    def _cache_error(self, error: Exception) -> StoreError:
        return StoreError(
            f"the call cache {self.path} cannot be used: {error}; delete the file, or run without "
            "the cache"
        )
