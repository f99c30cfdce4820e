"""Tokens and dollars as a server reports them -> figures that a budget can rely on.

    {"prompt_tokens": 9, "completion_tokens": 2}                  ->  Usage(9, 2, calls=1)
    9 prompt tokens, of which 500 were cached; -3; NaN; true      ->  Usage(): not known

A report that is missing, impossible or contradicts itself counts as not known, and the pool then
books the most that the request can cost. So no report can lower what was spent. Not here: prices
(``base.py``), limits (the engine's ledger).
"""

from __future__ import annotations

import math
from typing import Any

from ramify.types.message import Usage


def counted(
    given: Any,
    produced: Any,
    *,
    total: Any = None,
    cached: Any = None,
    stored: Any = None,
    reasoning: Any = None,
) -> Usage:
    """The usage of one request; ``Usage()`` if these figures are missing or contradict each other.

    ``given`` are the tokens of the whole prompt, ``produced`` those of the reply, ``total`` those
    of both; ``cached`` and ``stored`` are parts of the prompt. Some servers count thinking in the
    total alone, and charge for it."""
    try:
        inputs, outputs, whole, read, written, thought = map(
            _count, (given, produced, total, cached, stored, reasoning)
        )
    except ValueError:
        return Usage()
    if inputs is None or (outputs is None and (whole is None or whole < inputs)):
        return Usage()
    output = max(outputs or 0, (whole or 0) - inputs)
    thought = thought or 0
    output += thought if thought > output else 0
    usage = Usage(inputs, output, read or 0, thought, calls=1, cache_write_tokens=written or 0)
    return usage if _agrees(usage) else Usage()


def believed(usage: Usage, most: Usage, window: int) -> Usage:
    """``usage`` of one request, or ``most`` if it was not reported, or cannot be: no prompt and no
    reply is longer than the model's ``window`` of tokens."""
    within = usage.input_tokens <= max(most.input_tokens, window) and usage.output_tokens <= max(
        most.output_tokens, window
    )
    return usage if usage.calls and _agrees(usage) and within else most


def dollars(reported: Any) -> float | None:
    """What a server says that a request cost; None if that is not an amount of money."""
    if isinstance(reported, bool) or not isinstance(reported, int | float):
        return None
    return float(reported) if math.isfinite(reported) and reported >= 0 else None


def _count(reported: Any) -> int | None:
    """A number of tokens, or None. Raises ValueError for anything that is not a count."""
    if reported is None:
        return None
    if isinstance(reported, float) and reported.is_integer():  # some gateways write 12.0
        reported = int(reported)
    if isinstance(reported, bool) or not isinstance(reported, int) or reported < 0:
        raise ValueError
    return int(reported)


def _agrees(usage: Usage) -> bool:
    """True if every figure is a count, and no part is more than its whole."""
    figures = [getattr(usage, name) for name in Usage.__struct_fields__]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in figures):
        return False
    parts = usage.cached_tokens + usage.cache_write_tokens
    return parts <= usage.input_tokens and usage.reasoning_tokens <= usage.output_tokens
