"""Text for a terminal: removes escape sequences, shortens lines, formats numbers and times, and
writes messages to the user on stderr. Stdout is for the answer.

Text from a model or a document may hold escape sequences that move the cursor, set the window title
or fake a prompt. ``clean`` removes them from everything that is shown to a user. Output to a pipe
stays unchanged.

    >>> clean("a\\x1b[31mb\\x07\\r\\n\\tc")
    'ab\\n\\tc'
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import warnings
from collections.abc import Callable

from ramify.errors import OldNameWarning
from ramify.log_outputs import current_console
from ramify.logging import RoomLogger

_log = RoomLogger("cli")

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colors and cursor movement
    # window titles, links, the clipboard
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except newline and tab, marks that change the text direction, and lone
surrogates, which cannot be printed."""


def clean(text: str) -> str:
    """Remove escape sequences and control characters from ``text``."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, width: int = 80) -> str:
    """Clean ``text`` and put it on one line of at most ``width`` characters."""
    line = " ".join(clean(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def count(number: float) -> str:
    """Format a count: ``1,234``, ``45.2k``, ``1.2M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g}{unit}"
    return f"{number:,.0f}"


def many(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 turn``, ``1,234 turns``."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def dollars(cost: float | None) -> str:
    """Format a cost: ``$1.23``, ``$0.012``, ``$1.2e-05``; ``cost unknown`` without a price."""
    if cost is None:
        return "cost unknown"
    return (
        f"${cost:.2f}"
        if cost >= 1 or cost == 0
        else f"${cost:.2g}"
        if cost >= 0.001
        else f"${cost:.1e}"
    )


def seconds(value: float) -> str:
    """Format a duration: ``0.42 s``, ``12 s``, ``3 min 5 s``, ``30 min``."""
    if value < 10:
        return f"{value:.2g} s"
    minutes, rest = divmod(round(value), 60)
    return " ".join(
        [*([f"{minutes} min"] if minutes else []), *([f"{rest} s"] if rest or not minutes else [])]
    )


def ticking(value: float) -> str:
    """Format a duration that is redrawn often: like ``seconds``, but with a stable width."""
    return f"{value:.1f} s" if value < 60 else seconds(value)


def size(num_bytes: int) -> str:
    """Format a size: ``12 kB``, ``3.4 GB``."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def moment(unix_time: float) -> str:
    """Format a time as local date and time to the minute; ``-`` for 0."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time)) if unix_time else "-"


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
            console.hidden.add("warning")
        # Python hides a DeprecationWarning outside of __main__.
        warnings.simplefilter("default", OldNameWarning)
        warnings.showwarning = lambda message, *_, **__: self.say(f"ramify: warning: {message}")


def write(text: str) -> None:
    """Print ``text`` to stderr without escape sequences."""
    print(clean(text), file=sys.stderr, flush=True)


def error_line(text: str) -> None:
    """Print an error to stderr as one line, even if ``text`` has several."""
    write("ramify: " + " ".join(clean(text).split()))
