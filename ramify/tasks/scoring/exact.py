"""The same text: to the letter, or without case, punctuation and articles. A list of golds accepts
any of them."""

from __future__ import annotations

from typing import Any

from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted, as_text, words


def exact(answer: Any, item: Item) -> float:
    """1 where the answer reads as a gold does: ``7``, ``"7"`` and ``" 7 "`` are the same, ``7.0``
    is not."""
    said = as_text(answer)
    return float(said is not None and said in {as_text(gold) for gold in accepted(item.gold)})


def normalised(answer: Any, item: Item) -> float:
    """1 where answer and gold have the same words in the same order: ``"the Louvre!"`` is
    ``"Louvre"``."""
    said = as_text(answer)
    if said is None or not words(said):
        return 0.0
    return float(words(said) in [words(as_text(gold) or "") for gold in accepted(item.gold)])
