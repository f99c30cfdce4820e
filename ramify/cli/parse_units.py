"""Parsers for ages and sizes in option values: ``30d``, ``12h``, ``2GB``, ``500 MB``."""

from __future__ import annotations

import re

from ramify.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_MEASURE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_age(text: str, option: str) -> float:
    """Parse an age and return seconds.

    >>> parse_age("1.5h", "--older-than")
    5400.0
    """
    return _parse(text, option, _SECONDS, "d", "30d, 12h or 90m")


def parse_size(text: str, option: str) -> int:
    """Parse a size and return bytes.

    >>> parse_size("2GB", "--memory")
    2000000000
    """
    return int(_parse(text, option, _BYTES, "b", "2GB or 500MB"))


def _parse(
    text: str, option: str, units: dict[str, float] | dict[str, int], default: str, examples: str
) -> float:
    match = _MEASURE.fullmatch(text)
    factor = units.get((match[2] or default).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{option} {text!r} is not understood: write it as {examples}")
    return float(match[1]) * factor
