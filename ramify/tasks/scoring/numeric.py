"""Equality of numbers in any notation: ``1,234``, ``1234.0``, ``$1,234`` and ``"1.234e3"``.

An answer with several numbers is ambiguous and scores 0, unless ``last`` selects the last one.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted, as_text

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
