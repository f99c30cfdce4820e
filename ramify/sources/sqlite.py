"""Loads SQLite databases as sources that sessions can query.

The context contains the schema with sample rows.

What a query may do and how much it may return is decided in ``sqlite_query.py``. The queries of a
session run in ``sqlite_process.py``, and the function ``sql`` itself is in ``session_tables.py``.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from ramify.format_quantities import pluralize
from ramify.sources.file_kinds import InputFile
from ramify.sources.loaded_sources import SourceCollector, UnreadableSourceError
from ramify.sources.session_tables import add_file_tables, has_duckdb
from ramify.sources.sqlite_query import run_query

_COUNT_S = 2.0
"""Time limit in seconds for counting the rows of one table."""
_DESCRIBE_S = 20.0
"""Time limit in seconds for describing all tables. Later tables show only their CREATE
statement.
"""
_NUM_SAMPLES = 3
_MAX_SHOWN_CHARS = 80


def read(file: InputFile, loading: SourceCollector) -> None:
    if not loading.has_tools:
        raise UnreadableSourceError(
            "is an SQLite database, which only sql reads", "send its rows as CSV or JSONL"
        )
    if file.path is None:
        raise UnreadableSourceError(
            "is an SQLite database", "save it as a separate file and name that file"
        )
    path = file.path.resolve()
    try:
        tables = _describe_tables(path)
    except (sqlite3.Error, ValueError, TimeoutError) as error:
        raise UnreadableSourceError(
            "is an SQLite database that cannot be read", str(error)
        ) from None
    loading.databases[file.name] = path
    if has_duckdb():
        with contextlib.suppress(UnreadableSourceError):  # it can be queried in its own dialect
            add_file_tables(file.name, "sqlite", path, b"", loading)
    head = f'SQLite database {file.name!r}. Query it with sql("SELECT …", db={file.name!r}).\n\n'
    detail = f"SQLite: {pluralize(len(tables), 'table')}"
    loading.add(file.name, head + "\n\n".join(tables), "sqlite", path.stat().st_size, detail)


def _describe_tables(path: Path) -> list[str]:
    """Describe each table or view of a database: its CREATE statement, number of rows and first
    rows.
    """
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
        ((num_rows,),) = run_query(path, f"SELECT count(*) FROM {quoted}", limit_s=_COUNT_S)
        count = pluralize(num_rows, "row")
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
