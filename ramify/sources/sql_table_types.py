"""Types that describe the tables that ``sql`` can query. They are used by the loader and by the
process that reads the tables.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TableLocation(msgspec.Struct, frozen=True):
    """Where the rows of one table are: a file and, if it has several tables, the table's name in
    it.
    """

    name: str
    """Name in SQL, which needs no quotes."""
    path: str
    """Absolute path of the file."""
    kind: str
    """``csv``, ``jsonl``, ``parquet``, ``arrow``, ``duckdb``, ``sqlite``, ``xlsx``, or ``context``:
    a value."""
    member: str = ""
    """Name of the table or sheet inside of the file; its key in a context."""
    scan: str = ""
    """What reads a CSV or JSONL file, with its delimiter and types: ``FROM read_csv(…)``."""


class TableInfo(msgspec.Struct, frozen=True):
    """What one table contains: its columns, number of rows and first rows."""

    source: TableLocation
    columns: list[tuple[str, str]]
    """Name and type of each column."""
    num_rows: int
    """-1 if they take too long to count."""
    samples: list[tuple[Any, ...]]
    """Its first rows."""
    note: str = ""
    """What a reader should know, such as formulas without a stored value."""
    text: str = ""
    """A sheet as lines of tab-separated values."""


class LoadedTable(msgspec.Struct, frozen=True):
    """One table of a load."""

    file: str
    """Name of the file in the context."""
    info: TableInfo
    version: tuple[int, ...]
    """Numbers of the file's state when the table was described; see ``tables.version_of``."""
