"""Converts answers and gold answers to text, and scores answers by comparing the two.

An answer may have any type and size, because a model's code produced it.

``exact``; ``normalised``, without case, punctuation and articles; and ``f1``, the harmonic mean of
precision and recall over bags of words, F1 = 2·shared / (words of the answer + words of the gold),
as in SQuAD (Rajpurkar et al. 2016). If the gold is a list, any of its entries is accepted, and the
best one counts.

``numeric`` compares numbers in any notation: ``1,234``, ``1234.0``, ``$1,234`` and ``"1.234e3"``.
An answer with several numbers is ambiguous and scores 0, unless ``last`` selects the last one.

``IntervalF1Scorer`` compares spans of time, ranges of lines or of characters:
F1 = 2·|P ∩ G| / (|P| + |G|), where P and G are the unions of the predicted and of the gold
intervals, and |·| is their total length.

    predicted [0, 10], gold [5, 15]: overlap 5, lengths 10 and 10: F1 = 0.5
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import Item

MAX_CHARS = 100_000
"""Maximum length of an answer in characters. A longer text is not a plausible answer if the gold
answer is short.
"""
_MAX_DIGITS = 1000
_WITHOUT_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = {"a", "an", "the"}


def as_text(value: Any) -> str | None:
    """Return ``value`` as plain text, without surrounding white space.

    Returns None if the text is empty or too long.

    >>> as_text(" 7 "), as_text(7), as_text(7.5), as_text(True), as_text(["a", 1]), as_text(None)
    ('7', '7', '7.5', 'True', '["a",1]', None)
    """
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool | float):
        text = str(value)
    elif isinstance(value, int):
        text = str(value) if value.bit_length() < 3 * _MAX_DIGITS else ""
    elif value is None:
        return None
    else:
        text = _as_json(value)
    return text.strip() if 0 < len(text) <= MAX_CHARS else None


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return ""


def normalised_words(text: str) -> list[str]:
    """Return the words of a text in a normalised form, so that two texts can be compared.

    Case, punctuation and articles are ignored, as in SQuAD (Rajpurkar et al. 2016).

    >>> words("The U.S.A., 1,000 times!")
    ['u', 's', '1', '000', 'times']
    """
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_WITHOUT_PUNCTUATION)
    return [word for word in plain.split() if word not in _ARTICLES]


def accepted_answers(gold: Any) -> list[Any]:
    """Return the list of answers that an item accepts as right.

    If ``gold`` is a list, these are its entries; otherwise it is ``gold`` itself.
    """
    return list(gold) if isinstance(gold, list | tuple) else [gold]


def exact(answer: Any, item: Item) -> float:
    """Return 1 if the answer has the same text as a gold answer, and 0 otherwise.

    ``7``, ``"7"`` and ``" 7 "`` are equal; ``7.0`` differs.

    >>> tasks.exact(" 7 ", tasks.Item("?", gold=7))
    1.0
    """
    text = as_text(answer)
    return float(
        text is not None and text in {as_text(gold) for gold in accepted_answers(item.gold)}
    )


def normalised(answer: Any, item: Item) -> float:
    """Return 1 if the answer and a gold answer have the same words in the same order, and 0
    otherwise.

    Case, punctuation and articles are ignored: ``"the Louvre!"`` equals ``"Louvre"``.

    >>> tasks.normalised("the Louvre!", tasks.Item("?", gold="Louvre"))
    1.0
    """
    text = as_text(answer)
    if text is None or not normalised_words(text):
        return 0.0
    return float(
        normalised_words(text)
        in [normalised_words(as_text(gold) or "") for gold in accepted_answers(item.gold)]
    )


def f1(answer: Any, item: Item) -> float:
    """Return the F1 score, from 0 to 1, of the answer's words against those of the gold answer.

    For example, ``"red blue"`` against ``"red green"`` scores 2·1/(2+2) = 0.5.
    """
    text = as_text(answer)
    if text is None:
        return 0.0
    golds = (Counter(normalised_words(as_text(gold) or "")) for gold in accepted_answers(item.gold))
    return max((_f1(Counter(normalised_words(text)), gold) for gold in golds), default=0.0)


def _f1(answer: Counter[str], gold: Counter[str]) -> float:
    shared = (answer & gold).total()
    return 2 * shared / (answer.total() + gold.total()) if shared else 0.0


_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d{1,400})?"
    r"(?:\.\d{1,400}|(?<=\d)\.?)(?:[eE][-+]?\d{1,4})?(?!\w|\.\d)"
)


class NumericScorer(msgspec.Struct, frozen=True):
    """A scorer that returns 1 if the number in the answer equals that of a gold answer, otherwise
    0.

    The numbers may differ by a relative or absolute tolerance.
    """

    rel_tol: float = 1e-6
    abs_tol: float = 0.0
    last: bool = False
    """If True, use the last number of a text. If False, a text with several numbers is rejected."""

    def __call__(self, answer: Any, item: Item) -> float:
        number = self.read(answer)
        golds = [self.read(gold) for gold in accepted_answers(item.gold)]
        return float(
            any(
                number is not None and gold is not None and self._is_same(number, gold)
                for gold in golds
            )
        )

    def read(self, value: Any) -> int | float | None:
        """Return the number in an answer, or None if the number is missing or ambiguous.

        Several numbers are ambiguous unless ``last`` is set.
        """
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        text = as_text(value) if isinstance(value, str) else None
        numbers = _NUMBER.findall(text) if text is not None else []
        if not numbers or (len(numbers) > 1 and not self.last):
            return None
        return _number(numbers[-1])

    def _is_same(self, number: int | float, gold: int | float) -> bool:
        if isinstance(number, int) and isinstance(gold, int) and not self.abs_tol:
            return number == gold  # integers are counts and must match exactly
        try:
            return math.isclose(number, gold, rel_tol=self.rel_tol, abs_tol=self.abs_tol)
        except OverflowError:  # an integer too large for a float
            return number == gold


def _number(text: str) -> int | float | None:
    plain = text.replace(",", "").replace("−", "-")
    try:
        return int(plain)
    except ValueError:
        number = float(plain)
        return number if math.isfinite(number) else None


numeric = NumericScorer()
"""Exactly one number, with a relative tolerance of 1e-6; integers must match exactly.

