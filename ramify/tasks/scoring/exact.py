"""Equality of texts: exact, or without case, punctuation and articles. If the gold is a list, any
of its entries is accepted.
"""

from __future__ import annotations

from typing import Any

from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted, as_text, words


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
