"""Runs SQLite queries in a separate process that can be killed.

This is necessary because SQLite checks its time limit only between steps, and one step may take
arbitrarily long: ``instr`` over two long values, or ``LIKE '%a%a%a%b'``. The pool of such processes
is in ``query_process.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ramify.actors.helper_process import answer_requests
from ramify.actors.message_encoding import decode
from ramify.sources.query_process import GRACE_S, QUERY_S, RequestProcessPool, encode_outcome
from ramify.sources.sqlite_query import Params, run_query


class SqliteQueryRequest(msgspec.Struct, frozen=True):
    """A query on a SQLite file, as sent to the process that runs it."""

    path: str
    query: str
    params: list[Any] | dict[str, Any]
    limit_s: float


_processes = RequestProcessPool(f"{__name__}:serve")


def query_with_timeout(
    path: Path,
    query: str,
    params: Params = (),
    limit_s: float = QUERY_S,
    grace_s: float = GRACE_S,
) -> list[tuple[Any, ...]]:
    """Run a query on a SQLite file in another process, and return its rows.

    Raises TimeoutError if the answer does not begin within ``limit_s + grace_s`` seconds.
    """
    given = dict(params) if isinstance(params, Mapping) else list(params)
    rows = _processes.ask(SqliteQueryRequest(str(path), query, given, limit_s), limit_s, grace_s)
    return [tuple(row) for row in rows]


def serve() -> None:
    """Answer SQLite queries in a child process until its standard input is closed."""
    answer_requests(_answer)


def _answer(request: list[bytes]) -> list[bytes]:
    asked: SqliteQueryRequest = decode(request[0], SqliteQueryRequest)
    return encode_outcome(
        lambda: run_query(Path(asked.path), asked.query, asked.params, asked.limit_s)
    )
