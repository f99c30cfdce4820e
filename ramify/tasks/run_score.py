"""Runs the score of a task, which is the user's code, with a time limit.

    scored_in_time(task, item, trajectory, 30) ──own thread──> scored(…) ──> rewards and metrics

A score that does not end is named with its current line, and stopped: an exception is raised in
its thread at its next Python instruction. A thread that waits outside Python (a system call) cannot
be stopped; it is left behind. ``os._exit`` would end the whole run without a message, so in the
thread of a score it raises an error that says so. Not here: what a score returns (see ``base.py``).
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import sys
import threading
import traceback
from typing import NoReturn

from ramify.errors import RamifyError
from ramify.tasks.base import Item, Task, scored
from ramify.types.trajectory import Trajectory

_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_exit_process = os._exit
_scoring = threading.local()
"""Has ``process``, the id of the process, in a thread that runs a score."""


class ScoreStopped(BaseException):
    """Raised inside a score that took too long. Not an Exception: a score that catches everything
    must end, too."""


def scored_in_time(task: Task, item: Item, trajectory: Trajectory, timeout_s: float) -> Trajectory:
    """Store the rewards in ``trajectory``, as ``scored`` does, within ``timeout_s`` seconds. Raises
    RamifyError, which names the task, the item and, for a score that did not end, its line."""
    os._exit = _exit_unless_scoring
    outcome: list[Trajectory | BaseException] = []
    context = contextvars.copy_context()

    def score() -> None:
        _scoring.process = os.getpid()
        try:
            outcome.append(context.run(scored, task, item, trajectory))
        except BaseException as error:  # noqa: BLE001 -- raised again by the waiting thread
            outcome.append(error)

    thread = threading.Thread(target=score, daemon=True, name=f"ramify score of {task.name}")
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        place = _place(thread)
        _stop(thread)
        raise RamifyError(
            f"task '{task.name}', item {item.id}: its score took more than {timeout_s:g} s"
            f"{place}; it was stopped"
        )
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _place(thread: threading.Thread) -> str:
    """Line of the user's code at which the thread is, as ``, at score.py:12 (score)``."""
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
    if getattr(_scoring, "process", None) == os.getpid():  # not in a child that the score forked
        raise SystemExit(f"os._exit({status}), which would have ended the whole run")
    _exit_process(status)
