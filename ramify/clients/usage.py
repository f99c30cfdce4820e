"""Validate the tokens and dollars that a server reports, so that a budget can rely on them.

    {"prompt_tokens": 9, "completion_tokens": 2}            ->  Usage(9, 2, calls=1)
    9 prompt tokens, of which 500 were cached; -3; NaN; true  ->  Usage(): unknown

A report that is missing, impossible or inconsistent counts as unknown, and the pool then books the
most that the request can cost. No report can therefore lower the recorded spending. Not here:
prices (see ``base.py``) and limits (see the engine's ledger, ``engine/limits.py``).
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
    """Return the usage of one request, or ``Usage()`` if the figures are missing or inconsistent.

    ``given`` counts the tokens of the whole prompt, ``produced`` those of the reply and ``total``
    both; ``cached`` and ``stored`` are parts of the prompt. Some servers count reasoning tokens
    only in the total, and charge for them.
    """
    try:
        inputs, outputs, both, read, written, thinking = map(
            _count, (given, produced, total, cached, stored, reasoning)
        )
    except ValueError:
        return Usage()
    if inputs is None or (outputs is None and (both is None or both < inputs)):
        return Usage()
    output = max(outputs or 0, (both or 0) - inputs)
    thinking = thinking or 0
    output += thinking if thinking > output else 0
    usage = Usage(inputs, output, read or 0, thinking, calls=1, cache_write_tokens=written or 0)
    return usage if _is_consistent(usage) else Usage()


def believed(usage: Usage, most: Usage, window: int) -> Usage:
    """Return ``usage`` of one request, or ``most`` if it was not reported or is impossible: neither
    prompt nor reply can be longer than the model's ``window`` of tokens."""
    within = usage.input_tokens <= max(most.input_tokens, window) and usage.output_tokens <= max(
        most.output_tokens, window
    )
    return usage if usage.calls and _is_consistent(usage) and within else most


def dollars(reported: Any) -> float | None:
    """Return the cost that a server reports, or None if it is not a valid amount of money."""
    if isinstance(reported, bool) or not isinstance(reported, int | float):
        return None
    return float(reported) if math.isfinite(reported) and reported >= 0 else None


def _count(reported: Any) -> int | None:
    """Return a number of tokens, or None. Raises ValueError for anything that is not a count."""
    if reported is None:
        return None
    if isinstance(reported, float) and reported.is_integer():  # some gateways write 12.0
        reported = int(reported)
    if isinstance(reported, bool) or not isinstance(reported, int) or reported < 0:
        raise ValueError
    return int(reported)


def _is_consistent(usage: Usage) -> bool:
    """Return True if every figure is a count and no part exceeds its total."""
    figures = [getattr(usage, name) for name in Usage.__struct_fields__]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in figures):
        return False
    parts = usage.cached_tokens + usage.cache_write_tokens
    return parts <= usage.input_tokens and usage.reasoning_tokens <= usage.output_tokens
