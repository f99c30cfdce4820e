"""Runs one read-only query on a SQLite database, with limits on time, rows and bytes.

Queries are read-only in three ways: the file is opened read-only, ``query_only`` is set, and an
authorizer permits only reading (no ATTACH, no writing PRAGMA, no extension). Each call has its own
connection, so threads may query concurrently. A single step of SQLite may take longer than the time
limit, which is why a session's queries run in ``sqlite_process.py``.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ramify.sources.query_process import MAX_RESULT_BYTES, QUERY_S, BoundedRowCollector

_STEPS = 10_000
"""Number of SQLite virtual machine steps, about 0.1 ms, after which the time limit is checked
again."""
_READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_PRAGMAS = {
    "table_info",
    "table_xinfo",
    "table_list",
    "index_list",
    "index_info",
    "index_xinfo",
    "foreign_key_list",
    "database_list",
    "function_list",
}
_BAD_FUNCTIONS = {"load_extension", "fts3_tokenizer"}

Params = Sequence[Any] | Mapping[str, Any]


def run_query(
    path: Path, query: str, params: Params = (), limit_s: float = QUERY_S
) -> list[tuple[Any, ...]]:
    """Run a query on a SQLite file and return its rows.

    A ValueError, PermissionError or TimeoutError explains what is wrong with the query.
    """
    with _connect(path) as database:
        deadline = time.monotonic() + limit_s
        database.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        try:
            return _fetch(database.execute(query, params))
        except sqlite3.DatabaseError as error:
            message = str(error)
            if message == "interrupted":
                raise TimeoutError(
                    f"sql: stopped after {limit_s:g} s: narrow it, or use an indexed column"
                ) from None
            if "not authorized" in message or "prohibited" in message or "readonly" in message:
                raise PermissionError(f"sql: only reading is allowed here ({message})") from None
            raise ValueError(f"sql: {message}") from None
        except (sqlite3.Warning, sqlite3.InterfaceError) as error:
            raise ValueError(f"sql: {error}") from None


def _fetch(cursor: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    bounded = BoundedRowCollector()
    for row in cursor:
        bounded.add(row)
    return bounded.rows


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5.0)
    try:
        try:
            database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        except sqlite3.OperationalError:
            # A database in WAL mode in a read-only folder can only be opened as immutable,
            # which is safe if no other process writes it.
            database.close()
            database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        database.execute("PRAGMA query_only = 1")
        database.execute("PRAGMA trusted_schema = 0")  # its views are untrusted code
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RESULT_BYTES)
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        database.set_authorizer(_authorize)
        yield database
    finally:
        database.close()


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        allowed = (first or "").lower() in _PRAGMAS
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = (second or "").lower() not in _BAD_FUNCTIONS
    else:
        allowed = action in _READING
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
