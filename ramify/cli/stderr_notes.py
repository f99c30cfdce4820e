"""What is said to the person beside the answer: one place for everything that goes to stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from ramify.cli.terminal_text import clean
from ramify.errors import OldNameWarning


class StderrNotes:
    """Lines on stderr. ``quiet`` leaves out all but errors; ``above`` is where they go while a live
    view is drawn."""

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.above: Callable[[str], None] | None = None

    def say(self, text: str) -> None:
        """Something worth knowing."""
        if not self.quiet:
            (self.above or write)(text)

    def detail(self, text: str) -> None:
        """Something for those who asked for more."""
        if self.verbose:
            self.say(text)

    def take_warnings(self) -> None:
        """Say the warnings of libraries in a line each, without file and line; our own old names,
        too."""
        warnings.simplefilter(
            "default", OldNameWarning
        )  # Python hides a DeprecationWarning outside of __main__
        warnings.showwarning = lambda message, *_, **__: self.say(f"ramify: warning: {message}")


def write(text: str) -> None:
    print(clean(text), file=sys.stderr, flush=True)


def error_line(text: str) -> None:
    """An error is one line, whatever is in it."""
    write("ramify: " + " ".join(clean(text).split()))
