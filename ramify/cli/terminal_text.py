"""Text for a terminal: made harmless, cut to a width, numbers made readable.

What a model or a document says may hold escape sequences that move the cursor, set the window's
title or fake a prompt. ``clean`` takes them out; everything that is shown to a person goes through
it. What is piped on stays as it is.

    >>> clean("a\\x1b[31mb\\x07\\r\\n\\tc")
    'ab\\n\\tc'
"""

from __future__ import annotations

import re
import time

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, the cursor
    # titles, links, the clipboard
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Controls but newline and tab; marks that reorder what is read; halves of characters, which cannot
be printed."""


def clean(text: str) -> str:
    """``text`` without what a terminal would obey."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, width: int = 80) -> str:
    """``text`` on one line of at most ``width`` characters."""
    line = " ".join(clean(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def count(number: float) -> str:
    """``1,234`` as it is, ``45.2k``, ``1.2M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g}{unit}"
    return f"{number:,.0f}"


def many(number: int, noun: str) -> str:
    """``1 turn``, ``1,234 turns``."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def dollars(cost: float | None) -> str:
    """``$0.0123``; cents where they are many, more digits where they are few; ``-`` where there is
    no price."""
    if cost is None:
        return "-"
    return (
        f"${cost:.2f}"
        if cost >= 1 or cost == 0
        else f"${cost:.2g}"
        if cost >= 0.001
        else f"${cost:.1e}"
    )


def seconds(value: float) -> str:
    """``0.42 s``, ``12 s``, ``3 min 5 s``, ``30 min``."""
    if value < 10:
        return f"{value:.2g} s"
    minutes, rest = divmod(round(value), 60)
    return " ".join(
        [*([f"{minutes} min"] if minutes else []), *([f"{rest} s"] if rest or not minutes else [])]
    )


def ticking(value: float) -> str:
    """As ``seconds``, for a number that is drawn again and again: of a steady width."""
    return f"{value:.1f} s" if value < 60 else seconds(value)


def size(num_bytes: int) -> str:
    """``12 kB``, ``3.4 GB``."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def moment(unix_time: float) -> str:
    """Local date and time to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time)) if unix_time else "-"
