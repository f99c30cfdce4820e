"""Lets session code query the tables of loaded files with ``tables`` and ``sql``.

    file ──add_file_tables──> TableInfo ──SessionTables──> tables  a list: names, columns, samples
                                                         sql(…)    one SELECT over all of them

This module decides which files are tables, what they are called in SQL, and whether a file has
changed since it was read. ``sql`` without ``db`` queries all tables in DuckDB's dialect. With
``db``, it queries one SQLite file or database server in that database's own dialect. Queries are
run by ``duckdb_process.py``, ``sqlite_process.py`` and ``database_servers.py``.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec

from ramify.format_quantities import pluralize
from ramify.sources.csv_records import csv_records, irregular_record_message
from ramify.sources.duckdb_process import describe_tables, query_tables
from ramify.sources.loaded_sources import (
    NO_DUCKDB,
    NO_TABLE,
    SourceCollector,
    UnreadableSourceError,
    count_with_names,
)
from ramify.sources.queryable_tables import LoadedTable, TableInfo, TableLocation

MAX_TABLES = 500
"""Maximum number of tables in one load. The files of further tables are loaded as texts only."""
DESCRIBE_S = 20.0
"""Time limit in seconds for describing the tables of one file."""
_ALL_S = 60.0
"""Time limit in seconds for describing the tables of all files in a load together. Once it is
exceeded, further CSV and JSONL files are loaded as texts only."""
_MAX_SHOWN = 80
_CHECKED_RECORDS = 1_000_000
"""Maximum number of records of a damaged CSV or JSONL file that are searched for the malformed
one."""
_KEYWORDS = re.compile(
    "all|and|any|as|asc|both|case|cast|check|column|constraint|create|default|desc|distinct|"
    "do|else|end|except|false|fetch|for|foreign|from|grant|group|having|in|initially|"
    "intersect|into|lateral|leading|limit|not|null|offset|on|only|or|order|primary|references|"
    "returning|select|show|some|summarize|table|then|to|trailing|true|union|unique|using|when|"
    "where|window|with"
)
"""Reserved words of DuckDB."""


def has_duckdb() -> bool:
    return importlib.util.find_spec("duckdb") is not None


def add_file_tables(
    name: str, kind: str, path: Path | None, data: bytes, loading: SourceCollector
) -> list[TableInfo]:
    """Describe the tables in a file and add them to the sources being loaded.

    Raises UnreadableSourceError if the file cannot be read as tables, or if it changes while it is
    read.
    """
    if len(loading.tables) >= MAX_TABLES:
        raise UnreadableSourceError(
            f"is not among the first {MAX_TABLES} tables", "name fewer files"
        )
    place = (path if path is not None else _write_temporary(name, kind, data, loading)).resolve()
    before = file_change_stamp(place)
    started = time.monotonic()
    try:
        found = describe_tables(
            [TableLocation("table_0", str(place), kind)],
            DESCRIBE_S,
            max(0, loading.remaining_bytes),
        )
    except TimeoutError:
        raise UnreadableSourceError(
            f"is a {kind} file that takes more than {DESCRIBE_S:g} s to read as a table"
        ) from None
    except (ValueError, PermissionError) as error:
        raise UnreadableSourceError(
            f"is a damaged {kind} file, or is not one",
            _wrong_record(name, kind, place) or str(error).removeprefix("sql: "),
        ) from None
    finally:
        loading.describing_s += time.monotonic() - started
    if file_change_stamp(place) != before:
        raise UnreadableSourceError(
            "changed while it was read", "load it again once it is complete"
        )
    if kind == "csv" and len(found[0].columns) == 1 and _has_many_columns(name, place):
        raise UnreadableSourceError(
            "is a csv file without the columns that its header names",
            _wrong_record(name, kind, place) or "its quotes do not match",
        )
    infos = []
    for info in found[: MAX_TABLES - len(loading.tables)]:
        taken = {each.info.source.name.casefold() for each in loading.tables}
        inner = info.source.member if kind != "xlsx" or len(found) > 1 else ""
        unique = table_name(name, inner, taken)
        info = msgspec.structs.replace(
            info, source=msgspec.structs.replace(info.source, name=unique), text=""
        )
        loading.tables.append(LoadedTable(name, info, before))
        infos.append(info)
    texts = [each.text for each in found]
    return [
        msgspec.structs.replace(info, text=text) for info, text in zip(infos, texts, strict=False)
    ]


def _wrong_record(name: str, kind: str, source: Path | bytes) -> str:
    """Describe the first malformed record of a CSV or JSONL file, for an error message.

    Errors of DuckDB do not serve, because it counts lines differently. Returns an empty string for
    other kinds of files, and if no malformed record was found.
    """
    return (
        _irregular_record_note(name, source)
        if kind == "csv"
        else _not_json(source)
        if kind == "jsonl"
        else ""
    )


def _opened(source: Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


def _opened_csv(source: Path | bytes) -> TextIO:
    return io.TextIOWrapper(_opened(source), "utf-8-sig", "replace", newline="")


def _has_many_columns(name: str, path: Path) -> bool:
    with _opened_csv(path) as file:
        return len(next(csv_records(file, name), ())) > 1


def _irregular_record_note(name: str, source: Path | bytes) -> str:
    with _opened_csv(source) as file:
        records = csv_records(file, name)
        header = next(records, [])
        for number, record in enumerate(itertools.islice(records, _CHECKED_RECORDS), start=2):
            if record and len(record) != len(header):
                return irregular_record_message(number, len(record), len(header))
    return ""


def _not_json(source: Path | bytes) -> str:
    with _opened(source) as file:
        for number, line in enumerate(itertools.islice(file, _CHECKED_RECORDS), start=1):
            try:
                if line.strip():
                    msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return f"line {number:,} is not JSON"
    return ""


def add_text_table(
    name: str, kind: str, path: Path | None, text: str, detail: str, loading: SourceCollector
) -> str:
    """Make a text in the context available to SQL queries as a table.

    Returns a description of the file, as ``add_table`` does. The file at ``path`` is used if it
    contains exactly this text.
    """
    if not text:
        return detail
    data = text.encode("utf-8", "replace")
    same = path is not None and path.stat().st_size == len(data)
    return add_table(name, kind, path if same else None, data, detail, loading)


def add_table(
    name: str,
    kind: str,
    path: Path | None,
    data: bytes,
    detail: str,
    loading: SourceCollector,
    *,
    is_utf8: bool = True,
) -> str:
    """Make a CSV or JSONL file whose text is in the context available to SQL queries.

    Returns the description of the file. For a CSV file, it is that of the table, so that it names
    the columns that a query finds. If ``sql`` cannot query the file, it is ``detail``, the
    description of the text, and the reason.
    """
    if not has_duckdb():
        reason = _wrong_record(name, kind, data if path is None else path) or NO_DUCKDB
    elif not is_utf8:
        reason = "it is not UTF-8"
    elif loading.describing_s > _ALL_S:
        reason = f"the tables before it took more than {_ALL_S:g} s to describe"
    else:
        is_full = len(loading.tables) >= MAX_TABLES
        try:
            table = add_file_tables(name, kind, path, data, loading)[0]
            return _describe_csv(table) if kind == "csv" else detail
        except UnreadableSourceError as error:
            reason = error.reason if is_full else error.remedy or error.reason
    return f"{detail}; {NO_TABLE} ({reason})"


def _describe_csv(table: TableInfo) -> str:
    columns = count_with_names([name for name, _ in table.columns], "column")
    note = f"; {table.note}" if table.note else ""
    return f"CSV: {columns}; {pluralize(table.num_rows, 'row')}{note}"


def describe_table(info: TableInfo) -> str:
    """Describe a table in lines of text: its name, columns, number of rows and first rows."""
    columns = ", ".join(f"{name} {kind}" for name, kind in info.columns)
    count = pluralize(info.num_rows, "row") if info.num_rows >= 0 else "many rows"
    lines = [f"{info.source.name} ({columns})", f"-- {count}"]
    if info.samples:
        lines[-1] += ", the first:"
    lines += [f"--   ({', '.join(map(_short_repr, row))})" for row in info.samples]
    return "\n".join(lines)


def table_name(file: str, member: str, taken: set[str]) -> str:
    """Return an unused name for a table, which SQL queries can use without quotes.

    The table of the file ``2024/sales.csv`` is called ``sales``, for example.
    """
    stem = file.rpartition("/")[2].split(".")[0]
    inner = member.rpartition(".")[2].strip('"') if member.startswith('"') else member
    wanted = [inner, f"{stem}_{inner}"] if inner else [stem]
    for name in (*wanted, *(f"{wanted[-1]}_{number}" for number in range(2, MAX_TABLES + 2))):
        plain = re.sub(r"\W+", "_", name).strip("_") or "data"
        plain = f"t_{plain}" if plain[0].isdigit() else plain
        plain = f"{plain}_" if _KEYWORDS.fullmatch(plain.casefold()) else plain
        if plain.casefold() not in taken:
            return plain
    raise UnreadableSourceError("has too many tables with the same name")


def file_change_stamp(path: Path | str) -> tuple[int, ...]:
    """Return a file's size, modification time and inode, which show whether it has changed.

    Empty if the file does not exist.
    """
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


class TemporaryTableFolder:
    """A temporary folder for tables that are not separate files, such as those in archives.

    It is deleted together with this object.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ramify-tables-"))
        weakref.finalize(self, shutil.rmtree, self.folder, True)


