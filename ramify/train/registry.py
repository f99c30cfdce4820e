"""Name -> class: those of a room, and what a recipe adds to them.

    @ALGORITHMS.register("mine")                                rl.algorithm=mine
    class Mine(GroupOptions, frozen=True, kw_only=True, tag_field="name", tag="mine"): …

A class at a dotted path (``my_module:Mine``) needs no registration. Decides what a name stands for
and what a registered class must be: a struct whose tag is its name, so that a checkpoint can tell
what its run was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from ramify.errors import ConfigError
from ramify.train.override import of_name

T = TypeVar("T")


class Registry(Mapping[str, Any]):
    """Name -> the class or function it stands for, or where that is (``module:name``)."""

    def __init__(self, what: str, table: Mapping[str, Any], *, structs: bool = True) -> None:
        """``what`` is said in errors. ``structs``: what is registered is a configuration, to be
        stored and read again."""
        self._what, self._table, self._structs = what, dict(table), structs

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator: ``name`` stands for what it is put on. ConfigError where the name is taken
        or the class cannot be stored under it."""

        def put(each: T) -> T:
            before = self._table.get(name)
            if before is not None and _place(before) != _place(each):  # a recipe may be read twice
                raise ConfigError(
                    f"{self._what} '{name}' is taken by {_place(before)}: choose another name"
                )
            config = getattr(each, "__struct_config__", None)
            if self._structs and (
                config is None or config.tag != name or config.tag_field != "name"
            ):
                raise ConfigError(
                    f"{self._what} '{name}' ({_place(each)}) must be a msgspec.Struct with "
                    f"tag_field='name', tag='{name}', so "
                    "that a checkpoint can name it"
                )
            self._table[name] = each
            return each

        return put

    def of(self, name: str) -> Any:
        """What ``name`` stands for, or what is at the dotted path. ConfigError with the nearest
        name."""
        return of_name(name, self, self._what)

    def made(self, value: Any) -> Any:
        """``value`` itself, or what it describes: a name, or a map with ``name`` and options."""
        if isinstance(value, str):
            return self.of(value)()
        if not isinstance(value, Mapping):
            return value
        if "name" not in value:
            raise ConfigError(
                f"{self._what}: {dict(value)} has no name; known: {', '.join(sorted(self))}"
            )
        kind = self.of(value["name"])
        options = {key: each for key, each in value.items() if key != "name"}
        tag = kind.__struct_config__.tag
        return msgspec.convert(options if tag is None else {"name": tag, **options}, kind)


def _place(each: Any) -> str:
    return each if isinstance(each, str) else f"{each.__module__}:{each.__qualname__}"
