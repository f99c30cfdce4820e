"""Messages to the user on stderr, shared by all commands. Stdout is for the answer."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable

from ramify.cli.terminal_text import clean
from ramify.errors import OldNameWarning
from ramify.logging import RoomLogger, current_console

_log = RoomLogger("cli")


class StderrNotes:
    """Writer of notes to stderr.

    ``quiet`` suppresses everything except errors. While a live view is drawn, ``above`` receives
    the lines instead.
    """

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.above: Callable[[str], None] | None = None

    def say(self, text: str) -> None:
        """Print a note, unless ``quiet``."""
        if not self.quiet:
            # A terminal that was closed must not end the work that reports to it.
            with contextlib.suppress(OSError, ValueError):
                (self.above or write)(text)

    def warning(self, text: str) -> None:
        """Print a warning, which the next run's journal keeps too."""
        self.say(f"ramify: warning: {text}")
        _log.warning("warning", text)

    def detail(self, text: str) -> None:
        """Print a note only if ``verbose``."""
        if self.verbose:
            self.say(text)

    def take_warnings(self) -> None:
        """Print log records, and Python warnings, including those about our old names, as one line
        each."""
        if (console := current_console()) is not None:
            console.show = self.say
        # Python hides a DeprecationWarning outside of __main__.
        warnings.simplefilter("default", OldNameWarning)
        warnings.showwarning = lambda message, *_, **__: self.say(f"ramify: warning: {message}")


def write(text: str) -> None:
    """Print ``text`` to stderr without escape sequences."""
    print(clean(text), file=sys.stderr, flush=True)


def error_line(text: str) -> None:
    """Print an error to stderr as one line, even if ``text`` has several."""
    write("ramify: " + " ".join(clean(text).split()))
