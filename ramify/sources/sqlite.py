"""SQLite databases: the schema with sample rows as context, and ``sql(query)`` for the session.

Queries run in the host and are read-only in three ways: the file is opened read-only,
``query_only`` is set, and an authorizer permits only reading (no ATTACH, no writing PRAGMA, no
extension). Every query has limits on time, rows and bytes. ``sqlite_process.py`` enforces the time
limit if a single step takes too long. Each call has its own connection, so threads may query
concurrently.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile

QUERY_S = 30.0
MAX_ROWS = 10_000
MAX_RESULT_BYTES = 32 << 20
_COUNT_S = 2.0
"""Time limit for counting the rows of one table for the schema."""
_DESCRIBE_S = 20.0
"""Time limit for describing all tables. Later tables are described by their CREATE statement
only."""
_NUM_SAMPLES = 3
_MAX_SHOWN_CHARS = 80
_STEPS = 10_000
"""SQLite virtual machine steps between two checks of the clock: about 0.1 ms."""
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


def read(file: SourceFile, loading: SourceLoader) -> None:
    if file.path is None:
        raise UnreadableSource(
            "is an SQLite database", "unpack it into a separate file and name that file"
        )
    path = file.path.resolve()
    try:
        tables = _tables(path)
    except (sqlite3.Error, ValueError, TimeoutError) as error:
        raise UnreadableSource("is an SQLite database that cannot be read", str(error)) from None
    loading.databases[file.name] = path
    head = f'SQLite database {file.name!r}. Query it with sql("SELECT …", db={file.name!r}).\n\n'
    detail = f"SQLite: {len(tables)} table{'s' * (len(tables) != 1)}"
    loading.add(file.name, head + "\n\n".join(tables), "sqlite", path.stat().st_size, detail)


class SqliteDatabases:
    """Databases by name. ``sql`` is the session's tool."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = dict(paths)

    def sql(self, query: str, params: Params = (), db: str | None = None) -> list[tuple[Any, ...]]:
        """Run one SELECT on a SQLite database and return its rows as a list of tuples.

        params: values for ? or :name in the query. db: which database, if there are several."""
        from ramify.sources.sqlite_process import query_in_time

        return query_in_time(self._path(db), query, params)

    def _path(self, name: str | None) -> Path:
        if name is None and len(self.paths) == 1:
            return next(iter(self.paths.values()))
        if name is None or name not in self.paths:
            raise ValueError(f"sql: db={name!r}: name one of {', '.join(map(repr, self.paths))}")
        return self.paths[name]


def run_query(
    path: Path, query: str, params: Params = (), limit_s: float = QUERY_S
) -> list[tuple[Any, ...]]:
    """Return the rows of a query. Raises ValueError, PermissionError or TimeoutError that says what
    is wrong with it."""
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
    rows, num_bytes = [], 0
    for row in cursor:
        rows.append(row)
        num_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if len(rows) > MAX_ROWS:
            raise ValueError(
                f"sql: more than {MAX_ROWS:,} rows: aggregate in SQL, or page with LIMIT and OFFSET"
            )
        if num_bytes > MAX_RESULT_BYTES:
            raise ValueError(
                f"sql: more than {MAX_RESULT_BYTES >> 20} MB of rows: select fewer columns, or use "
                "substr()"
            )
    return rows


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


def _tables(path: Path) -> list[str]:
    """Describe each table or view: its CREATE statement, number of rows and first rows."""
    statement = (
        "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') "
        "AND substr(name, 1, 7) <> 'sqlite_' ORDER BY name"
    )
    deadline = time.monotonic() + _DESCRIBE_S
    return [
        _describe(path, name, sql or "") if time.monotonic() < deadline else f"{sql};"
        for name, sql in run_query(path, statement)
    ]


def _describe(path: Path, name: str, sql: str) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    try:
        count = (
            f"{run_query(path, f'SELECT count(*) FROM {quoted}', limit_s=_COUNT_S)[0][0]:,} rows"
        )
    except TimeoutError:
        count = "too many rows to count quickly"
    except (ValueError, PermissionError) as error:
        return f"{sql};\n-- {error}"
    try:
        rows = run_query(path, f"SELECT * FROM {quoted} LIMIT {_NUM_SAMPLES}", limit_s=_COUNT_S)
    except (ValueError, TimeoutError):  # rows that are too long, or a view that is too slow
        rows = []
    samples = "".join(f"\n--   ({', '.join(_shorten(value) for value in row)})" for row in rows)
    return f"{sql};\n-- {count}{', the first:' if rows else ''}{samples}"


def _shorten(value: object) -> str:
    shown = f"<{len(value):,} bytes>" if isinstance(value, bytes) else repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else shown[: _MAX_SHOWN_CHARS - 1] + "…"
