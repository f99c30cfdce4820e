"""A thread that runs a user's function.

It can report which line is running, and it can be stopped.

    thread = StoppableThread(work, "name", on_end)
    thread.place()        ", at score.py:12 (score)"
    thread.stop()         raises ThreadStoppedError in it, at its next Python instruction

A thread that waits outside Python (a system call) cannot be stopped and is abandoned. ``os._exit``
would end the whole process without a message, so in such a thread it raises an error instead. How
long a function may run is decided by ``score_with_timeout.py`` and ``ramify/agents``.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_exit_process = os._exit
_running = threading.local()
"""Thread-local state. In a ``StoppableThread``, the attribute ``process`` is the process id."""


class ThreadStoppedError(BaseException):
    """Raised inside a user's function to stop it, for example after its time limit.

    It does not derive from Exception, so that ``except Exception`` in the function cannot catch it.
    """


class StoppableThread:
    """Runs one function in a daemon thread, with the context variables of the creating thread."""

    def __init__(
        self, work: Callable[[], Any], name: str, on_end: Callable[[], object] = lambda: None
    ) -> None:
        """Start a thread that calls ``work``.

        After the function has ended, ``on_end`` is called in the same thread.
        """
        os._exit = _exit_unless_running
        self._work = work
        self._on_end = on_end
        self._context = contextvars.copy_context()
        self._results: list[Any] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True once the function has returned or raised an exception."""
        return bool(self._results or self._errors)

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for the function to end."""
        self._thread.join(timeout_s)

    def result(self) -> Any:
        """Return the function's result, or raise its exception.

        The function must have ended.
        """
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def running_line(self) -> str:
        """Return the line at which the user's function is running, for an error message.

        The text looks like ``, at score.py:12 (score)``. The text is appended to an error message.
        Returns an empty string if the line is unknown.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        for entry in reversed(stack):
            if not entry.filename.startswith((_STANDARD, _OURS)):
                return f", at {entry.filename}:{entry.lineno} ({entry.name})"
        return ""

    def stop(self) -> None:
        """Stop the function by raising ThreadStoppedError at its next Python instruction."""
        # Python has no public way to stop a thread: only this C function raises in another one.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(ThreadStoppedError)
        )

    def _run(self) -> None:
        _running.process = os.getpid()
        try:
            self._results.append(self._context.run(self._work))
        except BaseException as error:  # noqa: BLE001 -- raised again by ``result``
            self._errors.append(error)
        self._on_end()


def _exit_unless_running(status: int) -> NoReturn:
    # A child process that the function has forked may exit.
    if getattr(_running, "process", None) == os.getpid():
        raise SystemExit(f"os._exit({status}), which would have ended the whole run")
    _exit_process(status)
