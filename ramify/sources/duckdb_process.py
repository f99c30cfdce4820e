"""Run SQL queries over tables in files with DuckDB, in a separate process.

    TableSqlRequest(tables, query) ──> one DuckDB in memory per set of tables ──> rows
      csv, jsonl, parquet    a view over the file
      duckdb                 its file, attached read-only
      arrow                  read by pyarrow, without a copy
      context                a table of a context, in the memory file of the host, without a copy
      sqlite, xlsx           copied when a query names them, by sqlite3 and openpyxl

The text of a query is untrusted. DuckDB may open only the files of the tables (``allowed_paths``);
access to other files, extensions and settings is switched off and locked. A query is one SELECT in
a read-only transaction. The process can write no file (``RLIMIT_FSIZE``) and has limited memory. It
knows no keys, because it starts without the environment of the host. ``session_tables.py`` decides
which files are tables and whether one has changed.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import mmap
import os
import re
import resource
import signal
import sqlite3
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.actors.helper_process import answer_requests
from ramify.actors.message_encoding import decode
from ramify.format_quantities import pluralize
from ramify.sources.query_process import (
    QUERY_S,
    BoundedRowCollector,
    RequestProcessPool,
    encode_outcome,
    to_session_value,
)
from ramify.sources.queryable_tables import TableInfo, TableLocation

MEMORY_BYTES = 2 << 30
"""Memory that DuckDB may use, in bytes."""
_ADDRESS_BYTES = 6 << 30
"""Address space of the process in bytes, including mapped files."""
MAX_COPIED_ROWS = 5_000_000
"""Maximum number of rows of a SQLite table or sheet that are copied for a query."""
MAX_COPIED_BYTES = 1 << 30
_BATCH = 10_000
_WHOLE_BYTES = 64 << 20
"""Maximum size in bytes of a file that is read completely to determine its column types. Of a
larger file, only the first rows are read."""
NUM_SAMPLES = 3


class TableSqlRequest(msgspec.Struct, frozen=True):
    """A query over tables, as sent to the process that runs it.

    Without a query, the process describes the tables instead.
    """

    tables: list[TableLocation]
    query: str = ""
    params: list[Any] | dict[str, Any] = []
    limit_s: float = QUERY_S
    max_text_bytes: int = 0
    """Limit on the text of all sheets in bytes, if tables are described."""


_processes = RequestProcessPool(f"{__name__}:serve", is_bare=True)


def query_tables(
    tables: Sequence[TableLocation],
    query: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    limit_s: float = QUERY_S,
) -> list[tuple[Any, ...]]:
    """Run one SELECT over tables and return its rows.

    Raises ValueError, PermissionError or TimeoutError with a message that says what is wrong with
    the query.
    """
    given = dict(params) if isinstance(params, Mapping) else list(params)
    asked = TableSqlRequest(list(tables), query, given, limit_s)
    return [tuple(row) for row in _processes.ask(asked, limit_s)]


def describe_tables(
    tables: Sequence[TableLocation], limit_s: float, max_text_bytes: int = 0
) -> list[TableInfo]:
    """Return a description of the tables in one file: their columns, number of rows and first rows.

    If a file can hold several tables and ``member`` is not given, all are described. Raises
    ValueError or TimeoutError if the file cannot be read.
    """
    asked = TableSqlRequest(list(tables), limit_s=limit_s, max_text_bytes=max_text_bytes)
    return msgspec.convert(_processes.ask(asked, limit_s), list[TableInfo])


# --- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer queries over tables from standard input until it is closed.

    This is the main function of the child process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # DuckDB prints the progress of long queries to the standard output, which is for answers only.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    kept: dict[str, _Tables] = {}

    def answer(request: list[bytes]) -> list[bytes]:
        asked: TableSqlRequest = decode(request[0], TableSqlRequest)
        return encode_outcome(lambda: _answer_by_name(asked, kept))

    answer_requests(answer)


def _answer_by_name(asked: TableSqlRequest, kept: dict[str, _Tables]) -> Any:
    """Answer a query over tables, and replace host paths in its errors with file names.

    Errors contain file names instead of host paths, because models read them.
    """
    try:
        return _answer(asked, kept)
    except (ValueError, PermissionError, TimeoutError) as error:
        said = str(error)
        for each in asked.tables:
            said = said.replace(each.path, os.path.basename(each.path))
        said = textwrap.shorten(said, _MAX_SAID_CHARS, placeholder=" …")
        kinds = (PermissionError, TimeoutError, ValueError)
        raise next(kind for kind in kinds if isinstance(error, kind))(said) from None


def _answer(asked: TableSqlRequest, kept: dict[str, _Tables]) -> Any:
    key = repr(asked.tables)
    if not asked.query or key not in kept:
        for each in kept.values():
            each.close()
        kept.clear()
        tables = _Tables(asked.tables)
        # A context that stays mapped would keep its memory after its run.
        if asked.query and all(each.kind != "context" for each in asked.tables):
            kept[key] = tables
    else:
        tables = kept[key]
    try:
        with tables.interrupted_after(asked.limit_s):
            if asked.query:
                return tables.rows(asked.query, asked.params)
            return msgspec.to_builtins(tables.describe(asked.max_text_bytes))
    finally:
        if key not in kept:
            tables.close()


_MAX_SAID_CHARS = 400
_CSV_ADVICE = re.compile(r"\n(?:Possible fixes|Possible Solution|The search space used)")
_SNIFFED = {
    "delim": "Delimiter",
    "quote": "Quote",
    "escape": "Escape",
    "new_line": "NewLineDelimiter",
    "comment": "Comment",
    "dateformat": "DateFormat",
    "timestampformat": "TimestampFormat",
}
"""Option of ``read_csv`` -> column of ``sniff_csv`` that holds its detected value."""


class _Tables:
    """An in-memory DuckDB database in which each table can be queried by its name."""

    def __init__(self, tables: Sequence[TableLocation]) -> None:
        import duckdb

        self._tables = list(tables)
        self._copied: dict[str, tuple[int, ...]] = {}
        self._notes: dict[str, str] = {}
        """Name of a CSV table -> what is unusual about its header."""
        self._values: list[Any] = []
        self._contexts: dict[str, Any] = {}
        self._database = duckdb.connect(
            ":memory:",
            config={
                "allow_community_extensions": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": f"{MEMORY_BYTES >> 20}MiB",
                "python_enable_replacements": "false",  # a name is never a variable of this module
                "temp_directory": "",
                "threads": str(os.cpu_count() or 1),
            },
        )
        try:
            self._open()
        except duckdb.Error as error:
            self.close()
            raise ValueError(_one_line(error)) from None

    def close(self) -> None:
        self._database.close()
        self._values.clear()
        self._contexts.clear()

    def _open(self) -> None:
        run = self._database.execute
        attached = {each.path: f"file_{n}" for n, each in enumerate(self._tables)}
        read = sorted(
            {each.path for each in self._tables if each.kind in ("csv", "jsonl", "parquet")}
        )
        run(f"SET allowed_paths = [{', '.join(map(_sql_string, read))}]")
        for path in {each.path for each in self._tables if each.kind == "duckdb"}:
            run(f"ATTACH {_sql_string(path)} AS {attached[path]} (READ_ONLY)")
        run("SET enable_external_access = false")
        run("SET enable_progress_bar = false")
        run("SET lock_configuration = true")
        self._tables = [
            each
            for given in self._tables
            for each in self._tables_in_file(given, attached[given.path])
        ]
        for number, each in enumerate(self._tables):
            if each.kind in ("csv", "jsonl") and not each.scan:
                each = msgspec.structs.replace(each, scan=self._scan(each))
                self._tables[number] = each
            name = _sql_identifier(each.name)
            if each.kind == "parquet":
                run(f"CREATE VIEW {name} AS FROM read_parquet({_sql_string(each.path)})")
            elif each.kind == "duckdb":
                run(f"CREATE VIEW {name} AS FROM {attached[each.path]}.{each.member}")
            elif each.kind == "arrow":
                self._open_arrow(each)
            elif each.kind == "context":
                self._open_value(each)
            elif each.scan:
                run(f"CREATE VIEW {name} AS {each.scan}")

    def _tables_in_file(self, given: TableLocation, attached: str) -> list[TableLocation]:
        """Return the location of each table in a file, such as each sheet of a workbook.

        An entry that already names its table, or whose file is a single table, is returned
        unchanged.
        """
        if given.member or given.kind not in ("duckdb", "sqlite", "xlsx"):
            return [given]
        if given.kind == "duckdb":
            found = self._database.execute(
                "SELECT schema_name, table_name FROM (SELECT schema_name, table_name, database_name"
                " FROM duckdb_tables() UNION ALL SELECT schema_name, view_name, database_name FROM "
                "duckdb_views() WHERE NOT internal) WHERE database_name = ? ORDER BY ALL",
                [attached],
            ).fetchall()
            names = [f"{_sql_identifier(schema)}.{_sql_identifier(name)}" for schema, name in found]
        elif given.kind == "sqlite":
            with contextlib.closing(_open_sqlite(given.path)) as database:
                names = [
                    name
                    for (name,) in database.execute(
                        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND "
                        "substr(name, 1, 7) <> 'sqlite_' ORDER BY name"
                    )
                ]
        else:
            with _open_workbook(given.path) as book:
                names = [sheet.title for sheet in book.worksheets]
        return [
            msgspec.structs.replace(given, name=f"table_{number}", member=name)
            for number, name in enumerate(names)
        ]

    def _scan(self, each: TableLocation) -> str:
        """Return the SQL query that reads a CSV or JSONL file with a type for each column."""
        whole = ", sample_size = -1" if os.path.getsize(each.path) <= _WHOLE_BYTES else ""
        if each.kind == "csv":
            return self._scan_csv(each, whole)
        read = f"FROM read_json({_sql_string(each.path)}, format = 'newline_delimited'"
        found = self._database.execute(f"DESCRIBE {read}{whole})").fetchall()
        return f"{read}, columns = {_sql_columns((name, kind) for name, kind, *_ in found)})"

    def _scan_csv(self, each: TableLocation, whole: str) -> str:
        # Its column "Prompt" is such a query, too, but does not quote the names of columns.
        path = _sql_string(each.path)
        result = self._database.execute(f"SELECT * FROM sniff_csv({path}{whole})")
        names = [column[0] for column in result.description]
        found = dict(zip(names, result.fetchone() or (), strict=True))
        options = {
            option: "" if found[name] == "(empty)" else found[name]
            for option, name in _SNIFFED.items()
            if found[name]
        }
        said = ", ".join(f"{option} = {_sql_string(value)}" for option, value in options.items())
        columns = _sql_columns((column["name"], column["type"]) for column in found["Columns"])
        num_skipped = int(found["SkipRows"])
        self._notes[each.name] = _header_note(num_skipped, bool(found["HasHeader"]))
        with open(each.path, encoding="utf-8", errors="replace") as file:
            skipped = list(itertools.islice(file, num_skipped))
        if skipped and (not found["HasHeader"] or any(found["Delimiter"] in li for li in skipped)):
            # A title has one field; DuckDB also skips records, until those that follow are regular.
            raise ValueError(f"the first {pluralize(num_skipped, 'line')} would be lost")
        return (
            f"FROM read_csv({path}, auto_detect = false, {said}, "
            f"skip = {num_skipped}, header = {bool(found['HasHeader'])}, "
            f"columns = {columns})"
        )

    def _open_value(self, each: TableLocation) -> None:
        import pyarrow

        # Here, as its import takes as long as that of DuckDB, and files do not need it.
        from ramify.sandbox.base import ProtocolError, arrow_table, unpack_value

        try:
            if each.path not in self._contexts:
                with open(each.path, "rb") as file:
                    data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                self._contexts[each.path], _ = unpack_value(data)
            value = self._contexts[each.path]
            table = arrow_table(value[each.member] if isinstance(value, dict) else value)
            table.validate()
        except (pyarrow.ArrowException, ProtocolError, OSError, LookupError, ValueError) as error:
            raise ValueError(
                f"the table {each.name} cannot be read here: {_one_line(error)}"
            ) from None
        self._values.append(table)
        self._database.register(each.name, table)

    def _open_arrow(self, each: TableLocation) -> None:
        import pyarrow
        import pyarrow.dataset
        import pyarrow.feather

        try:
            with open(each.path, "rb") as file:
                is_old = file.read(4) == b"FEA1"
            value: Any = (
                pyarrow.feather.read_table(each.path)
                if is_old
                else pyarrow.dataset.dataset(each.path, format="ipc")
            )
            if not is_old and not self._values and not each.member:
                # DuckDB trusts the offsets in a buffer; a damaged file must not reach it.
                for batch in value.to_batches():
                    batch.validate(full=True)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise ValueError(_one_line(error)) from None
        self._values.append(value)
        self._database.register(each.name, value)

    @contextlib.contextmanager
    def interrupted_after(self, limit_s: float) -> Iterator[None]:
        import duckdb

        late = threading.Event()

        def interrupt() -> None:
            late.set()
            self._database.interrupt()

        timer = threading.Timer(limit_s, interrupt)
        timer.start()
        try:
            yield
        except duckdb.InterruptException:
            raise TimeoutError(
                f"sql: stopped after {limit_s:g} s: narrow it, or aggregate fewer rows"
            ) from None
        except duckdb.PermissionException as error:
            raise PermissionError(
                f"sql: only the tables of this session are allowed here ({_one_line(error)})"
            ) from None
        except duckdb.OutOfMemoryException:
            raise ValueError(
                f"sql: it needs more than {MEMORY_BYTES >> 30} GB of memory: narrow it, or "
                "aggregate fewer groups"
            ) from None
        except (duckdb.Error, RuntimeError) as error:
            raise ValueError(f"sql: {_one_line(error)}") from None
        finally:
            timer.cancel()

    def rows(self, query: str, params: Any) -> list[tuple[Any, ...]]:
        import duckdb

        statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise PermissionError(
                "sql: only one SELECT is allowed here (or DESCRIBE, SUMMARIZE, SHOW TABLES)"
            )
        named = query.casefold()
        for each in self._tables:
            if each.kind in ("sqlite", "xlsx") and each.name.casefold() in named:
                self._copy(each)
        return self._read(query, params)

    def _read(self, query: str, params: Any = None) -> list[tuple[Any, ...]]:
        bounded = BoundedRowCollector()
        self._database.execute("BEGIN TRANSACTION READ ONLY")
        try:
            result = self._database.execute(query, params or None)
            while rows := result.fetchmany(1000):
                for row in rows:
                    bounded.add(tuple(map(to_session_value, row)))
        finally:
            self._database.execute("ROLLBACK")
        return bounded.rows

    def describe(self, max_text_bytes: int) -> list[TableInfo]:
        infos = []
        for each in self._tables:
            text, note = "", self._notes.get(each.name, "")
            if each.kind == "sqlite":
                with contextlib.suppress(sqlite3.Error):  # a view that does not run, for example
                    infos.append(_sqlite_info(each))
                continue
            if each.kind == "xlsx":
                text, note = _sheet_text(each, max_text_bytes)
                max_text_bytes -= len(text)
                if not text:
                    continue
                self._copy(each)
            name = _sql_identifier(each.name)
            columns = [(row[0], row[1]) for row in self._read(f"DESCRIBE {name}")]
            ((count,),) = self._read(f"SELECT count(*) FROM {name}")
            samples = self._read(f"SELECT * FROM {name} LIMIT {NUM_SAMPLES}")
            infos.append(TableInfo(each, columns, count, samples, note, text))
            if each.kind == "xlsx":
                self._drop_copy(each)
        return infos

    # --- copies

    def _drop_copy(self, each: TableLocation) -> None:
        if self._copied.pop(each.name, None):
            self._database.execute(f"DROP TABLE IF EXISTS {_sql_identifier(each.name)}")

    def _copy(self, each: TableLocation) -> None:
        """Copy a SQLite table or a workbook's sheet into DuckDB, unless an up-to-date copy
        exists."""
        version = tuple(
            number
            for path in (each.path, f"{each.path}-wal")
            if os.path.exists(path)
            for number in (os.stat(path).st_mtime_ns, os.stat(path).st_size)
        )
        if self._copied.get(each.name) == version:
            return
        self._drop_copy(each)
        import pyarrow

        kinds, names, batches = _sqlite_rows(each) if each.kind == "sqlite" else _sheet_rows(each)
        schema = pyarrow.schema(
            [
                (name, _arrow_type(kind))
                for name, kind in zip(_unique_names(names), kinds, strict=True)
            ]
        )

        def converted() -> Iterator[Any]:
            num_rows = num_bytes = 0
            for rows in batches:
                num_rows += len(rows)
                columns = [
                    pyarrow.array(
                        [_convert_to_kind(value, kind) for value in column], type=_arrow_type(kind)
                    )
                    for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
                ]
                batch = pyarrow.record_batch(columns, schema=schema)
                num_bytes += batch.nbytes
                if num_rows > MAX_COPIED_ROWS or num_bytes > MAX_COPIED_BYTES:
                    raise ValueError(
                        f"{each.name} has more than {MAX_COPIED_ROWS:,} rows or "
                        f"{MAX_COPIED_BYTES >> 30} GB, too many to be copied"
                        + (": query its file alone, with db=" if each.kind == "sqlite" else "")
                    )
                yield batch

        reader = pyarrow.RecordBatchReader.from_batches(schema, converted())
        self._database.register("copied rows", reader)
        try:
            self._database.execute(
                f'CREATE TABLE {_sql_identifier(each.name)} AS FROM "copied rows"'
            )
        finally:
            self._database.unregister("copied rows")
        self._copied[each.name] = version


def _header_note(num_skipped: int, has_header: bool) -> str:
    """Return a note that says if lines of a CSV file were skipped or its header is missing.

    It is empty if there is nothing to say.
    """
    skipped = pluralize(num_skipped, "line")
    notes = [f"the first {skipped} not in the table"] if num_skipped else []
    return "; ".join(notes + ["no header line"] * (not has_header))


def _open_sqlite(path: str) -> sqlite3.Connection:
    from urllib.parse import quote

    database = sqlite3.connect(
        f"file:{quote(path)}?mode=ro", uri=True, timeout=5.0, check_same_thread=False
    )
    database.execute("PRAGMA query_only = 1")
    database.execute("PRAGMA trusted_schema = 0")
    database.text_factory = lambda data: data.decode("utf-8", "replace")
    return database


_GUESSED_ROWS = 1000
"""Number of rows of a SQLite table from which its column types are inferred."""
_COUNT_S = 2.0
"""Time limit for counting the rows of one SQLite table, in seconds."""
_DUCKDB_TYPES = {"integer": "BIGINT", "real": "DOUBLE", "text": "VARCHAR", "blob": "BLOB"}


def _sqlite_info(each: TableLocation) -> TableInfo:
    """Describe a SQLite table without copying it.

    The number of rows is -1 if counting takes too long.
    """
    table = _sql_identifier(each.member)
    with contextlib.closing(_open_sqlite(each.path)) as database:
        until = time.monotonic() + _COUNT_S
        database.set_progress_handler(lambda: time.monotonic() > until, 10_000)
        cursor = database.execute(f"SELECT * FROM {table} LIMIT {_GUESSED_ROWS}")
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchall()
        kinds = [
            _common_kind({_KINDS[type(v)] for v in column} - {"null"})
            for column in zip(*rows, strict=True)
        ]
        columns = [
            (name, _DUCKDB_TYPES[kind])
            for name, kind in zip(names, kinds or ["text"] * len(names), strict=True)
        ]
        try:
            ((count,),) = database.execute(f"SELECT count(*) FROM {table}")
        except sqlite3.OperationalError:
            count = -1
    return TableInfo(each, columns, count, rows[:NUM_SAMPLES])


_KINDS = {int: "integer", float: "real", str: "text", bytes: "blob", type(None): "null"}


def _sqlite_rows(each: TableLocation) -> tuple[list[str], list[str], Iterator[list[Any]]]:
    """Return the column types, the column names and the rows of a SQLite table.

    The rows come in batches. The kinds are inferred from the values, because SQLite stores any kind
    of value in any column.
    """
    database = _open_sqlite(each.path)
    table = _sql_identifier(each.member)
    names = [column[0] for column in database.execute(f"SELECT * FROM {table} LIMIT 0").description]
    kinds = []
    for name in names:
        found = {
            kind
            for (kind,) in database.execute(
                f"SELECT DISTINCT typeof({_sql_identifier(name)}) FROM {table}"
            )
        } - {"null"}
        kinds.append(_common_kind(found))

    def batches() -> Iterator[list[Any]]:
        with contextlib.closing(database):
            cursor = database.execute(f"SELECT * FROM {table}")
            while rows := cursor.fetchmany(_BATCH):
                yield rows

    return kinds, names, batches()


@contextlib.contextmanager
def _open_workbook(path: str, *, with_formulas: bool = False) -> Iterator[Any]:
    import warnings

    import openpyxl

    warnings.simplefilter("ignore")  # openpyxl warns of what it does not keep
    with contextlib.ExitStack() as stack:
        try:
            # Given a path, openpyxl would refuse a name without the ending .xlsx.
            book = openpyxl.load_workbook(
                stack.enter_context(open(path, "rb")),
                read_only=True,
                data_only=not with_formulas,
                keep_links=False,
            )
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 -- a damaged workbook raises anything
            raise ValueError(_one_line(error) or type(error).__name__) from None
        stack.callback(book.close)
        yield book


def _sheet(each: TableLocation, *, with_formulas: bool = False) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one sheet of a workbook.

    Empty rows are skipped.
    """
    with _open_workbook(each.path, with_formulas=with_formulas) as book:
        try:
            sheet = book[each.member]
            sheet.reset_dimensions()  # what the file says about its size may be wrong
            for row in sheet.iter_rows(values_only=True):
                if any(value is not None for value in row):
                    yield row
        except (ValueError, MemoryError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 -- a damaged sheet raises anything
            raise ValueError(_one_line(error) or type(error).__name__) from None


def _sheet_rows(each: TableLocation) -> tuple[list[str], list[str], Iterator[list[Any]]]:
    """Return the column types, the column names and the rows of a workbook's sheet.

    The rows come in batches. The first row gives the names if all its cells are text.
    """
    found: list[set[str]] = []
    head: tuple[Any, ...] = ()
    for number, row in enumerate(_sheet(each)):
        if number == 0:
            head = row
        found += [set() for _ in range(len(row) - len(found))]
        is_names = number == 0 and all(isinstance(value, str | None) for value in row)
        for column, value in zip(found, row, strict=False):
            if value is not None and not is_names:
                column.add(_kind_of(value))
    has_names = bool(head) and all(isinstance(value, str | None) for value in head)
    names = [
        str(head[n]) if has_names and n < len(head) and head[n] else f"column{n + 1}"
        for n in range(len(found))
    ]

    def batches() -> Iterator[list[Any]]:
        rows: list[Any] = []
        for number, row in enumerate(_sheet(each)):
            if number == 0 and has_names:
                continue
            rows.append((*row, *[None] * (len(names) - len(row)))[: len(names)])
            if len(rows) == _BATCH:
                yield rows
                rows = []
        if rows:
            yield rows

    return [_common_kind(kinds) for kinds in found], names, batches()


_COUNTED_CELLS = 1_000_000
"""Maximum number of cells of a sheet that are checked for formulas without a stored value."""


def _sheet_text(each: TableLocation, max_bytes: int) -> tuple[str, str]:
    """Return the rows of a sheet as tab-separated lines, and a note on missing formula results.

    A formula's result is missing if the file does not store its value. Raises ValueError if the
    text exceeds ``max_bytes``.
    """
    lines, num_bytes, num_cells, missing = [], 0, 0, 0
    for row, formulas in zip(_sheet(each), _sheet(each, with_formulas=True), strict=False):
        line = "\t".join("" if value is None else _cell_text(value) for value in row).rstrip("\t")
        num_bytes += len(line) + 1
        if num_bytes > max_bytes:
            raise ValueError(f"its text is longer than {max_bytes / 1e6:,.0f} MB")
        lines.append(line)
        num_cells += len(row)
        if num_cells <= _COUNTED_CELLS:
            missing += sum(
                value is None and isinstance(formula, str) and formula.startswith("=")
                for value, formula in zip(row, formulas, strict=False)
            )
    note = f"{pluralize(missing, 'formula')} without a stored value" if missing else ""
    return "\n".join(lines), note


def _cell_text(value: Any) -> str:
    return " ".join(str(to_session_value(value)).split())


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "text"
    if isinstance(value, datetime.datetime):
        return "datetime"
    if isinstance(value, datetime.date):
        return "date"
    return "real" if isinstance(value, float) else "text"


def _common_kind(kinds: set[str]) -> str:
    """Return the most specific column type that can hold values of all given types."""
    if len(kinds) <= 1:
        return next(iter(kinds), "text")
    if kinds == {"integer", "real"}:
        return "real"
    return "datetime" if kinds == {"date", "datetime"} else "text"


def _arrow_type(kind: str) -> Any:
    """Return the Arrow type of a column kind."""
    import pyarrow

    return {
        "integer": pyarrow.int64,
        "real": pyarrow.float64,
        "text": pyarrow.string,
        "blob": pyarrow.binary,
        "bool": pyarrow.bool_,
        "date": pyarrow.date32,
        "datetime": lambda: pyarrow.timestamp("us"),
    }[kind]()


def _convert_to_kind(value: Any, kind: str) -> Any:
    """Convert a value to the type of its table column, such as a date to a datetime."""
    if value is None:
        return None
    if kind == "text" and not isinstance(value, str):
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    if kind == "real":
        return float(value)
    if kind == "datetime" and not isinstance(value, datetime.datetime):
        return datetime.datetime.combine(value, datetime.time())
    return value


def _unique_names(names: Sequence[str]) -> list[str]:
    """Make column names distinct by adding numbers to repeated ones.

    DuckDB requires that they differ even without regard to case.
    """
    seen: set[str] = set()
    unique = []
    for name in names:
        new, number = name, 2
        while new.casefold() in seen:
            new, number = f"{name}_{number}", number + 1
        seen.add(new.casefold())
        unique.append(new)
    return unique


def _sql_string(value: str | Path) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _sql_columns(columns: Iterable[tuple[str, str]]) -> str:
    """Format column names and types as SQL for the ``columns`` option of DuckDB's file readers."""
    return (
        "{" + ", ".join(f"{_sql_string(name)}: {_sql_string(kind)}" for name, kind in columns) + "}"
    )


def _sql_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _one_line(error: Exception) -> str:
    """Return a DuckDB error's message on one line, without query excerpt and ``read_csv``
    advice."""
    return " ".join(_CSV_ADVICE.split(str(error).split("\nLINE ")[0])[0].split())
