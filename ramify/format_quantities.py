"""Format counts, dollars and durations for people: in terminals, in sentences and on web pages.

    format_count(45_210) -> "45.2k"      dollars(0.00049) -> "$0.00049"   seconds(600) -> "10 min"
    pluralize(2, "turn") -> "2 turns"    dollars(1234.5) -> "$1,234.50"   seconds(0.42) -> "420 ms"

No number is written with an exponent, and amounts are rounded before their unit is chosen: 59.97
seconds are ``1 min``, never ``60.0 s``. ``viewer/static/format.js`` formats in the same way on web
pages; ``tests/viewer/quantity_cases.json`` has the cases that both must satisfy. Dates are
formatted in ``cli/terminal_text.py``, and figures in prompts, which must never change, in
``engine/prompt_text.py``.
"""

from __future__ import annotations

import math

LEAST_DOLLARS = 1e-6
"""Smallest positive cost in dollars that is shown as an amount; a smaller one is shown as ``under
$…``."""


def format_count(number: float) -> str:
    """Format a count and shorten large ones: ``1,234``, ``45.2k``, ``1.2M``."""
    for limit, size, unit in ((9.995e8, 1e9, "G"), (9.995e5, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{format_plain_number(number / size)}{unit}"
    return f"{number:,.0f}"


def pluralize(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 turn``, ``1,234 turns``."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def format_plain_number(number: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits and without an exponent: ``0.000049``,
    ``0.5``, ``1234``."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    places = digits - 1 - math.floor(math.log10(abs(number)))
    text = f"{number:.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_dollars(cost: float | None) -> str:
    """Format a cost in dollars: ``$1.23``, ``$0.012``, ``$0.000012``.

    None becomes ``cost unknown``.
    """
    if cost is None:
        return "cost unknown"
    if cost == 0 or cost >= 0.0995:
        return f"${cost:,.2f}"
    if cost < LEAST_DOLLARS:
        return f"under ${format_plain_number(LEAST_DOLLARS)}"
    return f"${format_plain_number(cost, 2)}"


def format_duration(value: float) -> str:
    """Format a duration in seconds with a suitable unit: ``7 µs``, ``420 ms``, ``1.25 s``, ``3 min
    5 s``, ``2 h``."""
    if value <= 0:
        return "0 s"
    if value < 0.0009995:
        return f"{max(1, round(value * 1e6))} µs"
    if value < 0.9995:
        return f"{round(value * 1000)} ms"
    if value < 59.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return _format_two_units(whole, 60, "min", "s")
    return _format_two_units(round(whole / 60), 60, "h", "min")


def _format_two_units(whole: int, size: int, unit: str, part: str) -> str:
    """Format a duration in a larger and a smaller unit, such as ``3 min 5 s``.

    ``whole`` is the amount in the smaller unit, and ``size`` is how many of those make one larger
    unit. A remainder of 0 is omitted.
    """
    units, rest = divmod(whole, size)
    return f"{units:,} {unit}" + (f" {rest} {part}" if rest else "")


def format_rounded_duration(value: float) -> str:
    """Format a duration rounded to whole seconds: ``0 s``, ``12 s``, ``3 min 5 s``."""
    return f"{max(0, round(value))} s" if value < 59.5 else format_duration(value)


def format_growing_duration(value: float) -> str:
    """Format the elapsed time of a task that is still in progress.

    Below a minute it always has one decimal place, so that the text does not jump in width.
    """
    return f"{max(0.0, value):.1f} s" if value < 59.95 else format_duration(value)
