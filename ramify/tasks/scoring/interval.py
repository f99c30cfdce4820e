"""How well intervals cover intervals: spans of time, ranges of lines or of characters.

F1 = 2·|P ∩ G| / (|P| + |G|), where P and G are the unions of what was said and of what is right;
lengths, not counts.

    said [0, 10], right [5, 15]: overlap 5, lengths 10 and 10: 0.5
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import as_text

Span = tuple[float, float]
MAX_SPANS = 10_000
_PAIR = re.compile(
    r"(-?\d{1,15}(?:\.\d{1,15})?)\s*(?:-|–|—|to|\.\.|,|:)\s*(-?\d{1,15}(?:\.\d{1,15})?)"
)


class IntervalF1Score(msgspec.Struct, frozen=True):
    """From 0 to 1."""

    inclusive: bool = False
    """Ends belong to the interval, as with lines: 3-5 are three of them, and 4-4 is one."""

    def __call__(self, answer: Any, item: Item) -> float:
        gold = spans(item.gold)
        if gold is None:
            raise ConfigError(
                f"item {item.id}: its gold {item.gold!r:.60} is no list of intervals [start, end]"
            )
        said = spans(answer)
        if said is None:
            return 0.0
        one, other = self._union(said), self._union(gold)
        lengths = _length(one) + _length(other)
        if not lengths:
            return float(one == other)
        return 2 * _overlap(one, other) / lengths

    def _union(self, given: Sequence[Span]) -> list[Span]:
        found: list[Span] = []
        for start, end in sorted((a, b + 1 if self.inclusive else b) for a, b in given):
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        return found


def spans(value: Any) -> list[Span] | None:
    """The intervals that ``value`` says: a pair, a list of pairs, or text as ``"3-7, 10 to 12"``;
    None where it says something else, or an interval ends before it begins."""
    if isinstance(value, str):
        text = as_text(value)
        value = [(float(a), float(b)) for a, b in _PAIR.findall(text)] if text is not None else None
        if not value:
            return None
    if not isinstance(value, list | tuple) or len(value) > MAX_SPANS:
        return None
    if len(value) == 2 and all(_is_number(each) for each in value):
        value = [value]
    found = []
    for each in value:
        if (
            not isinstance(each, list | tuple)
            or len(each) != 2
            or not all(_is_number(end) for end in each)
        ):
            return None
        if each[1] < each[0]:
            return None
        found.append((float(each[0]), float(each[1])))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _length(union: Sequence[Span]) -> float:
    return math.fsum(end - start for start, end in union)


def _overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    shared, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        shared += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


interval_f1 = IntervalF1Score()
"""Of spans of time or characters: the end does not belong to it."""
line_f1 = IntervalF1Score(inclusive=True)
"""Of lines, whose ends belong to the range."""
