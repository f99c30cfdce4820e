"""Opens tables of rows in many formats: JSONL, CSV, Parquet and SQLite files, folders of text
files, lists, DataFrames, Arrow tables, and ``datasets.Dataset``.

    tickets.jsonl  ──> RowSource(columns=("id", "text"), total=1200, …)
    for row in table.read(): Row(0, {"id": 7, "text": "…"}, …)

A row that cannot be read is returned as a row with an error, so that the other rows are not
affected. ``dataframes.py`` reads the tables of other libraries, ``row_question.py`` forms the
question that is asked of a row, and ``ramify.sources`` reads documents.
"""

from __future__ import annotations

import sqlite3
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ramify.errors import SourceError, did_you_mean
from ramify.maps.dataframes import dataframe_row_source
from ramify.maps.row_source import BATCH, RowSource, UnreadableRow
from ramify.sources.csv_records import csv_records, irregular_record_message

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".db": "sqlite",
    ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
}
_HINTS = {
    ".json": "write one JSON object in each line, in a .jsonl file",
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "unpack it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save it as .csv, or give a DataFrame from Python"),
}
"""File extension of an unsupported table format -> advice on how to convert it."""
FORMATS = "a .jsonl, .csv, .tsv, .parquet or SQLite file, or a folder of text files"


def open_rows(rows: Any, table: str | None = None) -> RowSource:
    """Open a path, list or DataFrame as a table of rows.

    ``rows`` is a path, a list of paths, or an object such as a list or a DataFrame. ``table`` names
    a table of a SQLite file. Raises SourceError if the rows cannot be read.
    """
    if isinstance(rows, str | Path):
        return _of_paths([rows], table)
    if isinstance(rows, Sequence) and rows and all(isinstance(row, Path) for row in rows):
        return _of_paths(rows, table)
    return _of_object(rows)


def open_paths(paths: Sequence[str], table: str | None = None) -> RowSource:
    """Open files or folders as a single table.

    Raises SourceError if they cannot be read or their columns differ.
    """
    return _of_paths(paths, table)


# --- files


def _of_paths(paths: Sequence[str | Path], table: str | None) -> RowSource:
    tables = [_of_path(Path(path).expanduser(), table) for path in paths]
    first, *others = tables
    for other in others:
        if set(other.columns) != set(first.columns):
            differing = sorted(set(other.columns) ^ set(first.columns))
            raise SourceError(
                f"{other.name} has other columns than {first.name} ({', '.join(differing[:5])}): "
                "map files with different columns separately"
            )
    if not others:
        return first
    totals = [each.total for each in tables]
    total = None if None in totals else sum(filter(None, totals))
    return msgspec.structs.replace(
        first,
        name=", ".join(each.name for each in tables),
        total=total,
        values=lambda: chain.from_iterable(each.values() for each in tables),
    )


def _of_path(path: Path, table: str | None) -> RowSource:
    if str(path) in ("-", "/dev/stdin"):
        raise SourceError(
            "rows are read more than once, and standard input can be read only once: write them "
            "into a file"
        )
    if path.is_dir():
        return _folder_source(path)
    if not path.exists():
        raise SourceError(f"{path} does not exist: give {FORMATS}")
    kind = ENDINGS.get(path.suffix.lower())
    if kind is None:
        hint = _HINTS.get(path.suffix.lower(), f"give {FORMATS}")
        raise SourceError(f"{path} is not a table of rows: {hint}")
    if table is not None and kind != "sqlite":
        raise SourceError(f"{path} has no table '{table}': only a SQLite file has tables")
    try:
        match kind:
            case "jsonl":
                return _jsonl_source(path)
            case "csv":
                return _csv_source(path)
            case "parquet":
                return _parquet_source(path)
            case _:
                return _sqlite_source(path, table)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None


def _jsonl_source(path: Path) -> RowSource:
    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        with open(path, "rb", buffering=1 << 20) as file:
            yield from jsonl_rows(file, path.name)

    return RowSource(str(path), jsonl_columns(values(), str(path)), _num_lines(path), values)


def jsonl_rows(lines: Iterable[bytes], name: str) -> Iterator[dict[str, Any] | UnreadableRow]:
    """Yield the rows of a JSONL file.

    A line that is not a JSON object yields an ``UnreadableRow``. Its error message names the file
    as ``name``.
    """
    decode = msgspec.json.Decoder().decode
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield UnreadableRow(f"{name}, line {number} is not JSON: {error}")
            continue
        if isinstance(row, dict):
            yield row
        else:
            kind = type(row).__name__
            yield UnreadableRow(f"{name}, line {number} is a {kind}, not an object")


def jsonl_columns(values: Iterator[dict[str, Any] | UnreadableRow], name: str) -> tuple[str, ...]:
    """Return the names of all columns in the first 1,000 rows of a JSONL file.

    Raises SourceError if no row can be read.
    """
    first = list(islice(values, BATCH))
    columns = dict.fromkeys(chain.from_iterable(row for row in first if isinstance(row, dict)))
    if not columns:
        why = next((f" ({row.error})" for row in first if isinstance(row, UnreadableRow)), "")
        raise SourceError(f"{name} has no rows{why}: give a file with a JSON object in each line")
    return tuple(columns)


