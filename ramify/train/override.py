"""``optim.lr=1e-5`` on a configuration: fields that exist, values of their type, and the nearest
name where they do not.

    override(run, ["rl.optim.lr=1e-5", "rl.algorithm=grpo", "rl.algorithm.credit=root", "task.options.rows=40"])

A value is read as JSON where it is some (``1e-5``, ``true``, ``null``, ``[1, 2]``) and as text
otherwise. Where a field holds one of several classes, its name (or a dotted path to a class of
one's own) puts a new one there, with its defaults.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.train.renamed_fields import new_name

T = TypeVar("T")
Choices = Mapping[str, Mapping[str, Any]]
"""Dotted name of a field -> name -> the class it stands for, or its dotted path."""


def override(config: T, assignments: Sequence[str], choices: Choices | None = None) -> T:
    """``config`` with what ``assignments`` say; itself unchanged. Raises ConfigError that names the
    assignment."""
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise ConfigError(
                f"'{assignment}' is no override: write FIELD=VALUE, as in rl.optim.lr=1e-4"
            )
        config = _set(config, name.split("."), text, name, choices or {})
    return config


def load_class(path: str) -> Any:
    """The class (or function) at ``module:name`` or ``module.name``. Raises ConfigError."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be imported: {error}") from error


def of_name(name: str, table: Mapping[str, Any], what: str) -> Any:
    """The class that ``name`` stands for: of ``table``, or at a dotted path. Raises ConfigError."""
    if name not in table and not {".", ":"} & {*name}:
        raise ConfigError(
            f"unknown {what} '{name}': {nearest(name, table)}; or module:name of one of your own"
        )
    found = table.get(name, name)
    return load_class(found) if isinstance(found, str) else found


def _set(value: Any, path: Sequence[str], text: str, whole: str, choices: Choices) -> Any:
    head, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        inner = _set(value.get(head, {}), rest, text, whole, choices) if rest else _parsed(text)
        return {**value, head: inner}
    if not isinstance(value, msgspec.Struct):
        done = whole.rsplit("." + ".".join(path), 1)[0]
        if value is None:
            raise ConfigError(
                f"override {whole}={text}: {done} is not set here: set it as a whole, as "
                f"{done}='{{…}}'"
            )
        raise ConfigError(
            f"override {whole}={text}: {done} is {value!r}, which has no field '{head}'"
        )
    if head not in value.__struct_fields__:
        known = nearest(head, value.__struct_fields__)
        now_called = new_name(whole) or new_name(head)
        advice = f"it is called {now_called} now" if now_called else known
        raise ConfigError(f"override {whole}={text}: no field '{head}': {advice}")
    now = getattr(value, head)
    fresh = (
        _set(now, rest, text, whole, choices) if rest else _value(value, head, text, whole, choices)
    )
    try:
        return msgspec.structs.replace(value, **{head: fresh})
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"override {whole}={text}: {error}") from error


def _value(owner: msgspec.Struct, field: str, text: str, whole: str, choices: Choices) -> Any:
    if whole in choices and text not in ("null", "none", ""):
        return of_name(text, choices[whole], whole)()
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
            raise ConfigError(f"override {whole}={text}: {first}") from first


def _by_tag(kind: Any, text: str) -> Any:
    """The class of a tagged union that ``text`` names, with its defaults."""
    for each in typing.get_args(kind):
        config = getattr(each, "__struct_config__", None)
        if config is not None and config.tag == text:
            return each()
    return None


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text
