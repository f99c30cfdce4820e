"""Checks whether values have the annotated types of the fields or parameters that they are given
to, and describes the first one that has not.

    memory_bytes: int                      "2GB"    memory_bytes='2GB' is a str: give a whole number
    mounts: tuple[tuple[str, str], ...]    ["/a"]   mounts[0]='/a' is a str: give a tuple (a text,
                                                    a text)

A whole number is accepted where a float is expected, and a list where a tuple is. Types that cannot
be checked while a program runs, such as most protocols, accept everything.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

_WORDS = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "a text",
}
_COLLECTIONS = (list, tuple, set, frozenset)


class ArgumentMismatch(NamedTuple):
    """A value that does not have the type that is needed at its place."""

    place: str
    """Name of the argument, followed by the index or key of the wrong part: ``mounts[0]``."""
    value: Any
    needed: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of which one is needed, if a text was given; else empty."""
        is_choice = typing.get_origin(self.needed) is typing.Literal and isinstance(self.value, str)
        return typing.get_args(self.needed) if is_choice else ()

    def __str__(self) -> str:
        is_short = isinstance(self.value, str | int | float)
        shown = f"={self.value!r:.80}" if is_short else ""
        kind = "None" if self.value is None else f"a {type(self.value).__name__}"
        return f"{self.place}{shown} is {kind}: give {_describe(self.needed)}"


def first_mismatch(owner: Any, given: Iterable[tuple[str, Any]]) -> ArgumentMismatch | None:
    """Return the first of the given values, or of their parts, that has the wrong type, or None if
    there is none.

    ``owner`` is the class or function that has the annotations. Names without one are skipped.
    """
    kinds = _annotations(owner)
    found = (_mismatch(name, value, kinds.get(name, Any)) for name, value in given)
    return next(filter(None, found), None)


@functools.lru_cache(maxsize=256)
def _annotations(owner: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except NameError:  # a plug-in's type that is imported for type checkers only
        return {}


def _mismatch(place: str, value: Any, needed: Any) -> ArgumentMismatch | None:
    """Return the part of ``value`` that has the wrong type, or None if there is none."""
    wrong = ArgumentMismatch(place, value, needed)
    if members := _members(needed):
        # A wrong element says more than the allowed types, and "or None" says nothing.
        found = list[ArgumentMismatch]()
        for each in members:
            if (mismatch := _mismatch(place, value, each)) is None:
                return None
            if each is not type(None):
                found.append(mismatch)
        inner = [each for each in found if each.place != place]
        return inner[0] if inner else found[0] if len(found) == 1 else wrong
    kind, args = typing.get_origin(needed) or needed, typing.get_args(needed)
    if kind is typing.Literal:
        return None if value in args else wrong
    if not _is_instance(value, kind):
        return wrong
    if not args or not isinstance(value, Collection):
        return None
    if isinstance(value, Mapping):
        items = ((f"{place}[{key!r:.40}]", each, args[-1]) for key, each in value.items())
    elif kind is tuple and args[-1] is not Ellipsis:
        if len(value) != len(args):
            return wrong
        items = ((f"{place}[{i}]", *pair) for i, pair in enumerate(zip(value, args, strict=True)))
    else:
        items = ((f"{place}[{i}]", each, args[0]) for i, each in enumerate(value))
    return next(filter(None, (_mismatch(*item) for item in items)), None)


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union combines; empty for any other type."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else ()


def _is_instance(value: Any, kind: Any) -> bool:
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type) or kind.__module__ == "typing":
        return True
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return True
    if kind in (int, float):  # True is an int to Python
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if kind is tuple:
        return isinstance(value, _COLLECTIONS)
    if isinstance(value, str | bytes):  # a sequence to Python, of its characters
        return kind in (str, bytes, object) and isinstance(value, kind)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    """Return in words which values have a type, such as ``a text or a list``."""
    if members := _members(kind):
        return " or ".join(_describe(each) for each in members if each is not type(None))
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a tuple ({', '.join(map(_describe, args))})"
    if origin is Callable:
        return "a function"
    if origin in _WORDS:
        return _WORDS[origin]
    if not isinstance(origin, type) or issubclass(origin, Collection):
        return "a dict" if origin in (dict, Mapping) else "a list"
    is_ours = issubclass(origin, msgspec.Struct) and origin.__module__.startswith("ramify.")
    return f"a ramify.{origin.__name__}(…)" if is_ours else f"a {origin.__name__}"