Example:
    numeric("7.0 hosts", tasks.Item("?", gold=7))    # 1.0
"""
last_number = NumericScorer(last=True)
"""Like ``numeric``, but scores the last number of an answer, so that reasoning may precede it."""


Span = tuple[float, float]
MAX_SPANS = 10_000
_PAIR = re.compile(
    r"(-?\d{1,15}(?:\.\d{1,15})?)\s*(?:-|–|—|to|\.\.|,|:)\s*(-?\d{1,15}(?:\.\d{1,15})?)"
)


class IntervalF1Scorer(msgspec.Struct, frozen=True):
    """Scores from 0 to 1 how well the intervals in an answer overlap the gold intervals.

    The score is the F1 of their total lengths.
    """

    inclusive: bool = False
    """Whether an interval includes its end, as a range of lines does: 3-5 has three lines, and 4-4
    has one."""

    def __call__(self, answer: Any, item: Item) -> float:
        gold = parse_intervals(item.gold)
        if gold is None:
            raise ConfigError(
                f"item {item.id}: its gold {item.gold!r:.60} is not a list of intervals "
                "[start, end]"
            )
        predicted = parse_intervals(answer)
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


def parse_intervals(value: Any) -> list[Span] | None:
    """Parse intervals from a pair, a list of pairs, or text such as ``"3-7, 10 to 12"``.

    Returns None for anything else, and if an interval ends before it begins.
    """
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


interval_f1 = IntervalF1Scorer()
"""Scores the F1 of the overlap between intervals of time or characters. The end of an interval is
excluded."""
line_f1 = IntervalF1Scorer(inclusive=True)
"""F1 of ranges of lines; a range includes its end.

Example:
    line_f1("3-5", tasks.Item("?", gold="3-4"))    # 0.8
"""
