"""A pool of killable processes that run database queries, and the format of their replies.

    RequestProcessPool("module:serve").ask(request, limit_s)
        ──> idle process ── ProcessValueOrError ──> its value or an error
        └── no reply within the limit: it is killed, and the next query starts another

Processes are started on demand, one for each concurrent query, and end with the host process. What
a query may do is decided in ``sqlite_query.py``, ``duckdb_process.py`` and ``database_servers.py``.
"""

from __future__ import annotations

import datetime
import decimal
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from ramify.actors.child_process import HelperProcessPool
from ramify.actors.helper_process import ask, start_python_process
from ramify.actors.message_encoding import decode, encode

QUERY_S = 30.0
"""Time limit of one query in seconds."""
MAX_ROWS = 10_000
MAX_RESULT_BYTES = 32 << 20
GRACE_S = 10.0
"""Extra seconds, beyond the time limit of the query, for starting the process and sending the
rows."""
_ERRORS = {kind.__name__: kind for kind in (ValueError, PermissionError, TimeoutError)}


class ProcessValueOrError(msgspec.Struct, frozen=True):
    """The result of a call in a child process: the returned value or an error."""

    value: Any = None
    kind: str = ""
    """Class name of the error; empty for success."""
    text: str = ""


class RequestProcessPool:
    """A pool of child processes that answer requests, such as database queries.

    Each runs the function ``serve``, named as ``module:name``.

    With ``is_bare``, the processes inherit no environment variables except search paths, so no API
    keys leak into them.
    """

    def __init__(self, serve: str, *, is_bare: bool = False) -> None:
        self._processes = HelperProcessPool(
            functools.partial(start_python_process, serve, is_bare=is_bare)
        )

    def ask(self, request: msgspec.Struct, limit_s: float, grace_s: float = GRACE_S) -> Any:
        """Send a request to a process of the pool, and return the value of its reply.

        Raises TimeoutError if the answer does not begin within ``limit_s + grace_s`` seconds. Also
        raises a ValueError, PermissionError or TimeoutError that the process reports.
        """
        try:
            asked = encode(request)
        except (TypeError, OverflowError, ValueError) as error:
            raise ValueError(
                f"sql: params: {error}: give numbers, text, bytes or None for each placeholder"
            ) from None
        try:
            with self._processes.lend_process() as process:
                (data,) = ask(process, [asked], limit_s + grace_s)
                answer: ProcessValueOrError = decode(data, ProcessValueOrError)
        except TimeoutError:
            raise TimeoutError(
                f"sql: stopped after {limit_s:g} s: one of its functions takes too long on such "
                "values"
            ) from None
        except (EOFError, OSError):
            raise ValueError(
                "sql: the query ended the process that it ran in: ask for less at once"
            ) from None
        if answer.kind:
            raise _ERRORS.get(answer.kind, ValueError)(answer.text)
        return answer.value


def encode_outcome(call: Callable[[], Any]) -> list[bytes]:
    """Call a function in a child process, and encode its value or its error for the parent
    process."""
    try:
        return [encode(ProcessValueOrError(call()))]
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- raised in the process that asked
        return [encode(ProcessValueOrError(kind=type(error).__name__, text=str(error)))]


class BoundedRowCollector:
    """Collects the rows of a query result up to a limit.

    Raises ValueError beyond ``MAX_ROWS`` rows or ``MAX_RESULT_BYTES`` bytes.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self._num_bytes = 0

    def add(self, row: tuple[Any, ...]) -> None:
        self.rows.append(row)
        self._num_bytes += sum(map(_size, row))
        if len(self.rows) > MAX_ROWS:
            raise ValueError(
                f"sql: more than {MAX_ROWS:,} rows: aggregate in SQL, or page with LIMIT and OFFSET"
            )
        if self._num_bytes > MAX_RESULT_BYTES:
            raise ValueError(
                f"sql: more than {MAX_RESULT_BYTES >> 20} MB of rows: select fewer columns, or use "
                "substr()"
            )


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return 8 + sum(map(_size, value))
    if isinstance(value, dict):
        return 8 + sum(_size(key) + _size(each) for key, each in value.items())
    return 8


def to_session_value(value: Any) -> Any:
    """Convert a value from a database to a plain Python value that a session can hold.

    Dates become ISO text, and decimals become numbers.
    """
    if value is None or isinstance(value, str | bool | float | bytes):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else float(value)
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [to_session_value(each) for each in value]
    if isinstance(value, dict):
        return {str(to_session_value(key)): to_session_value(each) for key, each in value.items()}
    return str(value)
