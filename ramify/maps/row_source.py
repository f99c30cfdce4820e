"""A table whose rows are read one after another, independent of the file or object that holds them.

``open_row_source.py`` opens files and lists as such tables, and ``frames.py`` opens tables of other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

BATCH = 1000
"""Rows that are read at once, and rows that decide the columns of a JSONL file."""
Extend = Callable[[Sequence[int], Mapping[str, Sequence[Any]], Mapping[str, str | None]], Any]
"""(numbers of rows, name -> values of a new column, name -> its type in a JSON schema) -> the table
of these rows with the new columns."""


class UnreadRow(msgspec.Struct, frozen=True):
    """Stands for a row that could not be read, with the error."""

    error: str
    values: dict[str, Any] = {}
    """Columns that are known nevertheless, such as the name of a file."""


class Row(msgspec.Struct, frozen=True):
    """One row of a table: its position and its values by column."""

    number: int
    """Place in the table, from 0."""
    values: dict[str, Any]
    """Column -> value. A row that could not be read has only the columns that are known anyway."""
    error: str = ""
    """Why the row could not be read."""


class RowSource(msgspec.Struct, frozen=True):
    """A table whose rows are read one after the other, any number of times."""

    name: str
    """File, or kind of object, for errors."""
    columns: tuple[str, ...]
    total: int | None
    """Number of rows; None if it is not known without reading them."""
    values: Callable[[], Iterator[dict[str, Any] | UnreadRow]]
    """Reads the rows from the first."""
    shown: tuple[str, ...] = ()
    """Columns that a model reads by default; empty: all."""
    kept: tuple[str, ...] | None = None
    """Columns that the output repeats; None: all."""
    schema: Any = None
    """Arrow schema of the rows, if the table has one."""
    extend: Extend | None = None
    """Adds columns to these rows, if the table is of another library."""

    def iter_rows(self) -> Iterator[Row]:
        for number, values in enumerate(self.values()):
            if isinstance(values, UnreadRow):
                yield Row(number, values.values, values.error)
            else:
                yield Row(number, values)

    @property
    def kept_columns(self) -> tuple[str, ...]:
        return self.columns if self.kept is None else self.kept
