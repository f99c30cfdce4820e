"""Cache of replies by the hash of the request, shared by all runs; only used on request.

The hash covers the model, the whole prompt and the sampling settings, so a hit is a reply to
exactly the same request. A cache that cannot be read or written raises StoreError instead of
missing silently, because a miss costs money.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from ramify.errors import StoreError
from ramify.store.private_files import FILE_MODE, make_folder
from ramify.types.message import Reply

if TYPE_CHECKING:
    from ramify.store.store import Store


class CallCache:
    """Persistent cache of replies. Safe for several threads and processes at once."""

    def __init__(self, store: Store) -> None:
        self.path = make_folder(store.root / "cache") / "replies.sqlite"
        self.path.touch(FILE_MODE)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(self.path, timeout=10.0, check_same_thread=False)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            self._database.execute("PRAGMA synchronous = NORMAL")
            with self._database:
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS replies (hash TEXT PRIMARY KEY, at REAL, reply "
                    "BLOB)"
                )
        except sqlite3.Error as error:
            self._database.close()
            raise self._failed(error) from error

    def get(self, prompt_hash: str) -> Reply | None:
        try:
            with self._lock:
                row = self._database.execute(
                    "SELECT reply FROM replies WHERE hash = ?", (prompt_hash,)
                ).fetchone()
            return None if row is None else msgspec.msgpack.decode(row[0], type=Reply)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self._failed(error) from error

    def put(self, prompt_hash: str, reply: Reply) -> None:
        """Store ``reply``. A reply with text that is not valid Unicode is skipped, since it could
        not be read back exactly."""
        try:
            data = msgspec.msgpack.encode(reply)
        except UnicodeEncodeError:
            return
        self._change(
            "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", prompt_hash, time.time(), data
        )

    def prune(self, older_than_s: float = 0.0) -> int:
        """Delete replies that were stored more than ``older_than_s`` ago; returns how many."""
        deleted = self._change("DELETE FROM replies WHERE at <= ?", time.time() - older_than_s)
        with self._lock:
            self._database.execute("VACUUM")
        return deleted

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def __len__(self) -> int:
        with self._lock:
            return int(self._database.execute("SELECT count(*) FROM replies").fetchone()[0])

    def _change(self, statement: str, *values: object) -> int:
        try:
            with self._lock, self._database:
                return self._database.execute(statement, values).rowcount
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        return StoreError(
            f"the call cache {self.path} cannot be used: {error}; delete the file, or run without "
            "the cache"
        )
