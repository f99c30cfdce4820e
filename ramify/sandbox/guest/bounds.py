"""How much one value from a session may be: counted in its JSON before that is decoded, and in its
keys before they are hashed.

Decides the limits and what each costs to check. The guest checks what it is about to send, so that
a cell gets an exception; the host checks the same again, since a hostile guest checks nothing. Not
here: the size of a frame (``frames.py``) and what a value is made of (``values.py``).

Each limit bounds the host's work on one frame to some tens of milliseconds.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

MAX_ITEMS = 500_000
"""Items of all lists and dicts of one frame together."""
MAX_CONTAINERS = 50_000
"""Lists and dicts in one frame; a tuple, set, date, long string or bytes value also needs one."""
MAX_NESTING = 320
"""Nesting of a frame's JSON: a value of ``MAX_DEPTH`` levels needs up to three for each."""
MAX_BLOBS = 20_000
"""Long strings and bytes values in one frame."""
MAX_INT_DIGITS = 4000
"""Decimal digits of an integer: Python itself writes 4,300, and readers of JSON count its sign
among them."""
MAX_EQUAL_HASHES = 2000
"""Keys of one set or dict that have the hash of another of its keys: each is compared with all of
them."""
_INT_END = 10**MAX_INT_DIGITS
_MAX_HEX = len(hex(-_INT_END))
_FEW_KEYS = 32
"""So few keys are not checked: comparing each with all others costs little."""
_SALTED = {str, bytes}
"""Kinds whose hash a session cannot foresee."""
_PIECE = 256
"""Keys that are hashed between two looks at the clock."""
_SLOW_S = 0.002
"""CPU time of a piece that collides: twenty times what keys of their own places take."""
_MAX_SLOW = 16
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, also one that never ends; linear in its length."""
_STEP = bytes(1 if char in b"[{" else 0 for char in range(256))
_NO_BRACKETS = bytes(char for char in range(256) if char not in b"[]{}")


class LimitError(ValueError):
    """A value from a session that is over a limit; the message names the limit."""


def check_header(text: bytes) -> None:
    """Raises LimitError for JSON that is over a limit. Reads it a few times at C speed, and decodes
    nothing."""
    opens = text.count(b"[") + text.count(b"{")
    if opens <= MAX_NESTING and opens + text.count(b",") <= MAX_ITEMS:
        return
    # Brackets and commas of text count for nothing, but every string costs time to be left out.
    if text.count(b'"') - text.count(b'\\"') > 2 * MAX_ITEMS:
        raise LimitError(
            f"a value with more than {MAX_ITEMS:,} strings: at most {MAX_ITEMS:,} items at once"
        )
    bare = _STRING.sub(b"", text)
    items, containers = _counted(bare)
    if items > MAX_ITEMS:
        raise LimitError(f"a value with {items:,} items: at most {MAX_ITEMS:,} at once")
    if containers > MAX_CONTAINERS:
        raise LimitError(
            f"a value with {containers:,} lists, dicts and the like: at most {MAX_CONTAINERS:,} at "
            "once"
        )
    if containers > MAX_NESTING and _nesting(bare) > MAX_NESTING:
        raise LimitError(f"a value nested deeper than {MAX_NESTING} levels of JSON")


def counts(text: bytes) -> tuple[int, int, int]:
    """Items, containers and nesting of JSON; an empty container counts as one item."""
    bare = _STRING.sub(b"", text)
    return *_counted(bare), _nesting(bare)


def _counted(bare: bytes) -> tuple[int, int]:
    containers = bare.count(b"[") + bare.count(b"{")
    return containers + bare.count(b","), containers


def _nesting(bare: bytes) -> int:
    steps = bare.translate(_STEP, _NO_BRACKETS)
    return max(itertools.accumulate(1 if step else -1 for step in steps), default=0)


def check_blobs(count: int) -> None:
    if count > MAX_BLOBS:
        raise LimitError(
            f"a value with {count:,} long strings and bytes values: at most {MAX_BLOBS:,} at once"
        )


def check_int(value: int) -> int:
    if not -_INT_END < value < _INT_END:
        raise LimitError(
            f"an integer of more than {MAX_INT_DIGITS:,} digits: give it in parts, or as text such "
            "as hex(n)"
        )
    return value


def int_of(digits: Any) -> int:
    """The integer that ``hex`` wrote. Raises LimitError for a long one before it is made."""
    if len(digits) > _MAX_HEX:
        raise LimitError(f"an integer of more than {MAX_INT_DIGITS:,} digits")
    return check_int(int(digits, 16))


class KeyCheck:
    """The keys of one value's sets and dicts, whose hashes a session may have chosen to be equal.

    ``hash(n)`` is ``n`` modulo 2**61 - 1, and tuples and frozensets hash what is in them: 40,000
    multiples of that number make a set that takes 8 s to build.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_EQUAL_HASHES**2

    def check(self, keys: Any) -> None:
        """Raises LimitError where too many of ``keys`` have equal hashes."""
        if len(keys) > _FEW_KEYS and not _SALTED.issuperset(map(type, keys)):
            listed = list(keys)
            seen: set[int] = set()
            self._look(listed, lambda piece: seen.update(map(hash, piece)), seen)

    def fill(self, made: Any, keys: list[Any], values: list[Any] | None = None) -> Any:
        """``made``, an empty set or dict, with ``keys``. Raises LimitError where that takes too
        long."""
        self.check(keys)
        add: Callable[[Any], Any] = made.update
        if len(keys) <= _FEW_KEYS:
            add(keys if values is None else zip(keys, values, strict=True))
        elif values is None:
            _in_pieces(add, keys)
        else:
            _in_pieces(add, list(zip(keys, values, strict=True)))
        return made

    def _look(self, keys: list[Any], add: Callable[[Any], Any], seen: set[int]) -> None:
        count = 0

        def add_and_count(piece: Iterable[Any]) -> None:
            nonlocal count
            add(piece)
            count = min(count + _PIECE, len(keys))
            if (count - len(seen)) ** 2 > self._left:
                raise LimitError(
                    f"a set or dict with more than {MAX_EQUAL_HASHES:,} keys of equal hashes: send "
                    "them as a list"
                )

        _in_pieces(add_and_count, keys)
        self._left -= (count - len(seen)) ** 2


def _in_pieces(add: Callable[[Any], Any], items: list[Any]) -> None:
    """``add`` all of ``items``. Keys of distinct hashes can still be made to meet in one place of a
    table: what such a table takes is seen by the clock alone, and only in one of tens of thousands
    of keys."""
    slow = 0
    for start in range(0, len(items), _PIECE):
        began = time.thread_time()
        add(items[start : start + _PIECE])
        slow += time.thread_time() - began > _SLOW_S
        if slow > _MAX_SLOW:
            raise LimitError(
                "a set or dict of numbers or tuples whose hashes collide: send them as a list"
            )
