"""Needle in a haystack: one sentence in a long generated text answers the question.

    needle(chars=1_000_000)

    … The baker of Lodavi counts the quiet stone. The access code of Tamorusi is 482913. The clerk …
    What is the access code of Tamorusi?    ->  482913

The text also contains distractors: codes of people with similar names, and former codes of the same
person. ``kind`` is the tenth of the text that contains the needle.
"""

from __future__ import annotations

import itertools
import random

from ramify.errors import ConfigError
from ramify.tasks.base import Item, SimpleTask, generated
from ramify.tasks.scoring import normalised

_ADJECTIVES = (
    *("quiet", "cold", "red", "hollow", "bright", "narrow"),
    *("old", "patient", "crooked", "gentle", "pale", "loud"),
)
_NOUNS = (
    *("river", "stone", "lantern", "market", "orchard", "bridge"),
    *("harbour", "wheel", "letter", "garden", "tower", "road"),
)
_VERBS = (
    *("counts", "carries", "follows", "paints", "measures"),
    *("forgets", "repairs", "watches", "sells", "buries"),
)
_PEOPLE = ("baker", "clerk", "pilot", "weaver", "doctor", "miller", "singer", "guard")
_SYLLABLES = ["".join(pair) for pair in itertools.product("bdfklmnprstvz", "aeiou")]
_POOL = 2000
"""Number of different filler sentences in one haystack; they repeat."""
MIN_CHARS = 1000


def needle(
    *, chars: int = 100_000, distractors: int = 6, depth: float | None = None, seed: int = 0
) -> SimpleTask:
    """Needle in a haystack: one sentence in a long generated text answers the question.

    Args:
        chars: Length of the text, to within a sentence.
        distractors: Number of sentences that resemble the needle.
        depth: Position of the needle, from 0 (beginning) to 1 (end); None for a random one.
        seed: Seed of the generated items.
    """
    if (
        chars < MIN_CHARS
        or not 0 <= distractors <= chars // 200
        or not (depth is None or 0 <= depth <= 1)
    ):
        raise ConfigError(
            f"needle: chars={chars} must be at least {MIN_CHARS}, distractors={distractors} from 0 "
            f"to chars/200, depth={depth} from 0 to 1"
        )
    return SimpleTask(
        "needle",
        generated("needle", lambda rng: _make(rng, chars, distractors, depth), seed=seed),
        normalised,
    )


def _make(rng: random.Random, chars: int, distractors: int, depth: float | None) -> Item:
    name = _name(rng, 4)
    codes = [str(code) for code in rng.sample(range(100_000, 1_000_000), distractors + 1)]
    sentences = [f"The access code of {name} is {codes[0]}."]
    for number, code in enumerate(codes[1:]):
        other = name[:4] + _name(rng, 2).lower()
        if number % 2 or other == name:
            sentences.append(f"Until last year the access code of {name} was {code}.")
        else:
            sentences.append(f"The access code of {other} is {code}.")
    text, at = _haystack(rng, chars, sentences, depth)
    tenth = min(9, 10 * at // len(text))
    question = f"What is the access code of {name}?"
    return Item(
        question, text, codes[0], f"depth {10 * tenth}-{10 * tenth + 10} %", wrong=codes[-1] + "0"
    )


def _haystack(
    rng: random.Random, chars: int, sentences: list[str], depth: float | None
) -> tuple[str, int]:
    """Return the text and the offset at which the first of ``sentences`` begins in it."""
    pool = [_filler(rng) for _ in range(_POOL)]
    room = chars - sum(map(len, sentences)) - len(sentences)
    mean = sum(map(len, pool)) / _POOL + 1
    hay = rng.choices(pool, k=max(1, round(room / mean)))
    places = sorted((rng.random(), sentence) for sentence in sentences[1:])
    places.append((rng.random() if depth is None else depth, sentences[0]))
    # Insert from the end, so that earlier positions stay valid.
    for share, sentence in sorted(places, reverse=True):
        hay.insert(round(share * len(hay)), sentence)
    text = " ".join(hay)
    return text, text.index(sentences[0])


def _filler(rng: random.Random) -> str:
    where = f" of {_name(rng, 3)}" if rng.random() < 0.3 else ""
    return (
        f"The {rng.choice(_PEOPLE)}{where} {rng.choice(_VERBS)} "
        f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}."
    )


def _name(rng: random.Random, num_syllables: int) -> str:
    return "".join(rng.choices(_SYLLABLES, k=num_syllables)).capitalize()
