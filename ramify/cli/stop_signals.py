"""Ctrl-C and SIGTERM that end a command even if its event loop is blocked.

    signal ── the loop's next round ──> what the command does then: wrap up, stop, drain
       └── no round within PATIENCE_S ──> KeyboardInterrupt or SystemExit in the main thread

The loop's own handlers wait for its next round, which never comes while a callback does not return.
One SIGTERM is enough; a first Ctrl-C asks for an answer with what there is, so a blocked loop is
left by the second. Not here: code that stays in a C function. Python runs no handler before it
returns.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType

from ramify.cli.exit_codes import ExitCode

PATIENCE_S = 3.0
"""How long the loop may take to act on a signal."""


def on_signal(number: int, do: Callable[[], object]) -> None:
    """Call ``do`` in the running loop for each signal ``number``; if the loop is blocked, end the
    command."""
    loop, watch = asyncio.get_running_loop(), SignalWatch(number)

    def act() -> None:
        watch.acted()
        do()

    loop.add_signal_handler(number, act)
    signal.signal(
        number, watch.arrived
    )  # the loop is woken all the same: that is done below Python


class SignalWatch:
    """Whether the loop acts on one signal in time. Belongs to the main thread."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_waiting = 0
        """Signals that arrived and that the loop has not acted on."""
        self._num_acted = 0
        self._is_overdue = False

    def arrived(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler. Raises KeyboardInterrupt or SystemExit if the loop is blocked."""
        if self._is_overdue:
            raise SystemExit(ExitCode.TERMINATED) if number == signal.SIGTERM else KeyboardInterrupt
        self._num_waiting += 1
        if number == signal.SIGTERM or self._num_waiting > 1:
            patience = threading.Timer(PATIENCE_S, self._insist, (self._num_acted,))
            patience.daemon = True
            patience.start()

    def acted(self) -> None:
        self._num_waiting -= 1
        self._num_acted += 1

    def _insist(self, num_acted: int) -> None:
        if self._num_acted == num_acted:
            self._is_overdue = True
            signal.pthread_kill(
                threading.main_thread().ident or 0, self._number
            )  # also ends a wait for a lock
