"""Types that describe the tables that a session can query with SQL.

The loader and the query process share them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TableLocation(msgspec.Struct, frozen=True):
    """The location of a table's rows: a file and, if needed, the table's name in the file."""

    name: str
    """Name of the table in SQL, which needs no quotes."""
    path: str
    """Absolute path of the file."""
    kind: str
    """Format: ``csv``, ``jsonl``, ``parquet``, ``arrow``, ``duckdb``, ``sqlite`` or ``xlsx``;
    ``context`` for a value.
    """
    member: str = ""
    """Name of the table or sheet in the file, or the table's key in a context."""
    scan: str = ""
    """SQL that reads a CSV or JSONL file with its delimiter and types, such as ``FROM
    read_csv(…)``.
    """


class TableInfo(msgspec.Struct, frozen=True):
    """What one table contains: its columns, number of rows and first rows."""

    source: TableLocation
    columns: list[tuple[str, str]]
    """Name and type of each column."""
    num_rows: int
    """Number of rows; -1 if counting takes too long."""
    samples: list[tuple[Any, ...]]
    """First rows of the table."""
    note: str = ""
    """Warning about the contents, such as formulas without a stored value."""
    text: str = ""
    """Contents of a sheet as lines of tab-separated values."""


class LoadedTable(msgspec.Struct, frozen=True):
    """One table that was loaded from the sources."""

    file: str
    """Name of the file in the context."""
    info: TableInfo
    version: tuple[int, ...]
    """State of the file when the table was described: its size, time and inode number."""
