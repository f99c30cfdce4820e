"""Let a session query the DataFrames in its context with SQL.

Sessions get ``tables``, which lists them, and the function ``sql``.

    completion(frame, …)            sql("SELECT … FROM context")
    completion({"sales": frame}, …) sql("SELECT … FROM sales")

DuckDB reads the columns without a copy, in the memory file that holds the context; its process maps
the file at the first query. A context of less than a megabyte gets such a file only at that time.
Tables in files are handled by ``session_tables.py``, and ``duckdb_process.py`` defines what a query
may do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ramify.sandbox.base import SharedContextValue, Table, anonymous_file
from ramify.sources.duckdb_process import NUM_SAMPLES, query_tables
from ramify.sources.loaded_sources import join_names_abbreviated
from ramify.sources.query_process import to_session_value
from ramify.sources.queryable_tables import TableLocation
from ramify.sources.session_tables import MAX_TABLES, has_duckdb, shorten_sample_value, table_name

_NAME = "context"
"""SQL name of a context that is a single table."""


class ContextSqlTables:
    """Makes the tables of a context available to SQL queries.

    ``tools`` are the functions that a session gets. Call ``set_context`` first, which sets the
    context that ``sql`` reads.
    """

    def __init__(self, tables: Mapping[str, Table], keys: Mapping[str, str | None]) -> None:
        """Create the set of SQL tables that a session can query in its context.

        ``tables`` maps SQL names to tables. ``keys`` maps the same names to the keys of the
        context, or to None if the context itself is the table.
        """
        self._keys = dict(keys)
        self._listing = [
            {
                "name": name,
                **({"key": keys[name]} if keys[name] is not None else {}),
                "columns": table.types,
                "rows": len(table),
                "samples": [
                    tuple(map(shorten_sample_value, map(to_session_value, row)))
                    for row in table.rows(0, NUM_SAMPLES)
                ],
            }
            for name, table in tables.items()
        ]
        self._context: SharedContextValue | None = None
        self._file = -1

    @classmethod
    def from_context(cls, context: Any, tools: Mapping[str, Any]) -> ContextSqlTables | None:
        """Return the DataFrames in a context as SQL tables, or None if SQL is not available.

        Returns None if there are none, if DuckDB is not installed, or if ``tools`` already contains
        a function ``sql``.
        """
        if isinstance(context, Table):
            found: dict[str | None, Table] = {None: context}
        elif type(context) is dict:
            found = {key: each for key, each in context.items() if isinstance(each, Table)}
        else:
            return None
        if not found or "sql" in tools or not has_duckdb():
            return None
        tables: dict[str, Table] = {}
        keys: dict[str, str | None] = {}
        for key, table in list(found.items())[:MAX_TABLES]:
            taken = {name.casefold() for name in tables}
            name = _NAME if key is None else table_name(str(key), "", taken)
            tables[name], keys[name] = table, key
        return cls(tables, keys)

    @property
    def tools(self) -> dict[str, Any]:
        return {"sql": self.sql, "tables": self._listing}

    def manifest(self) -> str:
        """Return a line for the model's prompt that lists the tables available to ``sql``."""
        names = [
            name if self._keys[name] is None else f"{name} (context[{self._keys[name]!r}])"
            for name in self._keys
        ]
        return (
            f"Tables for sql(), in DuckDB's dialect: {join_names_abbreviated(names)}; `tables` "
            "lists their columns, rows and samples"
        )

    def set_context(self, context: SharedContextValue) -> None:
        """Set the encoded context from which ``sql`` reads its tables."""
        self._context = context

    def sql(self, query: str, params: Any = ()) -> list[tuple[Any, ...]]:
        """Run one SELECT over the tables and return its rows as a list of tuples.

        params: values for ? or named placeholders in the query."""
        if not isinstance(query, str) or not query.strip():
            raise ValueError("sql: the query is empty: give one SELECT")
        assert self._context is not None, "a session over the context exists"
        path = f"/proc/{os.getpid()}/fd/{self._descriptor(self._context)}"
        sources = [
            TableLocation(name, path, "context", "" if key is None else key)
            for name, key in self._keys.items()
        ]
        return query_tables(sources, query, params)

    def _descriptor(self, context: SharedContextValue) -> int:
        """Return the descriptor of a file that holds the encoded context, for the query process.

        If the context has none, create a memory file.
        """
        if context.fd is not None:
            return context.fd
        if self._file < 0:
            self._file = anonymous_file("ramify-tables")
            os.write(self._file, context.buffer())
        return self._file

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)
