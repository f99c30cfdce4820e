"""Patterns that are compiled when they are first used.

    _DATE = lazy_pattern(r"\\d{4}-\\d\\d-\\d\\d")
    _DATE.search(text)

A hundred patterns take 15 ms to compile, which every start of a program would pay, and a question
uses few of them. Use ``re.compile`` where a pattern is an argument of a function of ``re``, or
where its type or identity matters: a match has the compiled pattern.
"""

from __future__ import annotations

import re
from typing import Any, cast


class LazyPattern:
    """Stands for a compiled pattern; compiles it at the first use of an attribute."""

    def __init__(self, text: str, flags: int) -> None:
        self._text = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        # Kept, so that the next use finds the method as an attribute.
        found = self.__dict__[name] = getattr(re.compile(self._text, self._flags), name)
        return found


def lazy_pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Like ``re.compile``, but an error in the pattern appears at its first use."""
    return cast("re.Pattern[str]", LazyPattern(text, flags))
