"""Regular expressions that are compiled on first use, so that programs start faster.

    _DATE = lazy_pattern(r"\\d{4}-\\d\\d-\\d\\d")
    _DATE.search(text)

A hundred patterns take 15 ms to compile, but a program uses only a few of them. Use ``re.compile``
if a pattern is passed to a function of ``re``, or if its type or identity matters: the ``re``
attribute of a match is the compiled pattern.
"""

from __future__ import annotations

import re
from typing import Any, cast


class LazyPattern:
    """A regular expression that is compiled on first use.

    It is used like a compiled regular expression. It compiles the expression when one of its
    attributes is first used.
    """

    def __init__(self, text: str, flags: int) -> None:
        self._text = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        # Kept, so that the next use finds the method as an attribute.
        found = self.__dict__[name] = getattr(re.compile(self._text, self._flags), name)
        return found


def lazy_pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a regular expression that is compiled at its first use.

    An error in the pattern is raised only then.
    """
    return cast("re.Pattern[str]", LazyPattern(text, flags))
