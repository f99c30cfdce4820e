"""Conversion of answers and golds to bounded text. An answer may be of any type and size, because a
model's code produced it.
"""

from __future__ import annotations

import string
import unicodedata
from typing import Any

import msgspec

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
