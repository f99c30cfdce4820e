"""Runs the score function of a task, which is the user's code, with a time limit.

    scored_in_time(task, item, trajectory, 30) ──own thread──> scored(…) ──> rewards and metrics

If a score takes too long, the error names its current line, and an exception is raised in its
thread at the next Python instruction. A thread that waits outside Python (a system call) cannot be
stopped and is abandoned. ``os._exit`` would end the whole run without a message, so in the thread
of a score it raises an error instead. Not here: the values that a score returns (see ``base.py``).
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ramify.errors import RamifyError
from ramify.tasks.base import Item, Task, scored
from ramify.types.trajectory import Trajectory

_T = TypeVar("_T")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_exit_process = os._exit
_scoring = threading.local()
"""In a thread that runs a score, its attribute ``process`` is the id of the process."""


class ScoreStopped(BaseException):
    """Raised inside a score that takes too long. It is not an Exception, so that it also ends a
    score that catches every Exception."""


def scored_in_time(task: Task, item: Item, trajectory: Trajectory, timeout_s: float) -> Trajectory:
    """Score a trajectory within ``timeout_s`` seconds, and return it with its rewards. Raises
    RamifyError, which names the task, the item and, after a time-out, the current line."""
    what = f"task '{task.name}', item {item.id}: its score"
    return call_in_time(lambda: scored(task, item, trajectory), what, timeout_s)


def call_in_time(score: Callable[[], _T], what: str, timeout_s: float) -> _T:
    """Call ``score`` in a separate thread, and return its result. Raises its error, or
    RamifyError, which begins with ``what`` and names the current line, after ``timeout_s``
    seconds."""
    os._exit = _exit_unless_scoring
    results: list[_T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        _scoring.process = os.getpid()
        try:
            results.append(context.run(score))
        except BaseException as error:  # noqa: BLE001 -- raised again by the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"ramify {what}")
    thread.start()
    thread.join(timeout_s)
    if not results and not errors:
        place = _place(thread)
        _stop(thread)
        raise RamifyError(f"{what} took more than {timeout_s:g} s{place}; it was stopped")
    if errors:
        raise errors[0]
    return results[0]


def _place(thread: threading.Thread) -> str:
    """Describe the line of user code that a thread is running: ``, at score.py:12 (score)``."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    for entry in reversed(stack):
        if not entry.filename.startswith((_STANDARD, _OURS)):
            return f", at {entry.filename}:{entry.lineno} ({entry.name})"
    return ""


def _stop(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(ScoreStopped)
    )


def _exit_unless_scoring(status: int) -> NoReturn:
    # A child process that the score has forked may exit.
    if getattr(_scoring, "process", None) == os.getpid():
        raise SystemExit(f"os._exit({status}), which would have ended the whole run")
    _exit_process(status)
