r"""Find the last ``\boxed{…}`` in a model's reply.

Models that reason before they answer mark their final answer this way.

    so it is \boxed{\frac{1}{2}} and not \boxed{3       ->  \frac{1}{2}

Braces are matched, so a box may contain other boxes. A box that is not closed is ignored.
"""

from __future__ import annotations

from ramify.lazy_pattern import lazy_pattern

TAIL_CHARS = 300
"""The answer must begin within this many characters from the end of a reply. Earlier boxes hold
intermediate results."""
_BRACE = lazy_pattern(
    r"\\[{}\\]"  # an escaped character, not a brace
    r"|(?P<open>(?P<box>(?:\\|(?<=\\))(?:boxed|fbox)\s*+)?\{)|(?P<close>\})"
)


def last_boxed(text: str, tail_chars: int | None = TAIL_CHARS) -> str | None:
    r"""Return the contents of the last complete ``\boxed{…}`` in ``text``.

    Returns None if there is none.

    The box must begin in the last ``tail_chars`` characters. None: it may begin anywhere.

    >>> last_boxed(r"\boxed{1} or \boxed{ \frac{1}{2} }")
    '\\frac{1}{2}'
    """
    tail = text if tail_chars is None else text[-tail_chars:]
    boxes = _boxes(tail)
    return tail[slice(*boxes[-1])].strip() if boxes else None


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return the start and the end of the contents of each complete box, in the order of their
    ends."""
    boxes: list[tuple[int, int]] = []
    open_braces: list[int] = []
    """Start of the contents of each open brace, or -1 for a brace that does not open a box."""
    for mark in _BRACE.finditer(text):
        if mark["open"] is not None:
            open_braces.append(mark.end() if mark["box"] else -1)
        elif mark["close"] and open_braces:
            start = open_braces.pop()
            if start >= 0:
                boxes.append((start, mark.start()))
    return boxes
