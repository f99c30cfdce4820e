"""Loads databases on PostgreSQL and MySQL servers as sources.

A URL names the database. The context gets its schema with sample rows, and sessions get
``sql(query, db=…)`` in the server's dialect.

    postgresql://user@host/shop    password: in the URL, PGPASSWORD, or ~/.pgpass
    mysql://user@host/shop         password: in the URL, or MYSQL_PWD
    …/shop?sslmode=verify-full     options of TLS, by the names of each database's tools; others are
                                   refused

Every query is a read-only transaction that is rolled back, and is limited in time, rows and bytes.
The server has a time limit, and so has the process that waits for it, which is killed if necessary.
Only that process knows the password: names, errors and the record of a run have the URL without it.
Queries run on the host, as a session reaches no network. The server decides what the user in the
URL may read, so name one with few rights. Tables in files are handled by ``session_tables.py``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ramify.actors.helper_process import answer_requests
from ramify.actors.message_encoding import decode
from ramify.format_quantities import pluralize
from ramify.pip_install_command import install_command
from ramify.sources.database_urls import PASSWORD_VARIABLES, DatabaseAddress, parse_address
from ramify.sources.loaded_sources import SourceCollector, UnreadableSourceError
from ramify.sources.query_process import (
    QUERY_S,
    BoundedRowCollector,
    RequestProcessPool,
    encode_outcome,
    to_session_value,
)

CONNECT_S = 10.0
_MAX_TABLES = 200
_NUM_SAMPLES = 3
_MAX_SHOWN = 80


class DatabaseQueryRequest(msgspec.Struct, frozen=True):
    """A database query, as sent to the process that runs it."""

    address: DatabaseAddress
    query: str
    params: list[Any] | dict[str, Any] = []
    limit_s: float = QUERY_S


_processes = RequestProcessPool(f"{__name__}:serve", is_bare=True)


def add_database_description(url: str, loading: SourceCollector) -> None:
    """Add a description of the database at ``url`` to the context, and a query function to
    sessions.

    Raises UnreadableSourceError if the server cannot be read, and SourceError for an invalid URL.
    """
    address = parse_address(url)
    try:
        text, num_tables = _describe_database(address)
    except (ValueError, PermissionError, TimeoutError) as error:
        reason = str(error).removeprefix("sql: ")
        variable = PASSWORD_VARIABLES[address.kind]
        remedy = f"; set {variable} if it needs a password" if not address.password else ""
        raise UnreadableSourceError(
            "cannot be read", f"{reason}; check address and user{remedy or ' and password'}"
        ) from None
    name, number = address.database, 2
    while name in loading.servers or name in loading.databases:
        name, number = f"{address.database} ({number})", number + 1

    def sql(query: str, params: Any = ()) -> list[tuple[Any, ...]]:
        return query_server(address, query, params)

    loading.servers[name] = sql
    product = "PostgreSQL" if address.kind == "postgresql" else "MySQL"
    head = f'{product} database {name!r}. Query it with sql("SELECT …", db={name!r}), in its '
    head += "dialect, with %s for parameters.\n\n"
    loading.count_bytes(len(text), name)
    detail = f"{product}: {pluralize(num_tables, 'table')}"
    loading.add(name, head + text, "server", len(text), detail)


def query_server(
    address: DatabaseAddress, query: str, params: Any = (), limit_s: float = QUERY_S
) -> list[tuple[Any, ...]]:
    """Run a query on a database server in a read-only transaction, and return its rows.

    Raises ValueError, PermissionError or TimeoutError. The messages do not contain the password.
    """
    given = dict(params) if isinstance(params, Mapping) else list(params)
    rows = _processes.ask(DatabaseQueryRequest(address, query, given, limit_s), limit_s, CONNECT_S)
    return [tuple(row) for row in rows]


def _describe_database(address: DatabaseAddress) -> tuple[str, int]:
    is_postgres = address.kind == "postgresql"
    mine = (
        "table_schema NOT IN ('pg_catalog', 'information_schema')"
        if is_postgres
        else "table_schema = DATABASE()"
    )
    columns = query_server(
        address,
        "SELECT table_schema, table_name, column_name, data_type FROM information_schema.columns "
        f"WHERE {mine} ORDER BY table_schema, table_name, ordinal_position",
    )
    tables: dict[tuple[str, str], list[str]] = {}
    for schema, table, column, kind in columns:
        tables.setdefault((schema, table), []).append(f"{column} {kind}")
    parts = []
    for (schema, table), found in list(tables.items())[:_MAX_TABLES]:
        mark = '"' if is_postgres else "`"
        quoted = ".".join(
            mark + name.replace(mark, mark * 2) + mark
            for name in ((schema, table) if is_postgres and schema != "public" else (table,))
        )
        try:
            rows = query_server(
                address, f"SELECT * FROM {quoted} LIMIT {_NUM_SAMPLES}".replace("%", "%%"), (), 5.0
            )
        except (ValueError, PermissionError, TimeoutError):  # no right to read it, for example
            rows = []
        samples = [f"--   ({', '.join(map(_short_repr, row))})" for row in rows]
        parts.append("\n".join([f"{quoted} ({', '.join(found)})", *samples]))
    return "\n\n".join(parts), len(tables)


def _short_repr(value: Any) -> str:
    shown = f"<{len(value):,} bytes>" if isinstance(value, bytes) else repr(value)
    return shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 1] + "…"


# --- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer database queries from standard input until it is closed.

    This is the main function of the child process.
    """
    answer_requests(_answer)


def _answer(request: list[bytes]) -> list[bytes]:
    asked: DatabaseQueryRequest = decode(request[0], DatabaseQueryRequest)
    ask = _query_postgresql if asked.address.kind == "postgresql" else _query_mysql
    return encode_outcome(lambda: ask(asked))


