"""Word overlap of answer and gold: the harmonic mean of precision and recall over bags of words.

F1 = 2·shared / (words of the answer + words of the gold), as in SQuAD (Rajpurkar et al. 2016). With
several golds, the best one counts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted, as_text, words


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
