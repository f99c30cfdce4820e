"""SQL queries in a separate process that can be killed. SQLite checks its time limit between steps,
and one step may take arbitrarily long.

    sql ──pickle──> idle query process ──pickle──> rows or an error
                    └── no reply within the limit: it is killed, and the next query starts another

``instr`` over two long values, or ``LIKE '%a%a%a%b'``, is one step. Processes are started on
demand, one for each concurrent query, and end with the host process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from ramify.actors.child_process import IdleProcesses, import_path
from ramify.sources.sqlite import QUERY_S, Params, run_query

GRACE_S = 10.0
"""Time beyond a query's limit to start the process and send the rows."""
_COMMAND = "from ramify.sources.sqlite_process import serve; serve()"
_LENGTH_BYTES = 8


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **import_path()},
    )


_processes = IdleProcesses(_start)


def query_in_time(
    path: Path,
    query: str,
    params: Params = (),
    limit_s: float = QUERY_S,
    grace_s: float = GRACE_S,
) -> list[tuple[Any, ...]]:
    """Like ``run_query``, but guarantee the first bytes of the reply within ``limit_s + grace_s``
    seconds or raise TimeoutError."""
    try:
        with _processes.one() as process:
            assert process.stdout is not None
            _send(process.stdin, (str(path), query, params, limit_s))
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            if not poll.poll((limit_s + grace_s) * 1000):
                raise TimeoutError(
                    f"sql: stopped after {limit_s:g} s: one of its functions takes too long on "
                    "such values"
                )
            rows, error = _receive(process.stdout)
    except TimeoutError:
        raise
    except (EOFError, OSError):
        raise ValueError(
            "sql: the query ended the process that it ran in: ask for less at once"
        ) from None
    if error is not None:
        raise error
    checked: list[tuple[Any, ...]] = rows
    return checked


def serve() -> None:
    """Answer queries from standard input until it is closed."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            path, query, params, limit_s = _receive(source)
            try:
                answer: tuple[Any, Any] = run_query(Path(path), query, params, limit_s), None
            except Exception as error:  # noqa: BLE001 -- raised in the process that asked
                answer = None, error
            _send(sink, answer)


def _send(to: Any, value: Any) -> None:
    data = pickle.dumps(value)
    to.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    to.flush()


def _receive(source: Any) -> Any:
    length = int.from_bytes(_exactly(source, _LENGTH_BYTES), "little")
    return pickle.loads(_exactly(source, length))


def _exactly(source: BinaryIO, count: int) -> bytes:
    data = source.read(count)
    if len(data) < count:
        raise EOFError
    return data
