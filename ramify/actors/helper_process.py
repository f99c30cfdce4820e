"""Start small helper processes that answer requests over pipes, one request at a time.

    this process                                    the helper process
    start_python_process("ramify.sources.sqlite_process:serve")
                                                ──> serve() ── answer_requests(answer)
    ask(process, [request], limit_s=20.0)       ──> answer([request]) ──> [answer]

A request and its answer are lists of byte strings, each preceded by its length. The pool that keeps
such processes is ``HelperProcessPool`` in ``child_process.py``; callers decide what to ask them.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO

from ramify.actors.child_process import pythonpath_environment

_LENGTH_BYTES = 8


_BARE = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ")
"""Environment variables of a helper process that does not inherit this process's environment."""


def start_python_process(serve: str, *, is_bare: bool = False) -> subprocess.Popen[bytes]:
    """Start a Python process that calls the function ``serve``, given as ``module:name``.

    The process answers requests over its standard input and output.

    If ``is_bare`` is True, the process does not get the environment variables of this process,
    because they may contain API keys.
    """
    module, _, function = serve.partition(":")
    kept = {n: v for n, v in os.environ.items() if not is_bare or n in _BARE}
    return subprocess.Popen(
        [sys.executable, "-c", f"from {module} import {function}; {function}()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**kept, **pythonpath_environment()},
    )


def ask(process: subprocess.Popen[bytes], request: Sequence[bytes], limit_s: float) -> list[bytes]:
    """Send a request to a helper process, and return the helper's answer.

    Raises TimeoutError if the answer does not begin within ``limit_s`` seconds, and EOFError or
    OSError if the process ends before the answer is complete.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process.stdin, request)
    # select() does not support descriptors above 1023, which a host with many sessions exceeds.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(limit_s * 1000):
        raise TimeoutError
    return _receive(process.stdout)


def answer_requests(answer: Callable[[list[bytes]], Sequence[bytes]]) -> None:
    """Answer the requests on standard input until it is closed.

    This also ends if memory runs out. The function ``answer`` computes each response.
    """
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt, MemoryError):
        while True:
            _send(sink, answer(_receive(source)))


def _send(sink: IO[bytes], parts: Sequence[bytes]) -> None:
    sink.write(len(parts).to_bytes(_LENGTH_BYTES, "little"))
    for part in parts:
        sink.write(len(part).to_bytes(_LENGTH_BYTES, "little"))
        sink.write(part)
    sink.flush()


def _receive(source: IO[bytes]) -> list[bytes]:
    return [_read_exactly(source, _read_length(source)) for _ in range(_read_length(source))]


def _read_length(source: IO[bytes]) -> int:
    return int.from_bytes(_read_exactly(source, _LENGTH_BYTES), "little")


def _read_exactly(source: IO[bytes], count: int) -> bytes:
    data = source.read(count)
    if len(data) < count:
        raise EOFError
    return data
