"""Generates the rows of a ledger, and writes and parses them in several text formats.

The rows are chosen so that almost-right methods give a wrong answer.

    row = (user, label, quantity)     LedgerRowTextFormat(",", order=(2, 0, 1), header=True)
    ("bavo", "red", 17)               qty,user,label
                                      17,bavo,red

This module defines the contents of rows and the right answers. Questions are worded in ``task.py``,
and ``scripted_demonstrator.py`` defines how a demonstrator answers them.
"""

from __future__ import annotations

import itertools
import operator
import random
from typing import Literal

import msgspec

Kind = Literal["count", "sum", "max", "top", "latest"]
KINDS: tuple[Kind, ...] = ("count", "sum", "max", "top", "latest")
COMBINED: tuple[Kind, ...] = ("count", "sum", "max")
"""Kinds of questions whose answer over several documents follows from the answers for each
document.
"""
FIELDS = ("user", "label", "qty")
LABELS = ("red", "blue", "green", "gold", "pink", "gray")
LOOKALIKES = {
    "red": ("fred", "jared"),
    "blue": ("bluey", "bluet"),
    "green": ("greene", "greeny"),
    "gold": ("goldie", "marigold"),
    "pink": ("pinkie", "pinky"),
    "gray": ("grayson", "mcgray"),
}
"""User names that contain a label. Counting the label in the text then gives a number that is too
large.
"""
SEPARATORS = (",", ";", "|", ":", "/", "~", "&", "^")
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 2, 0))
"""Orders of the columns user, label and quantity."""
HELD_OUT_FORMAT = (";", (2, 0, 1))
"""Separator and column order that never occur in training items."""
SCALES = (1, 1, 10, 100, 1000)
"""Factors by which quantities are multiplied, so that a policy sees short and long rows."""
NUM_NAMES, NUM_HELD_OUT_NAMES = 400, 80
LOWEST = 5
_SHARE_LOOKALIKE = 0.15

Row = tuple[str, str, int]
"""(user, label, quantity)"""


def _make_names() -> tuple[str, ...]:
    """Return a fixed list of invented user names, none of which contains a ledger label.

    The order is fixed and the same on every machine.
    """
    syllables = ["".join(pair) for pair in itertools.product("bdfklmnprstvz", "aeiou")]
    words = ["".join(pair) for pair in itertools.product(syllables, repeat=2)]
    plain = [word for word in words if not any(label in word for label in LABELS)]
    return tuple(random.Random("names of the ledger").sample(plain, NUM_NAMES))


NAMES = _make_names()
HELD_OUT_NAMES, KNOWN_NAMES = NAMES[:NUM_HELD_OUT_NAMES], NAMES[NUM_HELD_OUT_NAMES:]
"""Names of users. Training items never ask about held-out users, although their rows occur
in them.
"""


class LedgerRowTextFormat(msgspec.Struct, frozen=True):
    """The text format of a ledger: separator, column order and optional header line."""

    separator: str
    order: tuple[int, int, int]
    """Position of user, label and quantity in a row."""
    header: bool

    @property
    def field_order(self) -> list[int]:
        """For each column of the text, from left to right, the index in ``FIELDS`` of its field."""
        return [self.order.index(column) for column in range(len(FIELDS))]

    def format_rows(self, rows: list[Row]) -> str:
        """Write the rows as text, one per line, without a newline at the end."""
        users, labels, quantities = zip(*rows, strict=True)
        fields = (users, labels, map(str, quantities))
        columns = [fields[field] for field in self.field_order]
        lines = map(self.separator.join, zip(*columns, strict=True))
        first = (
            [self.separator.join(FIELDS[field] for field in self.field_order)]
            if self.header
            else []
        )
        return "\n".join([*first, *lines])

    def parse_rows(self, text: str) -> list[Row]:
        """Parse text that ``format_rows`` has written, and return its rows."""
        user, label, quantity = self.order
        lines = text.split("\n")[1 if self.header else 0 :]
        parts = (line.split(self.separator) for line in lines)
        return [(part[user], part[label], int(part[quantity])) for part in parts]


