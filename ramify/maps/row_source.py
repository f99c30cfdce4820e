"""The interface of tables that are read row by row, whatever file or object holds the rows.

``open_row_source.py`` opens files and lists as such tables, and ``dataframes.py`` opens tables of
other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

BATCH = 1000
"""Number of rows read at once. For a JSONL file it is also the number of rows from which the
columns are determined."""
Extend = Callable[[Sequence[int], Mapping[str, Sequence[Any]], Mapping[str, str | None]], Any]
"""Function (row numbers, name -> values of a new column, name -> JSON schema type of the column) ->
table of these rows with the new columns."""


class UnreadableRow(msgspec.Struct, frozen=True):
    """A table row that could not be read, and the error."""

    error: str
    values: dict[str, Any] = {}
    """Column -> value, for the columns that are known although the row could not be read, such as
    the name of a file."""


class Row(msgspec.Struct, frozen=True):
    """One row of a table: its position and its value in each column."""

    number: int
    """Index of the row in the table, from 0."""
    values: dict[str, Any]
    """Column -> value. A row that could not be read has only the columns that are known
    nevertheless."""
    error: str = ""
    """Reason why the row could not be read; empty if it was read."""


class RowSource(msgspec.Struct, frozen=True):
    """A table that can be read row by row, any number of times."""

    name: str
    """File name, or kind of object, for error messages."""
    columns: tuple[str, ...]
    total: int | None
    """Number of rows, or None if counting them would require reading them."""
    values: Callable[[], Iterator[dict[str, Any] | UnreadableRow]]
    """Function that yields the rows from the beginning."""
    shown: tuple[str, ...] = ()
    """Columns that a model reads by default. Empty means all columns."""
    kept: tuple[str, ...] | None = None
    """Input columns that are copied to the output. None means all columns."""
    schema: Any = None
    """Arrow schema of the rows, if the table has one."""
    extend: Extend | None = None
    """Function that adds columns to the rows, if the table comes from another library."""

    def iter_rows(self) -> Iterator[Row]:
        for number, values in enumerate(self.values()):
            if isinstance(values, UnreadableRow):
                yield Row(number, values.values, values.error)
            else:
                yield Row(number, values)

    @property
    def kept_columns(self) -> tuple[str, ...]:
        return self.columns if self.kept is None else self.kept
