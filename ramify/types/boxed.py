r"""The last ``\boxed{…}`` of a text, which holds the answer of a reply that reasons first.

    so it is \boxed{\frac{1}{2}} and not \boxed{3       ->  \frac{1}{2}

Braces are matched, so a box may contain others. A box that is not closed is ignored.
"""

from __future__ import annotations

TAIL_CHARS = 300
"""Length of the end of a reply in which the answer must begin. Earlier boxes hold intermediate
results."""
_OPENINGS = ("\\boxed", "\\fbox")


def last_boxed(text: str, tail_chars: int | None = TAIL_CHARS) -> str | None:
    r"""Return the contents of the last complete box, or None.

    The box must begin in the last ``tail_chars`` characters (None: anywhere).

    >>> last_boxed(r"\boxed{1} or \boxed{ \frac{1}{2} }")
    '\\frac{1}{2}'
    """
    tail = text if tail_chars is None else text[-tail_chars:]
    contents = None
    for start, end in _boxes(tail):
        contents = tail[start:end].strip()
    return contents


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the contents of each complete box, ordered by their ends."""
    boxes: list[tuple[int, int]] = []
    open_braces: list[int] = []
    """Start of the contents of each open brace; -1 for a brace that does not open a box."""
    index = 0
    while index < len(text):
        if text[index] == "\\" and index + 1 < len(text) and text[index + 1] in "{}\\":
            index += 2  # an escaped character, not a brace
            continue
        if text[index] == "{":
            is_box = (
                any(text[:index].rstrip().endswith(opening) for opening in _OPENINGS)
                if index
                else False
            )
            open_braces.append(index + 1 if is_box else -1)
        elif text[index] == "}" and open_braces:
            start = open_braces.pop()
            if start >= 0:
                boxes.append((start, index))
        index += 1
    return boxes
