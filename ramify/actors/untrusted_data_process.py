"""Process untrusted data in a helper process, so that slow input cannot block the event loop.

    data ── thread ── pipe ──▶ helper process: module:function(data) ── pipe ──▶ answer

Decoders and regular expressions hold the interpreter's lock, so in a thread they would block the
loop as well. A helper is started by the first request and reused by later ones. The kernel kills a
helper whose request exceeds the limit on CPU time. Cancelling a request also kills its helper, so
that no run waits for a result that is no longer needed.

Callers decide which data is large enough to need a helper (see ``clients/reply_decoding.py`` and
``engine/nonblocking_reply_parsing.py``). Processes that live as long as a run are started by
``child_process.py``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ramify.actors.child_process import HelperProcessPool
from ramify.actors.helper_process import answer_requests, ask, start_python_process

CPU_S = 2.0
"""Maximum CPU seconds of one request."""
_ANSWER_S = 60.0
"""Maximum seconds for a helper process to start and answer. It is generous, because the machine
may be busy."""
_MEMORY_BYTES = 2 << 30
"""Maximum address space of a helper process in bytes."""
_NUM_HELPERS = 2


class HelperProcessDied(Exception):
    """Raised if a helper process exits or is killed before it has answered."""


async def call_in_helper_process(function: str, *data: bytes) -> bytes:
    """Call a function in a helper process, and return its result.

    The function is named as ``module:name``. Its arguments and its result are bytes.

    Raises HelperProcessDied if the function exceeds the limits on CPU time and memory, and
    RuntimeError if it raises an exception.
    """
    request = _HelperRequest([function.encode(), *data])
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads(), request.run)
    except asyncio.CancelledError:
        request.cancel()
        raise


class _HelperRequest:
    """One request to a helper process.

    Call ``run`` in a thread, because it blocks.
    """

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False

    def run(self) -> bytes:
        try:
            answered = self._ask_helper() or self._ask_helper()
        except TimeoutError:
            raise HelperProcessDied(f"it did not finish within {_ANSWER_S:g} s") from None
        if answered is None:
            raise HelperProcessDied(
                "its helper process was killed twice, as happens when memory runs out"
            )
        failed, answer = answered
        if failed:
            raise RuntimeError(answer.decode())
        return answer

    def _ask_helper(self) -> tuple[bytes, bytes] | None:
        """Send the request to a helper process, and return the helper's answer.

        Returns None if the helper was killed for another reason, so that the caller can try another
        one. Raises HelperProcessDied if the request exceeded its limits.
        """
        process = None
        try:
            with _helpers.lend_process() as process:
                self._set_process(process)
                try:
                    failed, answer = ask(process, self._parts, _ANSWER_S)
                    return failed, answer
                finally:
                    self._set_process(None)
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            is_killed = process is not None and process.wait(_ANSWER_S) == -signal.SIGKILL
            if is_killed and not self._is_cancelled:
                return None
            limits = f"{CPU_S:g} s of CPU time or {_MEMORY_BYTES >> 30} GiB of memory"
            raise HelperProcessDied(f"it exceeds {limits}") from None

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def _set_process(self, process: subprocess.Popen[bytes] | None) -> None:
        with self._lock:
            self._process = process
            if process is not None and self._is_cancelled:
                raise EOFError


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_HELPERS, thread_name_prefix="ramify helper")


_helpers = HelperProcessPool(functools.partial(start_python_process, f"{__name__}:serve"))


def serve() -> None:
    """Answer requests from standard input until it is closed.

    This function runs in the helper process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answer_requests(_call_requested_function)


def _call_requested_function(request: list[bytes]) -> tuple[bytes, bytes]:
    """Call the function that a request names, and return the status and the result or error.

    Returns an empty status with the result, or the status ``failed`` with the error.
    """
    name, *data = request
    module, _, function = name.decode().partition(":")
    call = getattr(importlib.import_module(module), function)
    # The limit is in whole seconds, and counts from the start of the process.
    most_s = int(time.process_time() + CPU_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
    try:
        return b"", call(*data)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- raised in the process that asked
        return b"failed", f"{type(error).__name__}: {error}".encode("utf-8", "replace")
