"""Invented names and sentences for the filler text of benchmark suites.

    The baker of Lodavi counts the quiet stone.

A change to the words in this module changes the items of every seed. ``fact_planting.py`` decides
where facts are placed among the filler.
"""

from __future__ import annotations

import itertools
import random

ADJECTIVES = (
    *("quiet", "cold", "red", "hollow", "bright", "narrow"),
    *("old", "patient", "crooked", "gentle", "pale", "loud"),
)
NOUNS = (
    *("river", "stone", "lantern", "market", "orchard", "bridge"),
    *("harbour", "wheel", "letter", "garden", "tower", "road"),
)
VERBS = (
    *("counts", "carries", "follows", "paints", "measures"),
    *("forgets", "repairs", "watches", "sells", "buries"),
)
PEOPLE = ("baker", "clerk", "pilot", "weaver", "doctor", "miller", "singer", "guard")
SYLLABLES = ["".join(pair) for pair in itertools.product("bdfklmnprstvz", "aeiou")]

_PAIRS = [one + other for one in SYLLABLES for other in SYLLABLES]
NUM_WORDS = len(_PAIRS) ** 2
"""Number of different four-syllable words."""


def numbered_word(number: int) -> str:
    """Return the invented filler word with the given number.

    All such words have four syllables and eight letters, so none is part of another.
    """
    return _PAIRS[number // len(_PAIRS)] + _PAIRS[number % len(_PAIRS)]


def sentence(rng: random.Random) -> str:
    """Return a random filler sentence.

    It never helps to answer a question.
    """
    where = f" of {invented_name(rng, 3)}" if rng.random() < 0.3 else ""
    return (
        f"The {rng.choice(PEOPLE)}{where} {rng.choice(VERBS)} "
        f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}."
    )


def sentence_pool(rng: random.Random, chars: int) -> list[str]:
    """Return a pool of random sentences large enough to fill a text of ``chars`` characters.

    A short text gets a small pool, so that its item is generated in a few milliseconds.
    """
    return [sentence(rng) for _ in range(pool_size(chars))]


def pool_size(chars: int) -> int:
    """Return the number of different filler passages to generate for a text of ``chars``
    characters.

    It is between 100 and 2,000.
    """
    return min(2_000, max(100, chars // 100))


def invented_name(rng: random.Random, num_syllables: int) -> str:
    """Return an invented name with this many syllables, such as ``Lodavi`` with three."""
    return "".join(rng.choices(SYLLABLES, k=num_syllables)).capitalize()


def invented_names(rng: random.Random, num: int, num_syllables: int = 3) -> list[str]:
    """Return ``num`` different invented names."""
    found: dict[str, None] = {}
    while len(found) < num:
        found[invented_name(rng, num_syllables)] = None
    return list(found)
