"""Fields of a configuration that need care: secrets, and optional numbers.

``redacted`` gives a configuration without its secrets, the only form in which it is written to disk
or sent anywhere:

    {"task": {"options": {"api_key": "sk-1", "url": "https://me:pw@host/v1?key=k"}}}
    {"task": {"options": {"api_key": "«redacted»",
                          "url": "https://«redacted»@host/v1?key=«redacted»"}}}

Redacted are: strings whose field name marks a secret; the value after such a name in an argument
list or a URL; logins in URLs; and values of environment variables that hold keys (``secrets.py``).
A redacted value cannot be compared or restored: to resume such a run, give its recipe. Not here:
secrets under names that do not mark them.

``check_optional`` checks optional numbers, for which None, not 0, means off or automatic:

    check_optional("optim", "never", max_grad_norm=0.0)
    ConfigError: optim.max_grad_norm=0 must be above 0; give null for never

Not here: configurations of earlier versions, in which 0 had that meaning (``override.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.errors import ConfigError
from ramify.secrets import (
    KINDS,
    MARK,
    SecretRedactor,
    names_a_secret,
    remember,
    without_url_secrets,
)

_START = "«redacted"
_FLAG = re.compile(rf"--?([\w-]+-)?(api_?)?{KINDS}", re.IGNORECASE)
_FLAG_WITH_VALUE = re.compile(rf"^(--?(?:[\w-]+-)?(?:api_?)?{KINDS}=).+$", re.IGNORECASE)


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` (plain values) without its secrets, which are redacted everywhere from now on.
    Idempotent."""
    secrets = SecretRedactor()
    return {key: _redacted(value, str(key), secrets) for key, value in config.items()}


def cut_out(config: Any, name: str = "") -> Iterator[str]:
    """Dotted names of the redacted values in a stored configuration."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from cut_out(value, f"{name}.{key}" if name else str(key))
    elif is_cut(config):
        yield name


def is_cut(value: Any) -> bool:
    """Whether a leaf, or a list, holds a redacted value."""
    return (
        any(map(is_cut, value))
        if isinstance(value, list)
        else isinstance(value, str) and _START in value
    )


def _redacted(value: Any, name: str, secrets: SecretRedactor) -> Any:
    if isinstance(value, Mapping):
        return {key: _redacted(inner, str(key), secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(_items(value, name, secrets))
    if not isinstance(value, str) or not value:
        return value
    if names_a_secret(name):
        remember(name, value)
        return MARK
    return _FLAG_WITH_VALUE.sub(rf"\1{MARK}", secrets.redact(without_url_secrets(value)))


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


def check_optional(owner: str, null: str, **values: float | None) -> None:
    """Raise ConfigError for a value that is neither None nor positive. ``null``: the meaning of
    None."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{owner}.{name}={value:g} must be above 0; give null for {null}")
