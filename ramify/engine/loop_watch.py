"""Watchdog: a thread that ends a run whose event loop is blocked past the run's deadline.

    run starts ── watch ──> thread: sleeps until the deadline, then posts a beat to the loop
      loop is blocked for ``stall_s``         ──> ``on_blocked``, in another thread
      loop advances, but the run does not end ──> ``on_overdue``, on the loop, which cancels it
      nor then, for another ``stall_s``       ──> ``on_blocked``

The event loop cannot do this itself: a listener, a tool or a task that blocks it also blocks its
timers. One thread serves all loops of the process and sleeps until the first deadline. Time in
which the whole process was stopped does not count. Not here: how a run is ended (see
``run_handle.py``).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

from ramify.errors import LoopBlocked

on_blocked: ContextVar[Callable[[LoopBlocked], object] | None] = ContextVar(
    "on_blocked", default=None
)
"""Called in another thread with the error of a run that was ended because its loop is blocked: it
releases the caller, who waits in a third thread, or ends the process."""
_LOOKS = 4
"""Number of beats within ``stall_s``."""
_STANDARD = os.path.dirname(os.__file__) + os.sep


class LoopWatch:
    """One run that is watched."""

    def __init__(
        self,
        deadline_s: float,
        stall_s: float,
        on_blocked: Callable[[str], object],
        on_overdue: Callable[[], object],
    ) -> None:
        """``deadline_s``: seconds from now. ``on_blocked`` gets the place at which the loop is
        blocked, as text; it is empty if the loop advances."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stall_s = stall_s
        self._on_blocked = on_blocked
        self._on_overdue = on_overdue
        self._looked_s = self.due_s = time.monotonic() + deadline_s
        """The next look; times are those of ``time.monotonic``."""
        self._is_alive = True
        """True if the loop has answered the last beat."""
        self._past_s = self._blocked_s = 0.0
        """Seconds past the deadline, and since the last beat that was answered."""
        self._is_reported = False
        _watchdog.add(self)

    def end(self) -> None:
        """Stop watching: the run has ended."""
        _watchdog.remove(self)

    def look(self) -> None:
        """Check the loop; called by the watchdog's thread when it is due."""
        now, step_s = time.monotonic(), min(1.0, self._stall_s / _LOOKS)
        # A process that was stopped sees one long step, in which its loop could not answer either.
        passed_s, self._looked_s = min(now - self._looked_s, 2 * step_s), now
        self.due_s = now + step_s
        self._past_s += passed_s
        self._blocked_s = 0.0 if self._is_alive else self._blocked_s + passed_s
        is_blocked = self._blocked_s >= self._stall_s
        if is_blocked or (self._past_s >= 2 * self._stall_s + step_s and self._is_reported):
            _watchdog.remove(self)
            place = _place(sys._current_frames().get(self._thread)) if is_blocked else ""
            threading.Thread(target=self._on_blocked, args=(place,), daemon=True).start()
        elif self._is_alive:
            self._beat()

    def _beat(self) -> None:
        is_overdue = self._past_s >= self._stall_s and not self._is_reported
        self._is_alive, self._is_reported = False, self._is_reported or is_overdue
        try:
            self._loop.call_soon_threadsafe(self._answer, is_overdue)
        except RuntimeError:  # the loop is closed
            _watchdog.remove(self)

    def _answer(self, is_overdue: bool) -> None:
        self._is_alive = True
        if is_overdue:
            self._on_overdue()


class _Watchdog:
    """The thread, started with the first run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[LoopWatch] = set()
        self._thread: threading.Thread | None = None
        self._wakes_s = 0.0

    def add(self, watch: LoopWatch) -> None:
        with self._changed:
            self._watched.add(watch)
            if self._thread is None or not self._thread.is_alive():  # none survives a fork
                self._thread = threading.Thread(
                    target=self._work, name="ramify watchdog", daemon=True
                )
                self._thread.start()
            elif watch.due_s < self._wakes_s:
                self._changed.notify()

    def remove(self, watch: LoopWatch) -> None:
        with self._changed:
            self._watched.discard(watch)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._wakes_s = min((watch.due_s for watch in self._watched), default=float("inf"))
                wait_s = self._wakes_s - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
                due = [watch for watch in self._watched if watch.due_s <= time.monotonic()]
            for watch in due:
                watch.look()


_watchdog = _Watchdog()


def _place(frame: FrameType | None) -> str:
    """The top frame of a stack, and the nearest one outside the standard library."""
    if frame is None:
        return "a thread that has ended"
    frames = traceback.extract_stack(frame)
    own = [each for each in frames if not each.filename.startswith(("<", _STANDARD))]
    places = [f"{each.filename}:{each.lineno} in {each.name}" for each in (frames[-1], *own[-1:])]
    return ", called from ".join(dict.fromkeys(places))


def waiting_at(task: asyncio.Task[Any]) -> str:
    """The innermost coroutine that ``task`` awaits, as file, line and function."""
    place: str = "its end"
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        waiting = waiting.cr_await
    return place
