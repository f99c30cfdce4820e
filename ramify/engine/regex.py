"""Matcher for untrusted regular expressions, with a bounded and counted number of steps.

Python's matcher tries one alternative after another, so ``(a+)+$`` takes twice as long for each
additional letter. This matcher instead follows all positions at which a part may end at once, so
each position is visited once per part and repetition:

    "a|ab"  on "xab", from {0, 1, 2, 3}:   a -> {2}, ab -> {3}   together {2, 3}: it matches

Expressions that need more than positions, such as backreferences, are rejected.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any

MAX_CHARS = 1000
"""Maximum length of an expression."""
_PARSER = importlib.import_module("re._parser")
_CATEGORIES = {
    name: re.compile(text).fullmatch
    for name, text in {
        "CATEGORY_DIGIT": r"\d",
        "CATEGORY_NOT_DIGIT": r"\D",
        "CATEGORY_SPACE": r"\s",
        "CATEGORY_NOT_SPACE": r"\S",
        "CATEGORY_WORD": r"\w",
        "CATEGORY_NOT_WORD": r"\W",
    }.items()
}
_WORD = re.compile(r"\w").fullmatch
Places = set[int]
"""Offsets in a text, from 0 to its length."""


class UnsupportedRegex(ValueError):
    """The expression is invalid or cannot be matched in bounded time; ``str()`` gives the
    reason."""


class RegexPattern:
    """One compiled expression."""

    def __init__(self, text: str) -> None:
        """Raises UnsupportedRegex."""
        if len(text) > MAX_CHARS:
            raise UnsupportedRegex(
                f"it has {len(text):,} characters, and at most {MAX_CHARS:,} are taken"
            )
        try:
            parsed = _PARSER.parse(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UnsupportedRegex(str(error)) from None
        if parsed.state.flags & ~re.UNICODE:
            raise UnsupportedRegex("it has flags: write them out, as [Aa] for (?i:a)")
        _check(parsed)
        self._parts = list(parsed)

    def search(self, text: str, spend: Callable[[int], None]) -> bool:
        """True if the expression matches anywhere in ``text``. ``spend`` is called with the number
        of positions visited, and may raise."""
        return bool(_Search(text, spend).through(self._parts, set(range(len(text) + 1))))


class _Search:
    def __init__(self, text: str, spend: Callable[[int], None]) -> None:
        self._text = text
        self._spend = spend

    def through(self, parts: Iterable[Any], places: Places) -> Places:
        """Return where the sequence ``parts`` may end if it starts at ``places``."""
        for kind, value in parts:
            self._spend(1 + len(places))
            if not places:
                break
            places = getattr(self, f"_{kind.name.lower()}", self._one)(value, places, kind)
        return places

    def _one(self, value: Any, places: Places, kind: Any) -> Places:
        text = self._text
        return {
            place + 1
            for place in places
            if place < len(text) and _is_one(kind.name, value, text[place])
        }

    def _branch(self, value: Any, places: Places, _: Any) -> Places:
        return set().union(*(self.through(parts, places) for parts in value[1]))

    def _subpattern(self, value: Any, places: Places, _: Any) -> Places:
        return self.through(value[3], places)

    def _max_repeat(self, value: Any, places: Places, _: Any) -> Places:
        low, high, parts = value
        for _ in range(low):
            after = self.through(parts, places)
            if after == places:  # a fixed point: further repetitions change nothing
                break
            places = after
        reached, fresh = set(places), places
        while fresh and low < high:
            fresh = self.through(parts, fresh) - reached
            reached |= fresh
            low += 1
        return reached

    _min_repeat = _max_repeat

    def _assert(self, value: Any, places: Places, _: Any) -> Places:
        return {place for place in places if self.through(value[1], {place})}

    def _assert_not(self, value: Any, places: Places, _: Any) -> Places:
        return {place for place in places if not self.through(value[1], {place})}

    def _at(self, value: Any, places: Places, _: Any) -> Places:
        return {place for place in places if self._is_at(value.name, place)}

    def _is_at(self, name: str, place: int) -> bool:
        text = self._text
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return place == 0
        if name in ("AT_END", "AT_END_STRING"):
            return place == len(text) or (name == "AT_END" and text[place:] == "\n")
        before, after = text[place - 1 : place], text[place : place + 1]
        is_edge = bool(_WORD(before)) != bool(_WORD(after))
        return is_edge == (name == "AT_BOUNDARY")


def _is_one(kind: str, value: Any, char: str) -> bool:
    match kind:
        case "ANY":
            return char != "\n"
        case "LITERAL":
            return bool(ord(char) == value)
        case "NOT_LITERAL":
            return bool(ord(char) != value)
        case "RANGE":
            return bool(value[0] <= ord(char) <= value[1])
        case "CATEGORY":
            return _CATEGORIES[value.name](char) is not None
    is_negated = value[0][0].name == "NEGATE"
    return bool(
        any(_is_one(item.name, arg, char) for item, arg in value[is_negated:]) != is_negated
    )


_SINGLE = {"ANY", "LITERAL", "NOT_LITERAL", "IN"}
_EDGES = {
    "AT_BEGINNING",
    "AT_BEGINNING_STRING",
    "AT_END",
    "AT_END_STRING",
    "AT_BOUNDARY",
    "AT_NON_BOUNDARY",
}


def _check(parts: Iterable[Any]) -> None:
    """Raise UnsupportedRegex for the first part that ``_Search`` has no rule for."""
    for kind, value in parts:
        match kind.name:
            case "BRANCH":
                for branch in value[1]:
                    _check(branch)
            case "SUBPATTERN" if not value[1] and not value[2]:
                _check(value[3])
            case "MAX_REPEAT" | "MIN_REPEAT":
                _check(value[2])
            case "ASSERT" | "ASSERT_NOT" if value[0] > 0:
                _check(value[1])
            case "AT" if value.name in _EDGES:
                pass
            case name if name not in _SINGLE:
                raise UnsupportedRegex(
                    f"it has a part ({name.lower()}) that cannot be matched in bounded time"
                )
