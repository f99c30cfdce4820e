"""Invented names and sentences, of which the suites make their filler text.

    The baker of Lodavi counts the quiet stone.

A change to the words in this module changes the items of every seed. ``planting.py`` decides where
facts are placed among the filler.
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
"""Number of different words of four syllables."""


def numbered_word(number: int) -> str:
    """Return one of the invented words, by its number. All words have four syllables and eight
    letters, so none is a part of another."""
    return _PAIRS[number // len(_PAIRS)] + _PAIRS[number % len(_PAIRS)]


def sentence(rng: random.Random) -> str:
    """Return a random filler sentence that does not help to answer any question."""
    where = f" of {name(rng, 3)}" if rng.random() < 0.3 else ""
    return (
        f"The {rng.choice(PEOPLE)}{where} {rng.choice(VERBS)} "
        f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}."
    )


def sentence_pool(rng: random.Random, chars: int) -> list[str]:
    """Return the sentences that are repeated at random to fill a text of ``chars`` characters. A
    short text needs few, so that its item is made in a few milliseconds."""
    return [sentence(rng) for _ in range(pool_size(chars))]


def pool_size(chars: int) -> int:
    """Return how many different passages the filler of a text consists of, from 100 to 2,000
    depending on its length."""
    return min(2_000, max(100, chars // 100))


def name(rng: random.Random, num_syllables: int) -> str:
    """Return an invented name; for example, ``Lodavi`` has three syllables."""
    return "".join(rng.choices(SYLLABLES, k=num_syllables)).capitalize()


def names(rng: random.Random, num: int, num_syllables: int = 3) -> list[str]:
    """Return ``num`` different invented names."""
    found: dict[str, None] = {}
    while len(found) < num:
        found[name(rng, num_syllables)] = None
    return list(found)
