"""Strings, comments and brackets of Python, found in text that may be anything.

    call_end('3) (approx)', 0)           1: the parenthesis that closes the call
    call_end('"a) b", [1])', 0)          11
    call_end('it is "unclosed)', 0)      None: Python cannot read it

Decides where a call ends, and whether a place is inside a string. One pass over the text, at the
speed of ``re``: the standard ``tokenize`` takes some 60 times as long, and reads broken text
differently in each version of Python, which would make replays depend on it. For text that
``tokenize`` can read, both agree (``tests/engine/test_action.py``).

An apostrophe directly behind a word, as in ``it's``, begins no string: Python has no such token.
"""

from __future__ import annotations

import keyword
import re

_PREFIX = r"(?:[rR][bBfFtT]?|[bBfFtT][rR]?|[uU])"
_WORDS = "|".join(keyword.kwlist)
_RUN = rf"""(?:
      \w++(?!["'])                                       # a word or number
    | [^\w\\"'\#()\[\]{{}}]++
    | (?!(?:{_PREFIX}|{_WORDS})["'])\w++["']             # a word with an apostrophe
    | (?:{_WORDS})(?=["'])                              # return"…"
    | \\.                                               # a character behind a backslash
    | \#[^\n]*+
"""
_PLAIN = re.compile(rf"{_RUN})++", re.DOTALL | re.VERBOSE)
"""Text without strings and brackets."""
_UNQUOTED = re.compile(rf"{_RUN} | [()\[\]{{}}]++)++", re.DOTALL | re.VERBOSE)
"""Text without strings."""
_STRING = re.compile(
    rf"""{_PREFIX}?(?:
      \"\"\"(?:[^"\\]++|\\.|"(?!""))*+\"\"\"
    | '''(?:[^'\\]++|\\.|'(?!''))*+'''
    | "(?!"")(?:[^"\\\n]++|\\.)*+"
    | '(?!'')(?:[^'\\\n]++|\\.)*+'
    )""",
    re.DOTALL | re.VERBOSE,
)
_TRIPLE = re.compile(rf"{_PREFIX}?(?:\"\"\"|''')")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 200
"""Nesting of brackets that Python itself accepts."""


def call_end(text: str, start: int) -> int | None:
    """Return the index of the parenthesis that closes the call whose arguments begin at ``start``,
    or None if there is none, or if Python cannot read the text before it."""
    expected = [")"]
    position = start
    while position < len(text):
        plain = _PLAIN.match(text, position)
        if plain:
            position = plain.end()
            continue
        character = text[position]
        if character in "([{":
            expected.append(_CLOSERS[character])
            if len(expected) > _MAX_DEPTH:
                return None
            position += 1
        elif character in ")]}":
            if expected.pop() != character:
                return None
            if not expected:
                return position
            position += 1
        else:
            string = _STRING.match(text, position)
            if string is None:
                return None
            position = string.end()
    return None


class StringScanner:
    """Says whether places of a text are inside strings of the code that begins at ``start``.

    The places are asked in ascending order. Code with a string that never ends is not Python from
    there on, and the places behind it count as outside.
    """

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._position = start

    def is_inside(self, place: int) -> bool:
        """True if ``place`` is inside a string."""
        text = self._text
        while self._position < place:
            if unquoted := _UNQUOTED.match(text, self._position, place):
                self._position = unquoted.end()
            elif string := _STRING.match(text, self._position):
                self._position = string.end()
            elif _TRIPLE.match(text, self._position):
                self._position = len(text) + 1
                return False
            else:
                self._position += 1
        return place < self._position <= len(text)