def _num_lines(path: Path) -> int:
    """Count the lines of a file, including blank ones, to estimate its number of rows."""
    total, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            total, last = total + block.count(b"\n"), block[-1:]
    return total + (last != b"\n")


def _csv_source(path: Path) -> RowSource:
    def opened() -> TextIO:
        return open(path, newline="", encoding="utf-8-sig", errors="replace")

    with opened() as file:
        columns = csv_columns(file, str(path))

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        with opened() as file:
            yield from csv_rows(file, path.name)

    return RowSource(str(path), columns, max(0, _num_lines(path) - 1), values)


def csv_columns(file: TextIO, name: str) -> tuple[str, ...]:
    """Return the column names from the header of a CSV file.

    Raises SourceError if the header is missing or names a column twice.
    """
    columns = tuple(next(csv_records(file, name), ()))
    if not any(column.strip() for column in columns):
        raise SourceError(f"{name} has no header: its first line must name the columns")
    if len(set(columns)) < len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise SourceError(f"{name} has two columns named '{twice}': rename one of them")
    return columns


def csv_rows(file: TextIO, name: str) -> Iterator[dict[str, Any] | UnreadableRow]:
    """Yield the rows of a CSV file.

    A record with more or fewer fields than the header yields an ``UnreadableRow``.
    """
    records = csv_records(file, name)
    columns = next(records)
    for number, record in enumerate(records, start=2):
        if not record:
            continue
        if len(record) == len(columns):
            yield dict(zip(columns, record, strict=True))
        else:
            yield UnreadableRow(
                f"{name}, {irregular_record_message(number, len(record), len(columns))}"
            )


def _parquet_source(path: Path) -> RowSource:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise SourceError(
            f"{path} needs pyarrow: pip install pyarrow, or give JSONL or CSV"
        ) from None
    import pyarrow

    try:
        with parquet.ParquetFile(path) as file:
            schema, total = file.schema_arrow, file.metadata.num_rows
    except pyarrow.ArrowInvalid as error:
        raise SourceError(f"{path} is not a Parquet file: {error}") from None

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                yield from batch.to_pylist()

    return RowSource(str(path), tuple(schema.names), total, values, schema=schema)


def _sqlite_source(path: Path, table: str | None) -> RowSource:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)

    try:
        database = connect()
        try:
            names = [
                name
                for (name,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT "
                    "LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"
                )
            ]
            name = _chosen_table(path, names, table)
            quoted = '"' + name.replace('"', '""') + '"'
            query = f"SELECT * FROM {quoted}"
            columns = tuple(
                column[0] for column in database.execute(f"{query} LIMIT 0").description
            )
            total = database.execute(f"SELECT COUNT(*) FROM {quoted}").fetchone()[0]
        finally:
            database.close()
    except sqlite3.Error as error:
        raise SourceError(f"{path} cannot be read as SQLite: {error}") from None

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        database = connect()
        try:
            for record in database.execute(query):
                yield dict(zip(columns, record, strict=True))
        finally:
            database.close()

    return RowSource(f"{path}, table {name}", columns, total, values)


def _chosen_table(path: Path, names: Sequence[str], table: str | None) -> str:
    if not names:
        raise SourceError(f"{path} has no tables")
    if table is None and len(names) == 1:
        return names[0]
    if table is None:
        raise SourceError(f"{path} has the tables {', '.join(names)}: choose one with --table")
    if table not in names:
        raise SourceError(f"{path} has no table '{table}': {did_you_mean(table, names)}")
    return table


def _folder_source(path: Path) -> RowSource:
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise SourceError(f"the folder {path} has no files")

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        for file in files:
            name = file.relative_to(path).as_posix()
            try:
                text = file.read_text("utf-8-sig")
            except UnicodeDecodeError:
                yield UnreadableRow(f"{name} is not text in UTF-8", {"file": name})
            except OSError as error:
                yield UnreadableRow(f"{name} cannot be read: {error.strerror}", {"file": name})
            else:
                yield {"file": name, "text": text}

    return RowSource(
        str(path), ("file", "text"), len(files), values, shown=("text",), kept=("file",)
    )


# --- objects


def _of_object(rows: Any) -> RowSource:
    table = dataframe_row_source(rows)
    if table is not None:
        return table
    if isinstance(rows, Mapping) and rows and all(hasattr(v, "features") for v in rows.values()):
        raise SourceError(
            f"rows cannot be read from a {type(rows).__name__}, which has several tables: give one "
            f"of them, such as rows[{next(iter(rows))!r}]"
        )
    if isinstance(rows, Mapping | bytes) or not isinstance(rows, Iterable):
        raise SourceError(
            f"rows cannot be read from a {type(rows).__name__}: give a list of dicts or texts, a "
            f"DataFrame, an Arrow table, or {FORMATS}"
        )
    return _list_source(list(rows))


def _list_source(items: list[Any]) -> RowSource:
    if not items:
        raise SourceError("there are no rows: give at least one")

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        for number, item in enumerate(items):
            if isinstance(item, str):
                yield {"text": str(item)}  # NumPy has its own texts
            elif isinstance(item, Mapping):
                yield dict(item)
            else:
                yield UnreadableRow(
                    f"row {number} is a {type(item).__name__}: give a dict or a text"
                )

    columns = dict.fromkeys(chain.from_iterable(row for row in values() if isinstance(row, dict)))
    return RowSource("the list", tuple(columns), len(items), values)
