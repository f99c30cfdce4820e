"""Conversion of answers and golds to bounded text. An answer may be of any type and size, because a
model's code produced it.

Scores that compare such texts: ``exact``; ``normalised``, without case, punctuation and articles;
and ``f1``, the harmonic mean of precision and recall over bags of words, F1 = 2·shared / (words of
the answer + words of the gold), as in SQuAD (Rajpurkar et al. 2016). If the gold is a list, any of
its entries is accepted, and the best one counts.
"""

from __future__ import annotations

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
