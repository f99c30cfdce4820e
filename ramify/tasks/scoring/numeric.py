"""The same number, however it is written: ``1,234``, ``1234.0``, ``$1,234`` and ``"1.234e3"``.

An answer that holds several numbers does not say which one it means, unless the last is asked for.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import accepted, as_text

_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d{1,400})?(?:\.\d{1,400}|(?<=\d)\.?)(?:[eE][-+]?\d{1,4})?(?!\w|\.\d)"
)


class NumericScore(msgspec.Struct, frozen=True):
    """1 where the answer's number is a gold's, within ``rel_tol`` of it or ``abs_tol``."""

    rel_tol: float = 1e-6
    abs_tol: float = 0.0
    last: bool = False
    """Take the last number of a text, instead of refusing one with several."""

    def __call__(self, answer: Any, item: Item) -> float:
        said = self.read(answer)
        golds = [self.read(gold) for gold in accepted(item.gold)]
        return float(
            any(
                said is not None and gold is not None and self._is_same(said, gold)
                for gold in golds
            )
        )

    def read(self, value: Any) -> int | float | None:
        """The number that ``value`` is or says; None where it says none, or several."""
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        text = as_text(value) if isinstance(value, str) else None
        found = _NUMBER.findall(text) if text is not None else []
        if not found or (len(found) > 1 and not self.last):
            return None
        return _number(found[-1])

    def _is_same(self, said: int | float, gold: int | float) -> bool:
        if isinstance(said, int) and isinstance(gold, int) and not self.abs_tol:
            return said == gold  # whole numbers are counted, not measured
        try:
            return math.isclose(said, gold, rel_tol=self.rel_tol, abs_tol=self.abs_tol)
        except OverflowError:  # a whole number that no float holds
            return said == gold


def _number(text: str) -> int | float | None:
    plain = text.replace(",", "").replace("−", "-")
    try:
        return int(plain)
    except ValueError:
        number = float(plain)
        return number if math.isfinite(number) else None


numeric = NumericScore()
"""One number, to a millionth; whole numbers exactly."""
last_number = NumericScore(last=True)
"""As ``numeric``, of an answer that argues before it concludes."""
