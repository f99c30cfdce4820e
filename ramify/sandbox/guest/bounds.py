"""Limits on one value from a session: on its JSON, counted before decoding, and on its keys,
checked before hashing.

Decides the limits and how each is checked. The guest checks what it is about to send, so that a
cell gets an exception. The host checks the same again, since a hostile guest checks nothing. Not
here: the size of a frame (see ``frames.py``) and the supported types (see ``values.py``).

Each limit keeps the host's work on one frame to some tens of milliseconds.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

MAX_ITEMS = 500_000
"""Maximum number of items in all lists and dicts of one frame together."""
MAX_CONTAINERS = 50_000
"""Maximum number of lists and dicts in one frame; a tuple, set, date, long string or bytes value
also needs one."""
MAX_KEYS = 100_000
"""Maximum number of keys of all dicts in one frame together, of those whose keys are all text."""
MAX_NESTING = 320
"""Maximum nesting of a frame's JSON: a value with ``MAX_DEPTH`` levels needs up to three levels of
JSON for each."""
MAX_BLOBS = 20_000
"""Maximum number of long strings and bytes values in one frame."""
MAX_INT_DIGITS = 4000
"""Maximum number of decimal digits of an integer. Python itself writes 4,300, and JSON readers
count the sign too."""
MAX_EQUAL_HASHES = 2000
"""Maximum number of keys in one set or dict whose hash equals that of another key: each is compared
with all the others."""
_INT_END = 10**MAX_INT_DIGITS
_MAX_HEX = len(hex(-_INT_END))
_FEW_KEYS = 32
"""Up to this number, keys are not checked: comparing each with all others costs little."""
_SALTED = {str, bytes}
"""Types whose hash a session cannot predict."""
_PIECE = 256
"""Number of keys that are hashed between two checks of the clock."""
_SLOW_S = 0.002
"""CPU time of a piece whose keys collide: twenty times that of keys without collisions."""
_MAX_SLOW = 16
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, even one without an end; matching takes linear time."""
_WHOLE_STRINGS = re.compile(rb'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.DOTALL)
"""As many strings as there are up to a limit, and what is between them."""
_PIECE_BYTES = 1 << 18
_STEP = bytes(1 if char in b"[{" else 0 for char in range(256))
_NO_BRACKETS = bytes(char for char in range(256) if char not in b"[]{}")


class LimitError(ValueError):
    """A value from a session that is over a limit; the message names the limit."""


def check_header(text: bytes) -> None:
    """Raise LimitError for JSON that is over a limit. Scans the text a few times at C speed and
    decodes nothing."""
    opens = text.count(b"[") + text.count(b"{")
    commas = text.count(b",")
    if opens <= MAX_NESTING and opens + commas <= MAX_KEYS:
        return
    # Brackets and commas inside strings do not count, but skipping each string takes time.
    if text.count(b'"') - text.count(b'\\"') > 2 * MAX_ITEMS:
        raise LimitError(
            f"a value with more than {MAX_ITEMS:,} strings: at most {MAX_ITEMS:,} items at once"
        )
    bare = _bare(text)
    items, containers = _counted(bare)
    if items > MAX_ITEMS:
        raise LimitError(f"a value with {items:,} items: at most {MAX_ITEMS:,} at once")
    if containers > MAX_CONTAINERS:
        raise LimitError(
            f"a value with {containers:,} lists, dicts and the like: at most {MAX_CONTAINERS:,} at "
            "once"
        )
    if (keys := bare.count(b":")) > MAX_KEYS:
        raise LimitError(f"a value with {keys:,} keys of dicts: at most {MAX_KEYS:,} at once")
    if containers > MAX_NESTING and _nesting(bare) > MAX_NESTING:
        raise LimitError(f"a value nested deeper than {MAX_NESTING} levels of JSON")


def _bare(text: bytes) -> bytes:
    """Return JSON without its strings. Works in pieces, between which other threads run."""
    parts, at = [], 0
    while at < len(text):
        end = _WHOLE_STRINGS.match(text, at, at + _PIECE_BYTES).end()  # type: ignore[union-attr]
        if end == at:  # a long string begins here
            end = _STRING.match(text, at).end()  # type: ignore[union-attr]
        else:
            parts.append(_STRING.sub(b"", text[at:end]))
        at = end
    return b"".join(parts)


def counts(text: bytes) -> tuple[int, int, int]:
    """Count the items, the containers and the nesting of JSON; an empty container counts as one
    item."""
    bare = _bare(text)
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
    """Parse the output of ``hex``. Raises LimitError for a long integer before it is created."""
    if len(digits) > _MAX_HEX:
        raise LimitError(f"an integer of more than {MAX_INT_DIGITS:,} digits")
    return check_int(int(digits, 16))


class KeyCheck:
    """Checks the keys of one value's sets and dicts, whose hashes a session may have chosen to be
    equal.

    ``hash(n)`` is ``n`` modulo 2**61 - 1, and tuples and frozensets combine the hashes of their
    items: a set of 40,000 multiples of that number takes 8 s to build.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_EQUAL_HASHES**2

    def check(self, keys: Any) -> None:
        """Raise LimitError if too many of ``keys`` have equal hashes."""
        if len(keys) > _FEW_KEYS and not _SALTED.issuperset(map(type, keys)):
            key_list = list(keys)
            hashes: set[int] = set()
            self._look(key_list, lambda piece: hashes.update(map(hash, piece)), hashes)

    def fill(self, container: Any, keys: list[Any], values: list[Any] | None = None) -> Any:
        """Add ``keys`` to ``container``, an empty set or dict, and return it. Raises LimitError if
        that takes too long."""
        self.check(keys)
        add: Callable[[Any], Any] = container.update
        if len(keys) <= _FEW_KEYS:
            add(keys if values is None else zip(keys, values, strict=True))
        elif values is None:
            _in_pieces(add, keys)
        else:
            _in_pieces(add, list(zip(keys, values, strict=True)))
        return container

    def _look(self, keys: list[Any], add: Callable[[Any], Any], hashes: set[int]) -> None:
        count = 0

        def add_and_count(piece: Iterable[Any]) -> None:
            nonlocal count
            add(piece)
            count = min(count + _PIECE, len(keys))
            if (count - len(hashes)) ** 2 > self._left:
                raise LimitError(
                    f"a set or dict with more than {MAX_EQUAL_HASHES:,} keys of equal hashes: send "
                    "them as a list"
                )

        _in_pieces(add_and_count, keys)
        self._left -= (count - len(hashes)) ** 2


def _in_pieces(add: Callable[[Any], Any], items: list[Any]) -> None:
    """Call ``add`` on all of ``items``, in pieces. Keys with distinct hashes can still collide in
    one place of the hash table. Only the clock shows this, and only for tens of thousands of
    keys."""
    slow = 0
    for start in range(0, len(items), _PIECE):
        began = time.thread_time()
        add(items[start : start + _PIECE])
        slow += time.thread_time() - began > _SLOW_S
        if slow > _MAX_SLOW:
            raise LimitError(
                "a set or dict of numbers or tuples whose hashes collide: send them as a list"
            )