def _query_postgresql(asked: DatabaseQueryRequest) -> list[tuple[Any, ...]]:
    address = asked.address
    try:
        import psycopg
    except ImportError:
        raise ValueError(f"asking PostgreSQL needs {install_command('inputs')}") from None
    try:
        given: dict[str, Any] = {"user": address.user, "password": address.password}
        given = {name: value for name, value in given.items() if value}
        given |= {name.replace("-", "_"): value for name, value in address.options.items()}
        with psycopg.connect(
            host=address.host,
            port=address.port,
            dbname=address.database,
            **given,
            connect_timeout=int(CONNECT_S) // 2,
            options=f"-c statement_timeout={int(asked.limit_s * 1000)} "
            "-c default_transaction_read_only=on",
        ) as connection:
            connection.read_only = True
            # stream() sends one statement only, and its rows arrive one by one.
            rows: Any = connection.cursor().stream(_read_only_query(asked), asked.params or None)
            with contextlib.closing(rows):  # it holds the connection's lock until it is closed
                return _collect_bounded_rows(rows)
    except psycopg.errors.QueryCanceled:
        raise TimeoutError(f"sql: stopped after {asked.limit_s:g} s: narrow it") from None
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.ReadOnlySqlTransaction,
    ) as error:
        raise PermissionError(f"sql: {_error_without_password(address, error)}") from None
    except (psycopg.Error, UnicodeError) as error:
        raise ValueError(f"sql: {_error_without_password(address, error)}") from None


def _query_mysql(asked: DatabaseQueryRequest) -> list[tuple[Any, ...]]:
    address = asked.address
    try:
        import pymysql
        import pymysql.cursors
    except ImportError:
        raise ValueError(f"asking MySQL needs {install_command('inputs')}") from None
    try:
        connection = pymysql.connect(
            host=address.host,
            port=address.port,
            user=address.user or None,
            password=address.password,
            database=address.database,
            connect_timeout=int(CONNECT_S) // 2,
            read_timeout=asked.limit_s + 1,
            local_infile=False,
            charset="utf8mb4",
            cursorclass=pymysql.cursors.SSCursor,
            **_mysql_tls(address.options),
        )
    except (pymysql.Error, OSError, RuntimeError) as error:
        raise ValueError(f"sql: {_error_without_password(address, error)}") from None
    try:
        with connection.cursor() as cursor:
            _limit_time(cursor, asked.limit_s)
            cursor.execute("START TRANSACTION READ ONLY")
        with connection.cursor() as cursor:
            cursor.execute(_read_only_query(asked), asked.params or None)
            return _collect_bounded_rows(cursor)
    except pymysql.Error as error:
        number = error.args[0] if error.args else 0
        if number in _TIMED_OUT:
            raise TimeoutError(f"sql: stopped after {asked.limit_s:g} s: narrow it") from None
        kind = PermissionError if number in _REFUSED else ValueError
        raise kind(f"sql: {_error_without_password(address, error)}") from None
    finally:
        connection._force_close()  # not close(), which would read the rest of the rows


def _mysql_tls(options: Mapping[str, str]) -> dict[str, Any]:
    """Convert the TLS options of a database URL to arguments for the MySQL driver.

    Each option has the same meaning as in MySQL's own tools. Without options, TLS is used if the
    server offers it, but its certificate is not verified.
    """
    authority = options.get("ssl-ca")
    mode = options.get("ssl-mode", "").upper() or ("VERIFY_CA" if authority else "PREFERRED")
    if mode == "DISABLED":
        return {"ssl_disabled": True}
    if mode == "PREFERRED" and not options.keys() & {"ssl-ca", "ssl-cert", "ssl-key"}:
        return {}
    import ssl

    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = mode == "VERIFY_IDENTITY"
    context.verify_mode = ssl.CERT_REQUIRED if mode.startswith("VERIFY") else ssl.CERT_NONE
    if "ssl-cert" in options:
        context.load_cert_chain(options["ssl-cert"], options.get("ssl-key"))
    return {"ssl": context}


_READING = ("select", "with", "show", "describe", "explain", "values", "table")
_WRITES = re.compile(r"outfile|dumpfile")
_TIMED_OUT = (1028, 1317, 1969, 2013, 3024)
_REFUSED = (1044, 1045, 1142, 1227, 1290, 1792)


def _limit_time(cursor: Any, limit_s: float) -> None:
    """Set a time limit for all queries of a MySQL or MariaDB connection.

    MariaDB and MySQL use different variables for it, in seconds and in milliseconds.
    """
    import pymysql

    try:
        cursor.execute(f"SET SESSION max_statement_time = {limit_s:f}")
    except pymysql.Error:
        cursor.execute(f"SET SESSION max_execution_time = {int(limit_s * 1000)}")


def _read_only_query(asked: DatabaseQueryRequest) -> str:
    """Return the text of a database query, after checking that it only reads data.

    Raises PermissionError otherwise. A read-only transaction alone is not enough, since it permits
    COPY and INTO OUTFILE, which write files on the server.
    """
    words = asked.query.casefold()
    if not words.lstrip(" \t\r\n(").startswith(_READING) or _WRITES.search(words):
        raise PermissionError("sql: only a SELECT is allowed here")
    return asked.query


def _collect_bounded_rows(cursor: Iterable[Any]) -> list[tuple[Any, ...]]:
    bounded = BoundedRowCollector()
    for row in cursor:
        bounded.add(tuple(map(to_session_value, row)))
    return bounded.rows


def _error_without_password(address: DatabaseAddress, error: Exception) -> str:
    """Return a database error's message on one line, without the password."""
    text = " ".join(str(error).split())[:400]
    return text.replace(address.password, "«redacted»") if address.password else text
