"""The function ``chunks``, which divides texts into parts for a model.

This source code runs *inside* the session; the host imports it only for its description.

Only the standard library is used. A token counts as three bytes of UTF-8, as it does for the sizes
given in the prompt, so a part has at most ``3 * tokens`` bytes. A part ends, in this order of
preference: before a heading or a page, at a blank line, at the end of a line (a record), at a
space, and only then within a word. Joined together, the parts of a text give the whole text. Parts
of a dict begin with the name of their text; small texts share a part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__: list[str] = []

_BYTES_PER_TOKEN = 3
_MIN_TOKENS = 50
_MAX_CHARS = 500_000_000
_HEADING = re.compile(r"^(?:#{1,6} |--- page \d+ ---$|<!-- Slide number: \d+ -->)", re.MULTILINE)


def chunks(tokens: int = 4000, text: Any = None) -> list[dict[str, str]]:
    """Cut `context` (or `text`: a str, a list or dict of str) into parts of at most `tokens`
    tokens (of 3 bytes), at headings, blank lines or line ends where possible: a list of dicts
    with 'place' and 'text'."""
    value = globals().get("namespace", {}).get("context") if text is None else text
    if type(tokens) is not int or tokens < _MIN_TOKENS:
        raise ValueError(f"tokens={tokens!r}: give a whole number, {_MIN_TOKENS} or more")
    texts = _texts(value)
    if text is None and isinstance(value, Mapping):
        texts = [each for each in texts if hasattr(each[1], "find")]  # without pictures
    _check(texts)
    size = sum(len(each) for _, each in texts)
    if size > _MAX_CHARS:
        raise ValueError(
            f"{size:,} characters are too many to cut at once: select what matters first, and give "
            "it as text="
        )
    most = _BYTES_PER_TOKEN * tokens
    if not isinstance(value, (Mapping, list, tuple)):
        return [
            {"place": f"lines {first}-{last}", "text": piece}
            for piece, first, last in _pieces(texts[0][1], most)
        ]
    found: list[dict[str, str]] = []
    shared: list[tuple[str, str]] = []
    room = most
    for name, whole in texts:
        head = f"== {_shorten_name(name, most // 4)} ==\n"
        left = most - _num_bytes(head) - 1
        for piece, first, last in _pieces(whole, left):
            num_bytes = most - left + _num_bytes(piece)
            if num_bytes > room:
                _merge_into_part(found, shared)
                room = most
            shared.append((f"{name}:{first}-{last}", head + piece))
            room -= num_bytes
    _merge_into_part(found, shared)
    return found


def _texts(value: Any) -> list[tuple[str, Any]]:
    """Return the texts in ``value`` as (name, text) pairs.

    The name of a single text is empty.
    """
    if value is None:
        raise TypeError("this session has no context: give text=")
    if isinstance(value, Mapping):
        return [(str(name), each) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(number), each) for number, each in enumerate(value)]
    return [("", value)]


def _check(texts: list[tuple[str, Any]]) -> None:
    for name, each in texts:
        if isinstance(each, (bytes, bytearray)) or not hasattr(each, "find"):
            where = f"{name!r} is" if name else "this is"
            raise TypeError(
                f"chunks cuts texts, and {where} a {type(each).__name__}: make a text of it first"
            )


def _pieces(text: Any, most: int) -> list[tuple[str, int, int]]:
    """Split a text into pieces, and return each with its first and last line number.

    A piece has at most ``most`` bytes.
    """
    found: list[tuple[str, int, int]] = []
    start, line, length = 0, 1, len(text)
    while start < length:
        window = _longest_prefix(text[start : start + most], most)
        if start + len(window) < length:
            window = window[: _cut_position(window)]
        num = window.count("\n")
        found.append((window, line, line + num - (window.endswith("\n") and num > 0)))
        start += len(window)
        line += num
    return found


def _longest_prefix(window: str, most: int) -> str:
    """Return the longest prefix of ``window`` that has at most ``most`` bytes."""
    if window.isascii():
        return window
    data = window.encode("utf-8", "surrogatepass")
    end = min(most, len(data))
    while end < len(data) and data[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    return data[:end].decode("utf-8", "surrogatepass")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _cut_position(window: str) -> int:
    """Return the best position at which to end a piece within ``window``, such as before a
    heading."""
    half = len(window) // 2
    headings = [each.start() for each in _HEADING.finditer(window, half)]
    if headings:
        return headings[-1]
    blank = window.rfind("\n\n", half)
    if blank >= 0:
        return blank + 2
    newline = window.rfind("\n")
    if newline >= 0:
        return newline + 1
    space = window.rfind(" ", half)
    return space + 1 if space >= 0 else len(window)


def _shorten_name(name: str, most: int) -> str:
    return _longest_prefix(name.replace("\n", " "), most)


def _merge_into_part(found: list[dict[str, str]], shared: list[tuple[str, str]]) -> None:
    """Join the pieces in ``shared`` into one part, add it to ``found``, and empty ``shared``."""
    if shared:
        first, last = shared[0][0], shared[-1][0]
        place = first if len(shared) == 1 else f"{first} to {last}"
        found.append({"place": place, "text": "\n".join(piece for _, piece in shared)})
        shared.clear()


if "namespace" in globals():
    if globals().get("namespace_is_live", True):
        # This name is not reserved: a variable ``chunks`` is common, and may replace the function.
        globals()["namespace"].setdefault("chunks", chunks)
    else:
        __all__ += ["chunks"]
