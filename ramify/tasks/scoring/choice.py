"""Scores answers to multiple-choice questions.

An answer names an option by its letter, its number (from 1) or its text.

The options are in ``metadata["choices"]``. The gold is a letter, an index (from 0) or the text of
the right option. An answer that names two options counts as none.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from ramify.errors import ConfigError
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import as_text, normalised_words

_ALONE = re.compile(r"[\s(\[*]*([A-Za-z]|\d{1,2})[\s)\].:*]*")
_MARKED = re.compile(r"(?:\b(?i:answer|option|choice)(?i:\s+is)?[\s:]*[(\[*]*|\()([A-Z])\b")
MAX_CHARS = 2000


def choice(answer: Any, item: Item) -> float:
    """Return 1 if the answer names the right option of a multiple-choice question, and 0 otherwise.

    The forms ``"B"``, ``"(b)"``, ``2``, ``"The answer is B."`` and the option's text are accepted.

    >>> item = tasks.Item("?", gold="B", metadata={"choices": ["tea", "jam"]})
    >>> tasks.choice("The answer is B.", item)
    1.0
    """
    choices = item.metadata.get("choices")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 2 <= len(choices) <= 26:
        raise ConfigError(
            f"item {item.id}: choice needs 2 to 26 options in metadata['choices']; it has "
            f"{choices!r:.80}"
        )
    right = _gold(item, choices)
    return float(find_named_choice(answer, choices) == right)


def find_named_choice(answer: Any, choices: Sequence[Any]) -> int | None:
    """Return the index of the option that an answer names, or None if this is not clear."""
    text = as_text(answer)
    if text is None or len(text) > MAX_CHARS:
        return None
    answer_words = normalised_words(text)
    by_text = [
        index
        for index, option in enumerate(choices)
        if answer_words and normalised_words(as_text(option) or "") == answer_words
    ]
    if len(by_text) == 1:
        return by_text[0]
    alone = _ALONE.fullmatch(text)
    if alone:
        return _index(alone[1], len(choices))
    marked = {_index(letter, len(choices)) for letter in _MARKED.findall(text)}
    return marked.pop() if len(marked) == 1 else None


def _index(sign: str, num: int) -> int | None:
    index = int(sign) - 1 if sign.isdigit() else string.ascii_uppercase.index(sign.upper())
    return index if 0 <= index < num else None


def _gold(item: Item, choices: Sequence[Any]) -> int:
    gold = (
        item.gold
        if isinstance(item.gold, int) and not isinstance(item.gold, bool)
        else find_named_choice(item.gold, choices)
    )
    if gold is None or not 0 <= gold < len(choices):
        raise ConfigError(
            f"item {item.id}: its gold {item.gold!r:.40} is not one of its {len(choices)} choices"
        )
    return gold