class SessionTables:
    """The tables that a session can query with SQL.

    The session gets the method ``sql`` as a function, and ``table_descriptions`` as the variable
    ``tables``.
    """

    def __init__(
        self,
        entries: Sequence[LoadedTable],
        databases: Mapping[str, Callable[..., list[tuple[Any, ...]]]],
        default: str | None,
        kept: TemporaryTableFolder | None = None,
    ) -> None:
        """Create the set of tables that one session can query with SQL.

        ``databases`` maps each name that a query can give as ``db`` to the function that runs the
        query. ``default`` is the database of a query without ``db``. If it is None, such a query
        runs over all tables. ``kept`` is the temporary folder of some tables, which must exist as
        long as this object.
        """
        self._entries = list(entries)
        self._databases = dict(databases)
        self._default = default
        self._kept = kept
        self._sources: list[TableLocation] = [each.info.source for each in entries]

    @property
    def table_descriptions(self) -> list[dict[str, Any]]:
        """Return a list of dicts that describe the session's tables.

        It gives the name in SQL, the file, the columns, the number of rows and the first rows.
        """
        return [
            {
                "name": each.info.source.name,
                "file": each.file,
                **({"table": each.info.source.member} if each.info.source.member else {}),
                "columns": dict(each.info.columns),
                "rows": each.info.num_rows if each.info.num_rows >= 0 else None,
                "samples": [tuple(map(shorten_sample_value, row)) for row in each.info.samples],
            }
            for each in self._entries
        ]

    def sql(self, query: str, params: Any = (), db: str | None = None) -> list[tuple[Any, ...]]:
        """Run one SELECT over the tables and return its rows as a list of tuples.

        params: values for ? or named placeholders in the query. db: one database by its name, in
        its own dialect; without it, all tables, in DuckDB's dialect."""
        if not isinstance(query, str) or not query.strip():
            raise ValueError("sql: the query is empty: give one SELECT")
        name = db if db is not None else self._default
        if name is not None:
            if name not in self._databases:
                known = ", ".join(map(repr, self._databases)) or "none here: leave db out"
                raise ValueError(f"sql: db={name!r}: name one of {known}")
            return self._databases[name](query, params)
        if not self._sources:
            raise ValueError(f"sql: name one of {', '.join(map(repr, self._databases))} as db=")
        self._check_unchanged()
        rows = query_tables(self._sources, query, params)
        self._check_unchanged()
        return rows

    def _check_unchanged(self) -> None:
        """Raise ValueError if any table's file has changed since the table was loaded.

        SQLite files may change, because each query uses a new copy.
        """
        for each in self._entries:
            kind, path = each.info.source.kind, each.info.source.path
            if kind != "sqlite" and file_change_stamp(path) != each.version:
                raise ValueError(
                    f"sql: the file {each.file} has changed since it was loaded: its rows are not "
                    "those that were described, so ask the question again"
                )


def _write_temporary(name: str, kind: str, data: bytes, loading: SourceCollector) -> Path:
    """Write a table's data to a new file in the temporary folder, and return the file's path."""
    if loading.kept_tables is None:
        loading.kept_tables = TemporaryTableFolder()
    path: Path = loading.kept_tables.folder / f"{len(loading.tables)}.{kind}"
    path.write_bytes(data)
    return path


def shorten_sample_value(value: Any) -> Any:
    """Shorten a value so that it can be shown in a sample row."""
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, list | dict):
        value = repr(value)
    return value if not isinstance(value, str) or len(value) <= _MAX_SHOWN else f"{value[:79]}…"


def _short_repr(value: Any) -> str:
    return (
        str(shorten_sample_value(value))
        if isinstance(value, bytes)
        else repr(shorten_sample_value(value))
    )
