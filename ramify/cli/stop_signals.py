"""End a command on Ctrl-C or SIGTERM even if its event loop is blocked.

Also end a command whose blocked loop exceeds the deadline of its run.

    signal ── next iteration of the loop ──> the command's handler: wrap up, stop, drain
       └── no iteration within PATIENCE_S ──> KeyboardInterrupt or SystemExit in the main thread
    deadline ── the run's journal is closed (``event_loop_thread.py``) ──> one line, exit code 5

The handlers of asyncio wait for the loop's next iteration, which never comes while a callback
blocks. One SIGTERM is enough to end a blocked command. Ctrl-C takes two, because the first one only
asks for the best answer so far. Code that stays in a C function hears no signal, because Python
runs no handler until it returns; the deadline ends it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from ramify.cli.parser import ExitCode
from ramify.cli.terminal_text import print_error
from ramify.engine import event_loop_thread
from ramify.errors import EventLoopBlockedError

PATIENCE_S = 3.0
"""Seconds that the event loop may take to act on a signal."""


def add_signal_handler(number: int, do: Callable[[], object]) -> None:
    """Call ``do`` in the running event loop each time the signal ``number`` arrives.

    If the loop is blocked and does not react, end the command.
    """
    loop, watch = asyncio.get_running_loop(), EventLoopSignalWatchdog(number)

    def act() -> None:
        watch.record_response()
        do()

    loop.add_signal_handler(number, act)
    # This replaces asyncio's Python handler only. The loop still wakes up, because the wake-up file
    # descriptor is written in C.
    signal.signal(number, watch.handle_signal)


def add_stop_handler(do: Callable[[], None]) -> None:
    """Call ``do`` on Ctrl-C or SIGTERM while the current event loop runs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        add_signal_handler(number, do)


@contextlib.contextmanager
def enforce_run_deadlines(
    command: str, restore: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Watch the deadlines of the runs in a ``with`` block, even if their event loop is blocked.

    If a run exceeds its deadline while its event loop is blocked, print one line to stderr and end
    the process.

    ``command`` is the command that continues the run; ``{run}`` in it is replaced by the run's id.
    ``restore`` is called before the end, to restore the terminal.
    """

    def end(error: EventLoopBlockedError) -> None:
        with contextlib.suppress(Exception):
            restore()
        how = f"; continue with: {command.format(run=error.run_id)}" if error.run_id else ""
        print_error(f"{'suspended: ' if how else ''}{error}{how}")
        # Nothing else ends a process whose main thread is blocked.
        os._exit(ExitCode.SUSPENDED if how else ExitCode.ERROR)

    before = event_loop_thread.on_blocked.set(end)
    try:
        yield
    finally:
        event_loop_thread.on_blocked.reset(before)


class EventLoopSignalWatchdog:
    """Checks that the event loop reacts to a signal in time, and otherwise interrupts the main
    thread.

    Use it only in the main thread.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_waiting = 0
        """Number of signals that have arrived and to which the event loop has not reacted yet."""
        self._num_acted = 0
        self._is_overdue = False

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal by checking that the event loop reacts to it in time.

        If the event loop has not reacted to earlier ones in time, raise KeyboardInterrupt or
        SystemExit.
        """
        if self._is_overdue:
            raise SystemExit(ExitCode.TERMINATED) if number == signal.SIGTERM else KeyboardInterrupt
        self._num_waiting += 1
        if number == signal.SIGTERM or self._num_waiting > 1:
            patience = threading.Timer(PATIENCE_S, self._resend_if_overdue, (self._num_acted,))
            patience.daemon = True
            patience.start()

    def record_response(self) -> None:
        self._num_waiting -= 1
        self._num_acted += 1

    def _resend_if_overdue(self, num_acted: int) -> None:
        if self._num_acted == num_acted:
            self._is_overdue = True
            # A signal to the main thread also interrupts a wait for a lock.
            signal.pthread_kill(threading.main_thread().ident or 0, self._number)
