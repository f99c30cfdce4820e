"""A run's configuration without its secrets: the one form in which it is written to disk, or sent
to anyone.

    {"task": {"options": {"api_key": "sk-1", "url": "https://me:pw@host/v1?key=k"}}}
    {"task": {"options": {"api_key": "«redacted»", "url": "https://«redacted»@host/v1?key=«redacted»"}}}

Cut out are strings under a name that says so, what follows such a name in a list of arguments or an
address, who logs in to an address, and values of environment variables that hold keys
(``secrets.py``). What was cut out cannot be compared or had back: a run that is resumed from it
needs the recipe. Leaves out secrets under names that say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.secrets import SecretRedactor

_START = "«redacted"
MARK = f"{_START}»"
_KINDS = "(?:key|token|secret|password|passwd|authorization|credentials?)"
_NAME = re.compile(rf"(^|[._-])(api_?)?{_KINDS}$", re.IGNORECASE)
_FLAG = re.compile(rf"--?([\w-]+-)?(api_?)?{_KINDS}", re.IGNORECASE)
_GIVEN = re.compile(rf"^(--?(?:[\w-]+-)?(?:api_?)?{_KINDS}=).+$", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")
_QUERY = re.compile(
    rf"([?&](?:[\w.-]*[_.-])?(?:api_?)?(?:{_KINDS}|sig|signature)=)[^&#\s]+", re.IGNORECASE
)


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, of plain values, without its secrets. Done twice it is the same."""
    secrets = SecretRedactor()
    return {key: _redacted(value, str(key), secrets) for key, value in config.items()}


def cut_out(config: Any, name: str = "") -> Iterator[str]:
    """Dotted names of what a configuration that was written down no longer says."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from cut_out(value, f"{name}.{key}" if name else str(key))
    elif is_cut(config):
        yield name


def is_cut(value: Any) -> bool:
    """Whether a leaf, or a list, holds what stands for a secret."""
    return (
        any(map(is_cut, value))
        if isinstance(value, list)
        else isinstance(value, str) and _START in value
    )


def _redacted(value: Any, name: str, secrets: SecretRedactor) -> Any:
    if isinstance(value, Mapping):
        return {key: _redacted(each, str(key), secrets) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(_items(value, name, secrets))
    if not isinstance(value, str) or not value:
        return value
    if _NAME.search(name):
        return MARK
    return _GIVEN.sub(
        rf"\1{MARK}", _QUERY.sub(rf"\1{MARK}", _LOGIN.sub(f"//{MARK}@", secrets.redact(value)))
    )


def _items(values: Sequence[Any], name: str, secrets: SecretRedactor) -> Iterator[Any]:
    before: Any = ""
    for value in values:
        is_given = (
            isinstance(value, str)
            and isinstance(before, str)
            and _FLAG.fullmatch(before) is not None
        )
        yield MARK if is_given and not value.startswith("-") else _redacted(value, name, secrets)
        before = value
