"""A registry: name -> class, with the built-in ones and those that a recipe adds.

    @ALGORITHMS.register("mine")                                rl.algorithm=mine
    class Mine(GroupOptions, frozen=True, kw_only=True, tag_field="name", tag="mine"): …

A class at a dotted path (``my_module:Mine``) needs no registration. Decides what a name stands for,
and what a registered class must be: a struct whose tag is its name, so that a checkpoint can store
which class its run used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from ramify.errors import ConfigError
from ramify.train.override import of_name

T = TypeVar("T")


class Registry(Mapping[str, Any]):
    """Name -> a class or function, or its location (``module:name``)."""

    def __init__(self, what: str, table: Mapping[str, Any], *, structs: bool = True) -> None:
        """``what`` names the kind of entry in errors. ``structs``: entries are configuration
        structs, which must be storable."""
        self._what = what
        self._table = dict(table)
        self._structs = structs

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers a class as ``name``. Raises ConfigError if the name is taken, or
        if the class cannot be stored under it."""

        def put(entry: T) -> T:
            before = self._table.get(name)
            # A recipe may be imported twice.
            if before is not None and _place(before) != _place(entry):
                raise ConfigError(
                    f"{self._what} '{name}' is taken by {_place(before)}: choose another name"
                )
            config = getattr(entry, "__struct_config__", None)
            if self._structs and (
                config is None or config.tag != name or config.tag_field != "name"
            ):
                raise ConfigError(
                    f"{self._what} '{name}' ({_place(entry)}) must be a msgspec.Struct with "
                    f"tag_field='name', tag='{name}', so that a checkpoint can name it"
                )
            self._table[name] = entry
            return entry

        return put

    def of(self, name: str) -> Any:
        """The entry ``name``, or the object at that dotted path. Raises ConfigError with the
        nearest name."""
        return of_name(name, self, self._what)

    def made(self, value: Any) -> Any:
        """``value`` itself, or an instance of what it describes: a name, or a map with ``name`` and
        options."""
        if isinstance(value, str):
            return self.of(value)()
        if not isinstance(value, Mapping):
            return value
        if "name" not in value:
            raise ConfigError(
                f"{self._what}: {dict(value)} has no name; known: {', '.join(sorted(self))}"
            )
        kind = self.of(value["name"])
        options = {key: option for key, option in value.items() if key != "name"}
        tag = kind.__struct_config__.tag
        return msgspec.convert(options if tag is None else {"name": tag, **options}, kind)


def _place(entry: Any) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
