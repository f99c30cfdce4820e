r"""Removes everything from text that could control a terminal.

Text from a model, a document or a server may hold escape sequences that move the cursor, set the
window title, write to the clipboard or fake a prompt. ``strip_control_characters`` removes them, in
linear time.

    >>> clean("a\x1b[31mb\x07\r\n\tc")
    'ab\n\tc'

``replace_unprintable`` shows each character that cannot be printed, including line ends, as a
replacement character. ``escape_json_controls`` writes such characters in encoded JSON as escapes,
which leaves its value unchanged. ``SanitizingTerminalStream`` wraps a terminal's stream and cleans
everything that is printed, even by libraries. Only lines that ``write_trusted_line`` receives keep
their colors.

``cli/terminal_text.py`` formats what is printed.
"""

from __future__ import annotations

import io
import re
from typing import TextIO

from ramify.lazy_pattern import lazy_pattern

_STRINGS = "\x90\x98\x9d\x9e\x9f"
"""Single-character codes that begin a terminal control string, such as one that sets the window
title, a link or the clipboard."""
_ESCAPES = lazy_pattern(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colors and cursor movement
    # A string ends before the next opening: otherwise many openings would take quadratic time. It
    # also ends with its line, so that one stray character does not remove the rest of a text.
    rf"|(?:\x1b[\]PX^_]|[{_STRINGS}])[^\n\x07\x1b\x9c{_STRINGS}]*(?:\x07|\x1b\\|\x9c|\Z)"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = lazy_pattern(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Matches characters that are removed from printed text: controls except newline and tab, direction
marks and lone surrogates."""
_ENCODED_CONTROLS = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)
"""UTF-8 encodings of the characters in ``_CONTROLS``, except those that JSON always escapes."""
_RETURN = lazy_pattern(r"\r\n?")


def replace_unprintable(text: str) -> str:
    """Replace each unprintable character, so that the text fits on one line.

    For example, ``"a\\nb"`` becomes ``"a\ufffdb"``. Use this for untrusted text such as file names.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def strip_control_characters(text: str) -> str:
    """Remove escape sequences and control characters from ``text``."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def strip_controls_to_line(text: str) -> str:
    """Remove escape sequences and control characters from ``text``, and join its lines into one."""
    return " ".join(strip_control_characters(text).split())


def escape_json_controls(json: bytes) -> bytes:
    """Replace control characters in encoded JSON with escapes such as ``\\u009b``.

    The value of the JSON does not change.
    """
    return _ENCODED_CONTROLS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), json)


class SanitizingTerminalStream(io.TextIOBase):
    """A terminal output stream that removes escape sequences and control characters from everything
    written to it.

    Lines passed to ``write_trusted_line`` are exempt.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        """The unprotected stream, for programs that draw on the terminal, such as a live view."""

    def write(self, text: str, /) -> int:
        """Write ``text`` with escape sequences and control characters removed.

        A carriage return becomes a line break, so that progress bars stay readable.
        """
        self.terminal.write(strip_control_characters(_RETURN.sub("\n", text)))
        return len(text)

    def write_trusted_line(self, line: str) -> None:
        """Write a line that the caller has already cleaned, without cleaning it again.

        The caller must clean the line before adding colors.
        """
        self.terminal.write(line)

    def flush(self) -> None:
        self.terminal.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.terminal.close()

    @property
    def closed(self) -> bool:
        return self.terminal.closed

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.terminal.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.terminal.errors
