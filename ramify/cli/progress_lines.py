"""Progress as lines, for a log: what a long command is doing, whenever it has been silent a while.

    starting: 3 s
    sft: 120 of 500 steps · 12 s left
    rl: 3 of 20 steps · rollouts: 12 of 64 attempts · 8 s

Not here: the live view and the JSON lines (see progress_screen.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ramify.cli.stderr_notes import write
from ramify.progress import ProgressState

FIRST_S = 3.0
"""Seconds of silence before the first line."""
INTERVAL_S = 10.0
"""Seconds of silence before each later line."""


class ProgressLines:
    """Prints one line about the running tasks after each stretch of silence. ``describe`` gives the
    text of a task and of the seconds since it began."""

    def __init__(self, describe: Callable[[ProgressState, float], str]) -> None:
        self._describe = describe
        self._lock = threading.Lock()
        self._tasks: dict[int, tuple[ProgressState, float]] = {}
        """Task id -> (its state, when it began)."""
        self._ended = threading.Event()
        self._said_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ramify progress")
        self._thread.start()

    def __call__(self, state: ProgressState) -> None:
        """Listener of ``ramify.progress``."""
        with self._lock:
            _, since = self._tasks.pop(state.id, (state, time.monotonic()))
            if not state.is_over:
                self._tasks[state.id] = state, since

    def say(self, text: str) -> None:
        """Print a line of the command itself, which ends the silence."""
        self._said_at = time.monotonic()
        write(text)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        silence_s = FIRST_S
        while not self._ended.wait(max(self._said_at + silence_s - time.monotonic(), 0.1)):
            if time.monotonic() - self._said_at >= silence_s and (line := self._line()):
                self.say(line)
                silence_s = INTERVAL_S

    def _line(self) -> str:
        with self._lock:
            now = time.monotonic()
            running = sorted(self._tasks.values(), key=lambda task: task[0].id)
            return " · ".join(self._describe(state, now - since) for state, since in running)
