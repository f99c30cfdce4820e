"""Conversion of answers and golds to bounded text. An answer may be of any type and size, because a
model's code produced it.

Scores that compare such texts: ``exact``; ``normalised``, without case, punctuation and articles;
and ``f1``, the harmonic mean of precision and recall over bags of words, F1 = 2·shared / (words of
the answer + words of the gold), as in SQuAD (Rajpurkar et al. 2016). If the gold is a list, any of
its entries is accepted, and the best one counts.

``numeric`` compares numbers in any notation: ``1,234``, ``1234.0``, ``$1,234`` and ``"1.234e3"``.
An answer with several numbers is ambiguous and scores 0, unless ``last`` selects the last one.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from typing import Any

import msgspec

from ramify.tasks.base import Item

MAX_CHARS = 100_000
"""Maximum length of an answer. A longer text cannot be an answer to a question with a short gold.
"""
_MAX_DIGITS = 1000
_WITHOUT_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = {"a", "an", "the"}


def as_text(value: Any) -> str | None:
    """Return ``value`` as a person would write it, stripped. None for an empty value and for one
    that is too long.

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


def words(text: str) -> list[str]:
    """Split ``text`` into words for comparison, without case, punctuation and articles (as in
    SQuAD, Rajpurkar et al. 2016).

    >>> words("The U.S.A., 1,000 times!")
    ['u', 's', '1', '000', 'times']
    """
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_WITHOUT_PUNCTUATION)
    return [word for word in plain.split() if word not in _ARTICLES]


def accepted(gold: Any) -> list[Any]:
    """Return the golds that an item accepts: all entries of a list, or the single gold."""
    return list(gold) if isinstance(gold, list | tuple) else [gold]


def exact(answer: Any, item: Item) -> float:
    """Return 1 if the answer has the same text as a gold. ``7``, ``"7"`` and ``" 7 "`` are equal;
    ``7.0`` differs.

    >>> tasks.exact(" 7 ", tasks.Item("?", gold=7))
    1.0
    """
    text = as_text(answer)
    return float(text is not None and text in {as_text(gold) for gold in accepted(item.gold)})


def normalised(answer: Any, item: Item) -> float:
    """Return 1 if answer and gold have the same words in the same order: ``"the Louvre!"`` equals
    ``"Louvre"``.

    >>> tasks.normalised("the Louvre!", tasks.Item("?", gold="Louvre"))
    1.0
    """
    text = as_text(answer)
    if text is None or not words(text):
        return 0.0
    return float(words(text) in [words(as_text(gold) or "") for gold in accepted(item.gold)])


def f1(answer: Any, item: Item) -> float:
    """Return F1 from 0 to 1. ``"red blue"`` against ``"red green"``: 2·1/(2+2) = 0.5."""
    text = as_text(answer)
    if text is None:
        return 0.0
    return max(
        _f1(Counter(words(text)), Counter(words(as_text(gold) or "")))
        for gold in accepted(item.gold)
    )


def _f1(answer: Counter[str], gold: Counter[str]) -> float:
    shared = (answer & gold).total()
    return 2 * shared / (answer.total() + gold.total()) if shared else 0.0


_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d{1,400})?"
    r"(?:\.\d{1,400}|(?<=\d)\.?)(?:[eE][-+]?\d{1,4})?(?!\w|\.\d)"
)


class NumericScore(msgspec.Struct, frozen=True):
    """Score 1 if the answer's number is within ``rel_tol`` or ``abs_tol`` of a gold's."""

    rel_tol: float = 1e-6
    abs_tol: float = 0.0
    last: bool = False
    """Use the last number of a text instead of rejecting a text with several."""

    def __call__(self, answer: Any, item: Item) -> float:
        number = self.read(answer)
        golds = [self.read(gold) for gold in accepted(item.gold)]
        return float(
            any(
                number is not None and gold is not None and self._is_same(number, gold)
                for gold in golds
            )
        )

    def read(self, value: Any) -> int | float | None:
        """Return the number in ``value``, or None if there is none or more than one."""
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


numeric = NumericScore()
"""Exactly one number, with a relative tolerance of 1e-6; integers must match exactly.

Example:
    numeric("7.0 hosts", tasks.Item("?", gold=7))    # 1.0
"""
last_number = NumericScore(last=True)
"""Like ``numeric``, but uses the last number of an answer that reasons first."""
