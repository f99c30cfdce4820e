"""Structs that users write by hand: an unknown keyword is reported with the nearest name.

    ramify.Sampling(temprature=1)    unknown keyword 'temprature' of Sampling: did you mean …?

Not here: keywords of functions, and the fields of configurations that are read from files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ramify.errors import ConfigError, nearest


class NamedFields(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass that reports an unknown field with the nearest known name."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            check_keywords(cls.__name__, fields, cls.__struct_fields__)
            raise


def check_keywords(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first keyword of ``owner`` that is not ``known``."""
    names = list(known)
    for keyword in given:
        if keyword not in names:
            raise ConfigError(f"unknown keyword '{keyword}' of {owner}: {nearest(keyword, names)}")
