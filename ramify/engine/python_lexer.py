"""Find the strings, comments and brackets of Python code that is embedded in arbitrary text.

    closing_parenthesis_index('3) (approx)', 0)       1: the parenthesis that closes the call
    closing_parenthesis_index('"a) b", [1])', 0)      11
    closing_parenthesis_index('it is "unclosed)', 0)  None: Python cannot read it

This module decides where a call ends, and whether a position is inside a string. It makes one pass
over the text with ``re``. The standard ``tokenize`` takes about 60 times as long, and its reading
of invalid text depends on the version of Python, so replays would depend on it, too. Both agree on
text that ``tokenize`` can read (``tests/engine/test_action.py``).

An apostrophe directly after a word, as in ``it's``, does not begin a string: Python has no such
token.
"""

from __future__ import annotations

import keyword
import re

from ramify.lazy_pattern import lazy_pattern

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
_PLAIN = lazy_pattern(rf"{_RUN})++", re.DOTALL | re.VERBOSE)
"""Matches text without strings and brackets."""
_UNQUOTED = lazy_pattern(rf"{_RUN} | [()\[\]{{}}]++)++", re.DOTALL | re.VERBOSE)
"""Matches text without strings."""
_STRING = lazy_pattern(
    rf"""{_PREFIX}?(?:
      \"\"\"(?:[^"\\]++|\\.|"(?!""))*+\"\"\"
    | '''(?:[^'\\]++|\\.|'(?!''))*+'''
    | "(?!"")(?:[^"\\\n]++|\\.)*+"
    | '(?!'')(?:[^'\\\n]++|\\.)*+'
    )""",
    re.DOTALL | re.VERBOSE,
)
_TRIPLE = lazy_pattern(rf"{_PREFIX}?(?:\"\"\"|''')")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 200
"""Maximum nesting of brackets, as in Python itself."""


def closing_parenthesis_index(text: str, start: int) -> int | None:
    """Return the index of the parenthesis that closes a call whose arguments begin at ``start``.

    Return None if the call is not closed or its arguments are not valid Python.
    """
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


class StringLiteralLocator:
    """Determines whether positions in a text are inside Python string literals.

    The Python code begins at the position ``start``.

    Positions must be queried in ascending order. After the start of a triple-quoted string that
    never ends, every position counts as outside, because the rest is not Python.
    """

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._position = start

    def is_inside(self, place: int) -> bool:
        """Return True if the position ``place`` is inside a string literal.

        Query positions in ascending order.
        """
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
