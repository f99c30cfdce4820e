"""SQL queries in a separate process that can be killed. SQLite checks its time limit between steps,
and one step may take arbitrarily long.

    sql ── SqlQuery ──> idle query process ── SqlAnswer ──> rows or an error
                    └── no reply within the limit: it is killed, and the next query starts another

``instr`` over two long values, or ``LIKE '%a%a%a%b'``, is one step. Processes are started on
demand, one for each concurrent query, and end with the host process.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ramify.actors.answering_process import answer_requests, ask, start
from ramify.actors.child_process import IdleProcesses
from ramify.actors.run_messages import decode, encode
from ramify.sources.sqlite_query import QUERY_S, Params, run_query

GRACE_S = 10.0
"""Time beyond a query's limit to start the process and send the rows."""
_ERRORS = {kind.__name__: kind for kind in (ValueError, PermissionError, TimeoutError)}


class SqlQuery(msgspec.Struct, frozen=True):
    """A query, for the process that runs it."""

    path: str
    query: str
    params: list[Any] | dict[str, Any]
    limit_s: float


class SqlAnswer(msgspec.Struct, frozen=True):
    """Its rows, or its error."""

    rows: list[tuple[Any, ...]] = []
    kind: str = ""
    """Name of the error's class; empty if there is none."""
    text: str = ""


_processes = IdleProcesses(functools.partial(start, f"{__name__}:serve"))


def query_in_time(
    path: Path,
    query: str,
    params: Params = (),
    limit_s: float = QUERY_S,
    grace_s: float = GRACE_S,
) -> list[tuple[Any, ...]]:
    """Like ``run_query``, but guarantee the first bytes of the reply within ``limit_s + grace_s``
    seconds or raise TimeoutError."""
    asked = _encoded_query(path, query, params, limit_s)
    try:
        with _processes.one() as process:
            (data,) = ask(process, [asked], limit_s + grace_s)
            answer: SqlAnswer = decode(data, SqlAnswer)
    except TimeoutError:
        raise TimeoutError(
            f"sql: stopped after {limit_s:g} s: one of its functions takes too long on such values"
        ) from None
    except (EOFError, OSError):
        raise ValueError(
            "sql: the query ended the process that it ran in: ask for less at once"
        ) from None
    if answer.kind:
        raise _ERRORS.get(answer.kind, ValueError)(answer.text)
    return answer.rows


def serve() -> None:
    """Answer queries from standard input until it is closed."""
    answer_requests(_answered)


def _answered(request: list[bytes]) -> list[bytes]:
    """Run the query in ``request``."""
    asked: SqlQuery = decode(request[0], SqlQuery)
    try:
        rows = run_query(Path(asked.path), asked.query, asked.params, asked.limit_s)
        return [encode(SqlAnswer(rows))]
    except Exception as error:  # noqa: BLE001 -- raised in the process that asked
        return [encode(SqlAnswer(kind=type(error).__name__, text=str(error)))]


def _encoded_query(path: Path, query: str, params: Params, limit_s: float) -> bytes:
    """Encode a query for the helper process. Raises ValueError for a parameter that SQLite cannot
    store."""
    given = dict(params) if isinstance(params, Mapping) else list(params)
    try:
        return encode(SqlQuery(str(path), query, given, limit_s))
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"sql: params: {error}: give numbers, text, bytes or None for each ? or :name"
        ) from None
