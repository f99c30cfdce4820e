r"""The last ``\boxed{…}`` of a text: where a reply that argues says its answer.

    so it is \boxed{\frac{1}{2}} and not \boxed{3       ->  \frac{1}{2}

Braces are counted, so that a box may hold others; a box that is not closed is none.
"""

from __future__ import annotations

TAIL_CHARS = 300
"""An answer stands at the end: what was boxed on the way there is none."""
_OPENINGS = ("\\boxed", "\\fbox")


def last_boxed(text: str, tail_chars: int | None = TAIL_CHARS) -> str | None:
    r"""What the last whole box holds that begins in the last ``tail_chars`` characters (None:
    anywhere); None for none.

    >>> last_boxed(r"\boxed{1} or \boxed{ \frac{1}{2} }")
    '\\frac{1}{2}'
    """
    tail = text if tail_chars is None else text[-tail_chars:]
    found = None
    for start, end in _boxes(tail):
        found = tail[start:end].strip()
    return found


def _boxes(text: str) -> list[tuple[int, int]]:
    """(start, end) of the contents of each whole box, in the order in which they end."""
    boxes: list[tuple[int, int]] = []
    open_braces: list[int] = []
    """Where the contents of each open brace begin; -1 for one that opens no box."""
    index = 0
    while index < len(text):
        if text[index] == "\\" and index + 1 < len(text) and text[index + 1] in "{}\\":
            index += 2  # escaped: a sign, no brace
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
