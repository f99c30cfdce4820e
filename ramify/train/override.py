"""Overrides of a configuration's fields, e.g. ``optim.lr=1e-5``: checks names and types, and
suggests the nearest name.

    override(run, ["rl.optim.lr=1e-5", "rl.algorithm=grpo", "rl.algorithm.credit=root",
                   "task.options.rows=40"])

A value is parsed as JSON if possible (``1e-5``, ``true``, ``null``, ``[1, 2]``), and is text
otherwise. If a field holds one of several classes, the name of a class (or a dotted path to a
custom one) sets a new instance with its defaults.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.train.renamed_fields import new_name

T = TypeVar("T")


class NameChoice(Protocol):
    """What the names of a field stand for: a registry, or one with a preset's options."""

    def build(self, value: Any) -> Any:
        """An instance of what ``value`` names. Raises ConfigError."""
        ...


Choices = Mapping[str, NameChoice]
"""Dotted name of a field -> what its names stand for."""


def override(config: T, assignments: Sequence[str], choices: Choices | None = None) -> T:
    """A copy of ``config`` with ``assignments`` applied. Raises ConfigError, which names the
    assignment."""
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise ConfigError(
                f"'{assignment}' is not an override: write FIELD=VALUE, as in rl.optim.lr=1e-4"
            )
        config = _set(config, name.split("."), text, name, choices or {})
    return config


def _set(value: Any, path: Sequence[str], text: str, dotted_name: str, choices: Choices) -> Any:
    head, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        inner = (
            _set(value.get(head, {}), rest, text, dotted_name, choices) if rest else _parsed(text)
        )
        return {**value, head: inner}
    if not isinstance(value, msgspec.Struct):
        parent = dotted_name.rsplit("." + ".".join(path), 1)[0]
        if value is None:
            raise ConfigError(
                f"override {dotted_name}={text}: {parent} is not set here: set it as "
                f"a whole, as {parent}='{{…}}'"
            )
        raise ConfigError(
            f"override {dotted_name}={text}: {parent} is {value!r}, which has no field '{head}'"
        )
    if head not in value.__struct_fields__:
        suggestion = nearest(head, value.__struct_fields__)
        now_called = new_name(dotted_name) or new_name(head)
        advice = f"it is called {now_called} now" if now_called else suggestion
        raise ConfigError(f"override {dotted_name}={text}: no field '{head}': {advice}")
    current = getattr(value, head)
    fresh = (
        _set(current, rest, text, dotted_name, choices)
        if rest
        else _value(value, head, text, dotted_name, choices)
    )
    try:
        return msgspec.structs.replace(value, **{head: fresh})
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"override {dotted_name}={text}: {error}") from error


def _value(owner: msgspec.Struct, field: str, text: str, dotted_name: str, choices: Choices) -> Any:
    if dotted_name in choices and text not in ("null", "none", ""):
        return choices[dotted_name].build(text)
    kind = typing.get_type_hints(type(owner)).get(field, Any)
    tagged = _by_tag(kind, text)
    if tagged is not None:
        return tagged
    try:
        return msgspec.convert(_parsed(text), kind, strict=False)
    except msgspec.ValidationError as first:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"override {dotted_name}={text}: {first}") from first


def _by_tag(kind: Any, text: str) -> Any:
    """The class of a tagged union that ``text`` names, with its defaults."""
    for member in typing.get_args(kind):
        config = getattr(member, "__struct_config__", None)
        if config is not None and config.tag == text:
            return member()
    return None


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text
