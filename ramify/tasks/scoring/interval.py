"""Overlap of intervals: spans of time, ranges of lines or of characters.

F1 = 2·|P ∩ G| / (|P| + |G|), where P and G are the unions of the predicted and of the gold
intervals, and |·| is their total length.

    predicted [0, 10], gold [5, 15]: overlap 5, lengths 10 and 10: F1 = 0.5
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
    """F1 of intervals, from 0 to 1."""

    inclusive: bool = False
    """Intervals include their end, as for lines: 3-5 has three lines, and 4-4 has one."""

    def __call__(self, answer: Any, item: Item) -> float:
        gold = spans(item.gold)
        if gold is None:
            raise ConfigError(
                f"item {item.id}: its gold {item.gold!r:.60} is not a list of intervals "
                "[start, end]"
            )
        predicted = spans(answer)
        if predicted is None:
            return 0.0
        one, other = self._union(predicted), self._union(gold)
        lengths = _length(one) + _length(other)
        if not lengths:
            return float(one == other)
        return 2 * _overlap(one, other) / lengths

    def _union(self, intervals: Sequence[Span]) -> list[Span]:
        union: list[Span] = []
        for start, end in sorted((a, b + 1 if self.inclusive else b) for a, b in intervals):
            if union and start <= union[-1][1]:
                union[-1] = (union[-1][0], max(end, union[-1][1]))
            else:
                union.append((start, end))
        return union


def spans(value: Any) -> list[Span] | None:
    """Read intervals from a pair, a list of pairs, or text such as ``"3-7, 10 to 12"``. Returns
    None for anything else, and if an interval ends before it begins."""
    if isinstance(value, str):
        text = as_text(value)
        value = [(float(a), float(b)) for a, b in _PAIR.findall(text)] if text is not None else None
        if not value:
            return None
    if not isinstance(value, list | tuple) or len(value) > MAX_SPANS:
        return None
    if len(value) == 2 and all(_is_number(end) for end in value):
        value = [value]
    intervals = []
    for pair in value:
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(_is_number(end) for end in pair)
        ):
            return None
        if pair[1] < pair[0]:
            return None
        intervals.append((float(pair[0]), float(pair[1])))
    return intervals


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
"""F1 of spans of time or characters; an interval excludes its end."""
line_f1 = IntervalF1Score(inclusive=True)
"""F1 of ranges of lines; a range includes its end.

Example:
    line_f1("3-5", tasks.Item("?", gold="3-4"))    # 0.8
"""
