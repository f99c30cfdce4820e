"""Remove secrets from configurations, and check the types of their fields.

``redact_config`` gives a configuration without its secrets, the only form in which it is written to
disk or sent anywhere:

    {"task": {"options": {"api_key": "sk-1", "url": "https://me:pw@host/v1?key=k"}}}
    {"task": {"options": {"api_key": "«redacted»",
                          "url": "https://«redacted»@host/v1?key=«redacted»"}}}

Redacted are: strings whose field name marks a secret; the value after such a name in an argument
list or a URL; logins in URLs; and values of environment variables that hold keys
(``secret_redaction.py``). A redacted value cannot be compared or restored: to resume such a run,
give its recipe. Secrets under names that do not mark them are not found.

``check_none_or_positive`` checks optional numbers, for which None, not 0, means off or automatic:

    check_none_or_positive("optim", "never", max_grad_norm=0.0)
    ConfigError: optim.max_grad_norm=0 must be above 0; give null for never

``check_field_types`` checks what the constructors of a recipe do not, the types of all fields:

    check_field_types(Run(…, optim=OptimizerSpec(kind="adam")))
    ConfigError: rl.optim.kind='adam': Invalid enum value 'adam': did you mean 'adamw'? known: …

Configurations of earlier versions, in which 0 had that meaning, are converted by
``config_overrides.py``.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import explain_conversion_error
from ramify.secret_redaction import (
    KINDS,
    MARK,
    SecretRedactor,
    is_secret_field_name,
    register_secret,
    without_url_secrets,
)

_START = "«redacted"
_FLAG = re.compile(rf"--?([\w-]+-)?(api_?)?{KINDS}", re.IGNORECASE)
_FLAG_WITH_VALUE = re.compile(rf"^(--?(?:[\w-]+-)?(?:api_?)?{KINDS}=).+$", re.IGNORECASE)


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration in which a placeholder replaces every secret.

    The configuration is given as plain values. The secrets are also remembered, so that they are
    redacted everywhere else from now on.
    """
    secrets = SecretRedactor()
    return {key: _redact_value(value, str(key), secrets) for key, value in config.items()}


def redacted_keys(config: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted name of each redacted field of a stored configuration."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from redacted_keys(value, f"{name}.{key}" if name else str(key))
    elif is_redacted(config):
        yield name


def is_redacted(value: Any) -> bool:
    """Return True if a value is a redacted string, or a list that contains one."""
    return (
        any(map(is_redacted, value))
        if isinstance(value, list)
        else isinstance(value, str) and _START in value
    )


def _redact_value(value: Any, name: str, secrets: SecretRedactor) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact_value(inner, str(key), secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(_redact_items(value, name, secrets))
    if not isinstance(value, str) or not value:
        return value
    if is_secret_field_name(name):
        register_secret(name, value)
        return MARK
    return _FLAG_WITH_VALUE.sub(rf"\1{MARK}", secrets.redact(without_url_secrets(value)))


def _redact_items(values: Sequence[Any], name: str, secrets: SecretRedactor) -> Iterator[Any]:
    before: Any = ""
    for value in values:
        is_given = (
            isinstance(value, str)
            and isinstance(before, str)
            and _FLAG.fullmatch(before) is not None
        )
        yield (
            MARK if is_given and not value.startswith("-") else _redact_value(value, name, secrets)
        )
        before = value


def check_none_or_positive(owner: str, null: str, **values: float | None) -> None:
    """Raise ConfigError if one of the given fields is neither None nor positive.

    ``owner`` is the name of the configuration section and ``null`` the meaning of None, both for
    the error message.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{owner}.{name}={value:g} must be above 0; give null for {null}")


def check_field_bounds(
    owner: str, *, least: float | None = None, above: float | None = None, **values: float
) -> None:
    """Raise ConfigError for the first given field that is out of bounds.

    A field must be at least ``least`` and above ``above``. A bound of None is not checked. The
    message names this field alone. ``owner`` is the name of the configuration section, for the
    message.
    """
    for name, value in values.items():
        if least is not None and not value >= least:
            raise ConfigError(f"{owner}.{name}={value:g} must be at least {least:g}")
        if above is not None and not value > above:
            raise ConfigError(f"{owner}.{name}={value:g} must be above {above:g}")


def check_field_types(config: msgspec.Struct, name: str = "") -> None:
    """Raise ConfigError if a field of a configuration has a value of the wrong type.

    Nested structs are checked too. The error names the field.
    """
    try:
        kinds = typing.get_type_hints(type(config))
    except NameError:  # a plug-in's annotation that exists only for type checkers
        kinds = {}
    for field in config.__struct_fields__:
        value, where = getattr(config, field), f"{name}.{field}" if name else field
        if isinstance(value, type):
            raise ConfigError(
                f"{where} is the class {value.__name__}: give an instance, {value.__name__}()"
            )
        try:
            converted = msgspec.convert(value, kinds.get(field, Any))
        except msgspec.ValidationError as error:
            reason = explain_conversion_error(error, kinds[field]) + _example(kinds[field], value)
            raise ConfigError(f"{where}={value!r:.80}: {reason}") from error
        except TypeError:
            converted = value  # a type that msgspec does not know, as a plug-in's callable
        for place, kind in _mappings(value, converted, where):
            raise ConfigError(f"{place} is a mapping: give {kind.__name__}(…) with its fields")
        for inner_name, inner in _structs(value, where):
            check_field_types(inner, inner_name)


def _example(kind: Any, value: Any) -> str:
    """Return an example of how to write a struct as the value of a field.

    Returns an empty string if ``kind`` is not a single struct class, or if ``value`` is a mapping,
    whose fields the error already names.
    """
    structs = [
        each
        for each in (kind, *typing.get_args(kind))
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]
    if len(structs) != 1 or isinstance(value, Mapping):
        return ""
    return f": give {structs[0].__name__}({structs[0].__struct_fields__[0]}=…)"


def _mappings(value: Any, converted: Any, name: str) -> Iterator[tuple[str, type]]:
    """Yield the dotted name and the class of each struct that ``value`` gives as a mapping.

    ``converted`` is ``value`` after conversion to the type of its field.
    """
    if isinstance(value, Mapping):
        if isinstance(converted, msgspec.Struct):
            yield name, type(converted)
        elif isinstance(converted, Mapping):
            for key, inner in value.items():
                yield from _mappings(inner, converted.get(key), f"{name}.{key}")
    elif isinstance(value, list | tuple) and isinstance(converted, list | tuple):
        for index, (inner, new) in enumerate(zip(value, converted, strict=False)):
            yield from _mappings(inner, new, f"{name}[{index}]")


def _structs(value: Any, name: str) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield every struct inside a configuration value, with its dotted name.

    The value may be a struct, or nested lists and mappings of structs.
    """
    if isinstance(value, msgspec.Struct):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _structs(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _structs(item, f"{name}[{place}]")