FORMATS = tuple(
    LedgerRowTextFormat(s, o, header)
    for s in SEPARATORS
    for o in ORDERS
    for header in (False, True)
)
HELD_OUT_FORMATS = tuple(
    each for each in FORMATS if (each.separator, each.order) == HELD_OUT_FORMAT
)
KNOWN_FORMATS = tuple(each for each in FORMATS if each not in HELD_OUT_FORMATS)


def solve(rows: list[Row], kind: Kind, about: str) -> int | str:
    """Return the right answer to a question about the rows of a ledger.

    It is a user for kind ``top``, otherwise a number. Raises ValueError if no answer exists.
    """
    if kind == "top":
        return max(rows, key=operator.itemgetter(2))[0]
    field = 0 if kind == "latest" else 1
    quantities = [row[2] for row in rows if row[field] == about]
    if kind == "count":
        return len(quantities)
    if kind == "sum":
        return sum(quantities)
    if not quantities:
        raise ValueError(f"no row is about {about!r}")
    return max(quantities) if kind == "max" else quantities[-1]


def make_rows(
    rng: random.Random, kind: Kind, about: str, header: bool, num: int, scale: int = 1
) -> list[Row]:
    """Generate ledger rows for which typical mistakes lead to a wrong answer.

    Depending on the kind of question, the label also occurs in names, the greatest quantity in the
    order of text is not the greatest number, or the answer changes if the first row is skipped as
    a header. Quantities are below ``scale`` times ``quantity_bound``.
    """
    if num < 4:
        raise ValueError(f"a ledger of {num} rows: give at least 4")
    while True:
        rows = _plain_rows(rng, about, num, quantity_bound(num) * scale)
        _plant_relevant_rows(rng, rows, kind, about, header)
        if _shows_mistakes(rows, kind, about):
            return rows


def quantity_bound(num_rows: int) -> int:
    """Return the exclusive upper bound on all quantities of a ledger with this many rows.

    It is large enough for all quantities to differ.
    """
    return max(1500, 20 * num_rows)


def mean_digits_below(high: int) -> float:
    """Return the expected number of digits of a random integer that is less than ``high``."""
    return sum(1 - 10.0**digit / high for digit in range(len(str(high))))


def _plain_rows(rng: random.Random, about: str, num: int, highest: int) -> list[Row]:
    lookalikes = LOOKALIKES.get(about) or tuple(itertools.chain(*LOOKALIKES.values()))
    quantities = rng.sample(range(LOWEST, highest), num)
    users = rng.choices(NAMES, k=num)
    for index in rng.sample(range(num), round(_SHARE_LOOKALIKE * num)):
        users[index] = rng.choice(lookalikes)
    return list(zip(users, rng.choices(LABELS, k=num), quantities, strict=True))


def _plant_relevant_rows(
    rng: random.Random, rows: list[Row], kind: Kind, about: str, header: bool
) -> None:
    """Change some ledger rows so that the right answer to the question depends on them.

    They get its label, its user, or the highest quantity. The first row may be one of them if the
    text has no header.
    """
    high = max(quantity for _, _, quantity in rows)
    if kind in COMBINED:
        for index in [*rng.sample(range(len(rows)), 3), *([] if header else [0])]:
            user, _, quantity = rows[index]
            rows[index] = (user, about, quantity)
    if kind == "latest":
        for index in rng.sample(range(len(rows)), 2):
            rows[index] = (about, *rows[index][1:])
    if not header and (kind == "max" or (kind == "top" and rng.random() < 0.5)):
        rows[0] = (*rows[0][:2], high + 1 + rng.randrange(200))


def _shows_mistakes(rows: list[Row], kind: Kind, about: str) -> bool:
    """Return True if a demonstrator's typical mistakes lead to a wrong answer for these ledger
    rows.

    The mistakes are in ``scripted_demonstrator.py``.
    """
    if kind in ("count", "sum"):
        return any(about in user for user, _, _ in rows)
    if kind == "max":
        quantities = [quantity for _, label, quantity in rows if label == about]
        return max(quantities) != int(max(map(str, quantities)))
    if kind == "top":
        return max(rows, key=lambda row: row[2])[0] != max(rows, key=lambda row: str(row[2]))[0]
    quantities = [quantity for user, _, quantity in rows if user == about]
    return len(quantities) > 1 and quantities[0] != quantities[-1]
