"""The suite ``niah`` (needle in a haystack), and the task ``needle`` about access codes.

The suite has the tasks of RULER (Hsieh et al. 2024, 2404.06654).

    niah(tokens=65_536)                                          all families
    niah(tokens=1_000_000, families=("multikey_3", "vt"))
    niah(test="niah_single_1/validation.jsonl")                  RULER's files
    needle(chars=1_000_000)                                      the family ``needle`` alone

    … One of the special magic numbers for quiet-lodavi is: 7311460. The baker counts the …
    What is the special magic number for quiet-lodavi mentioned in the provided text?  ->  7311460

The families ``single_1`` to ``single_3`` have one needle, ``multikey_1`` to ``multikey_3`` also
have needles with other keys, ``multivalue`` asks for four values of one key, and ``multiquery`` for
the values of four keys. ``vt`` follows a chain of variables, ``cwe`` asks for the ten most common
words of a list, and ``fwe`` for the three most frequent words of a coded text. In ``needle``, the
distractors resemble the needle: codes of people with similar names, and former codes of the same
person.

This module generates the texts and questions, and scores the answers. The differences from RULER
are listed in ``docs/suites.md``.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.extras.suites.fact_planting import BLOCK, filler_rng, plant
from ramify.extras.suites.filler_text import (
    ADJECTIVES,
    NUM_WORDS,
    invented_name,
    invented_names,
    numbered_word,
    pool_size,
    sentence,
    sentence_pool,
)
from ramify.extras.suites.suite_common import (
    CHARS_PER_TOKEN,
    BenchmarkFileFormat,
    Row,
    chosen_families,
    suite_task,
)
from ramify.tasks.base import DatasetTask, Item, generated
from ramify.tasks.scoring import normalised
from ramify.tasks.scoring.answer_text import as_text

_POOL = 2000
"""Number of different filler sentences in a haystack of the task ``needle``. They repeat."""
MIN_CHARS = 1000
_NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_NEEDLE = "One of the special magic {what} for {key} is: {value}."
_REPLY_CHARS = 512
"""Number of characters of an answer that are scored. RULER cuts replies at 128 tokens."""
_UUID = r"(?i:\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b)"
_HOPS = 4
_COMMON = 10
_FULL_COUNTS = 4_096
"""Minimum text length, in tokens, at which word lists use RULER's full counts of common and
uncommon words."""
_FREQUENT = 3
_DOTS = "..."


class NeedleScorer(msgspec.Struct, frozen=True):
    """A reward function: the fraction of the expected values that an answer contains.

    Only the first 512 characters of the answer count, as in RULER. Guessing is penalized: if an
    answer names more values than there are right ones, the number of named values is the divisor.
    So ``7311460 or 1112223`` scores 0.5 if ``7311460`` is right.

    The values that an answer names are the numbers, ids or variables in the form of the right
    ones, or the words that occur in the text. For RULER's questions over documents (kind ``qa``),
    one right value is enough.
    """

    def __call__(self, answer: Any, item: Item) -> float:
        golds = {str(gold).casefold() for gold in item.gold}
        text = as_text(answer)
        if text is None:
            return 0.0
        text = text[:_REPLY_CHARS]
        folded = text.casefold()
        right = {gold for gold in golds if re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", folded)}
        if item.kind == "qa":
            return float(bool(right))
        form = _form_of([str(gold) for gold in item.gold])
        values = re.findall(form, text) if form else _listed_words(text, str(item.context))
        named = right.union(value.casefold() for value in values)
        return len(right) / max(len(golds), len(named))


def _form_of(golds: Sequence[str]) -> str | None:
    """Return a regular expression that matches any value in the same format as the expected ones.

    For example, it matches any number with seven digits. Returns None if the right values are
    words.
    """
    for form in (rf"(?<!\d)\d{{{len(golds[0])}}}(?!\d)", _UUID, r"\b[A-Z]{5}\b"):
        if all(re.fullmatch(form, gold) for gold in golds):
            return form
    return None


def _listed_words(text: str, context: str) -> Iterator[str]:
    """Yield the words in an answer that also occur in the second half of the context.

    That half contains no instructions.
    """
    for each in set(re.findall(r"\w+", text)):
        if context.find(f" {each} ", len(context) // 2) >= 0:
            yield each


def niah(
    *,
    tokens: int = 8_192,
    families: str | Sequence[str] | None = None,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    seed: int = 0,
) -> DatasetTask:
    """Return a task of RULER's questions about needles, variables and word counts in long texts.

    The questions are generated or read from RULER's files.

    Args:
        tokens: Length of a generated text in tokens: 1,000 to 10,000,000. A token counts as four
            characters.
        families: The families of questions; None for all.
        train: A ``.jsonl`` or ``.parquet`` file in RULER's form, or its rows, which replaces the
            generated split. The same for ``validation`` and ``test``.
        seed: Seed of the generated items.

    Raises ConfigError for an unknown family, a length outside these bounds, or a file in another
    form.
    """
    chosen = chosen_families("niah", families, FAMILIES, tokens)
    make = functools.partial(_make, tokens * CHARS_PER_TOKEN, chosen)
    sources = (train, validation, test)
    return suite_task(
        "niah", make, NeedleScorer(), seed=seed, families=chosen, sources=sources, file=RULER
    )


def _make(chars: int, families: Sequence[str], rng: random.Random) -> Item:
    family = rng.choice(families)
    question, text, golds, wrong = _MAKERS[family](rng, chars)
    return Item(question, text, golds, family, right=", ".join(golds), wrong=wrong)


Asked = tuple[str, str, list[str], str]
"""A question: (text of the question, context, right values, one wrong answer)."""


# --- needles --------------------------------------------------------------------------------------


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _uuid(rng: random.Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _keys(rng: random.Random, num: int) -> list[str]:
    return [f"{rng.choice(ADJECTIVES)}-{each.lower()}" for each in invented_names(rng, num)]


def _uuids(rng: random.Random, num: int) -> list[str]:
    return [_uuid(rng) for _ in range(num)]


Value = Callable[[random.Random], str]
Passages = Callable[[int], list[str]]
"""Function that takes a number and returns that many filler passages."""


def _noise(rng: random.Random, chars: int, what: str, keys: Sequence[str]) -> Passages:
    noise = itertools.cycle(_NOISE)
    return lambda num: list(itertools.islice(noise, num))


def _sentences(rng: random.Random, chars: int, what: str, keys: Sequence[str]) -> Passages:
    pool = sentence_pool(rng, chars)
    return lambda num: rng.choices(pool, k=num)


def _other_needles(rng: random.Random, chars: int, what: str, keys: Sequence[str]) -> Passages:
    """Return a function that generates filler needles whose keys differ from those in the
    question."""
    if what == "uuids":
        return lambda num: [
            _NEEDLE.format(what=what, key=_uuid(rng), value=_uuid(rng)) for _ in range(num)
        ]
    nouns = [
        noun.lower()
        for noun in invented_names(rng, pool_size(chars))
        if not any(key.endswith(f"-{noun.lower()}") for key in keys)
    ]

    def needles(num: int) -> list[str]:
        return [
            _NEEDLE.format(what=what, key=f"{adjective}-{noun}", value=_number(rng))
            for adjective, noun in zip(
                rng.choices(ADJECTIVES, k=num), rng.choices(nouns, k=num), strict=True
            )
        ]

    return needles


def _needle_question(
    filler: Callable[..., Passages],
    rng: random.Random,
    chars: int,
    *,
    what: str = "numbers",
    value: Value = _number,
    make_keys: Callable[[random.Random, int], list[str]] = _keys,
    num_keys: int = 1,
    num_values: int = 1,
    asked: int = 1,
) -> Asked:
    """Generate a question about needles, which are facts hidden in a long text.

    ``num_keys`` keys are planted with ``num_values`` values each. The question asks for the values
    of the first ``asked`` keys.
    """
    keys = make_keys(rng, num_keys)
    values = {key: [value(rng) for _ in range(num_values)] for key in keys}
    facts = [
        (rng.random(), _NEEDLE.format(what=what, key=key, value=each))
        for key in keys
        for each in values[key]
    ]
    golds = [each for key in keys[:asked] for each in values[key]]
    wrong = value(rng)
    text = plant(facts, filler(filler_rng(rng), chars, what, keys), chars, " ")
    if len(golds) == 1:
        ask = f"What is the special magic {what.removesuffix('s')} for {keys[0]}"
    else:
        *first, last = keys[:asked]
        named = f"{', '.join(first)}, and {last}" if first else last
        ask = f"What are all the special magic {what} for {named}"
    return f"{ask} mentioned in the provided text?", text, golds, wrong


# --- variables and words --------------------------------------------------------------------------


def _variable_question(rng: random.Random, chars: int) -> Asked:
    """Generate a question about the variables that get their value through a chain of assignments.

    The first is assigned a value, and each later one the variable before it.
    """
    chain = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(_HOPS + 1)]
    while len(set(chain)) <= _HOPS:
        chain[-1] = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
    value = str(rng.randrange(10_000, 100_000))
    places = sorted(rng.random() for _ in chain)
    sources = [value, *(f"VAR {variable}" for variable in chain[:-1])]
    facts = [
        (place, f"VAR {variable} = {source}.")
        for place, variable, source in zip(places, chain, sources, strict=True)
    ]
    text = plant(facts, _noise(filler_rng(rng), chars, "", ()), chars, " ")
    question = f"Find all variables that are assigned the value {value} in the text above."
    return question, text, chain, ", ".join(chain[:-1])


def _common_words(rng: random.Random, chars: int) -> Asked:
    """Generate a question about the ten most common words in a numbered list.

    They are six or ten times as frequent as the others.
    """
    common = _codes(rng, _COMMON)
    is_full = chars >= _FULL_COUNTS * CHARS_PER_TOKEN
    often, seldom = (30, 3) if is_full else (6, 1)
    filler = filler_rng(rng)
    others = max(_COMMON, (_list_length(chars) - _COMMON * often) // seldom)
    start, step = filler.randrange(NUM_WORDS), 7_654_321
    # The step has no divisor in common with the number of words, so each word occurs once.
    clashes = {(code - start) * pow(step, -1, NUM_WORDS) % NUM_WORDS for code in common}
    spare = (number for number in itertools.count(others) if number not in clashes)
    instead = {number: next(spare) for number in sorted(clashes) if number < others}

    def shown(entry: int) -> str:
        if entry < _COMMON:
            return numbered_word(common[entry])
        number = instead.get(entry - _COMMON, entry - _COMMON)
        return numbered_word((start + number * step) % NUM_WORDS)

    # The first ten numbers are the common words. Four bytes are enough for each entry.
    entries = array("I", [*range(_COMMON)] * often)
    for entry in range(_COMMON, _COMMON + others):
        entries.extend([entry] * seldom)
    _shuffle(entries, filler)
    parts = [
        " ".join(
            f"{number}. {shown(entry)}"
            for number, entry in enumerate(entries[begin : begin + BLOCK], begin + 1)
        )
        for begin in range(0, len(entries), BLOCK)
    ]
    question = f"What are the {_COMMON} most common words in the above list?"
    wrong = ", ".join(shown(_COMMON + number) for number in range(_COMMON))
    return question, " ".join(parts), [numbered_word(code) for code in common], wrong


def _frequent_words(rng: random.Random, chars: int) -> Asked:
    """Generate a question about the three most frequent coded words in a text.

    A word's frequency is proportional to 1 / rank². Dots are the most frequent entry, and the
    question excludes them.
    """
    top = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(_FREQUENT)]
    while len(set(top)) < _FREQUENT:
        top[-1] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
    filler = filler_rng(rng)
    shares = 6 / math.pi**2
    # The mean entry: dots with the share of the first rank, else a word of six letters.
    num = chars / (shares * (len(_DOTS) + 1) + (1 - shares) * 7)
    ranks = math.isqrt(int(2 * num * shares)) + _FREQUENT
    vocabulary = [_DOTS, *top]
    known = set(vocabulary)
    while len(vocabulary) < ranks:
        coded = "".join(filler.choices("abcdefghijklmnopqrstuvwxyz", k=6))
        if coded not in known:
            known.add(coded)
            vocabulary.append(coded)
    entries = array("H")
    for rank in range(1, ranks + 1):
        entries.extend([rank - 1] * round(num * shares / rank**2))
    _shuffle(entries, filler)
    parts = [
        " ".join([vocabulary[entry] for entry in entries[begin : begin + BLOCK]])
        for begin in range(0, len(entries), BLOCK)
    ]
    question = (
        f"Ignore the dots '{_DOTS}'. What are the three most frequently appeared words in the "
        "above coded text?"
    )
    return question, " ".join(parts), top, ", ".join(vocabulary[4:7])


def _codes(rng: random.Random, num: int) -> list[int]:
    codes: dict[int, None] = {}
    while len(codes) < num:
        codes[rng.randrange(NUM_WORDS)] = None
    return list(codes)


def _list_length(chars: int) -> int:
    """Return how many entries such as ``17. bodafiku`` fit in a numbered list of ``chars``
    characters."""
    num, digits = 0, 1
    while True:
        size = digits + len(". ") + 8 + len(" ")
        possible = 9 * 10 ** (digits - 1)
        if chars <= possible * size:
            return num + chars // size
        num, chars, digits = num + possible, chars - possible * size, digits + 1


def _shuffle(entries: array[int], rng: random.Random) -> None:
    draw = rng.random
    for last in range(len(entries) - 1, 0, -1):
        other = int(draw() * (last + 1))
        entries[last], entries[other] = entries[other], entries[last]


# --- access codes ---------------------------------------------------------------------------------


def needle(
    *, chars: int = 100_000, distractors: int = 6, depth: float | None = None, seed: int = 0
) -> DatasetTask:
    """Return a task in which one sentence of a long, generated text answers the question.

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
    return DatasetTask(
        "needle",
        generated("needle", lambda rng: _needle_item(rng, chars, distractors, depth), seed=seed),
        normalised,
    )


def _needle_item(rng: random.Random, chars: int, distractors: int, depth: float | None) -> Item:
    """Generate one item of the task ``needle``: a long text and a question about a needle in it.

    The item's kind says in which tenth of the text the needle is, for example ``depth 30-40 %``.
    """
    question, needles, codes = _access_codes(rng, distractors)
    text, at = _haystack(rng, chars, needles, depth)
    tenth = min(9, 10 * at // len(text))
    return Item(
        question, text, codes[0], f"depth {10 * tenth}-{10 * tenth + 10} %", wrong=codes[-1] + "0"
    )


def _access_code(rng: random.Random, chars: int) -> Asked:
    """Generate a question about an access code that is stated in a long text.

    The question belongs to the family ``needle``. Its facts and their relative positions are the
    same at every text length.
    """
    question, needles, codes = _access_codes(rng, 6)
    facts = [(rng.random(), text) for text in needles]
    text = plant(facts, _sentences(filler_rng(rng), chars, "", ()), chars, " ")
    return question, text, codes[:1], codes[1]


def _access_codes(rng: random.Random, distractors: int) -> tuple[str, list[str], list[str]]:
    """Generate a question about an access code, with the true and misleading sentences about it.

    Returns the question, the sentence that answers it followed by misleading ones, and the code in
    each sentence.
    """
    person = invented_name(rng, 4)
    codes = [str(code) for code in rng.sample(range(100_000, 1_000_000), distractors + 1)]
    needles = [f"The access code of {person} is {codes[0]}."]
    for number, code in enumerate(codes[1:]):
        other = person[:4] + invented_name(rng, 2).lower()
        if number % 2 or other == person:
            needles.append(f"Until last year the access code of {person} was {code}.")
        else:
            needles.append(f"The access code of {other} is {code}.")
    return f"What is the access code of {person}?", needles, codes


def _haystack(
    rng: random.Random, chars: int, needles: Sequence[str], depth: float | None
) -> tuple[str, int]:
    """Build a text of about ``chars`` characters with the needles at random positions.

    Returns the text and the offset of the first needle. ``depth`` sets the relative position of
    that needle.
    """
    pool = [sentence(rng) for _ in range(_POOL)]
    room = chars - sum(map(len, needles)) - len(needles)
    mean = sum(map(len, pool)) / _POOL + 1
    hay = rng.choices(pool, k=max(1, round(room / mean)))
    places = sorted((rng.random(), text) for text in needles[1:])
    places.append((rng.random() if depth is None else depth, needles[0]))
    # Insert from the end, so that earlier positions stay valid.
    for share, fact in sorted(places, reverse=True):
        hay.insert(round(share * len(hay)), fact)
    text = " ".join(hay)
    return text, text.index(needles[0])


_UUID_VALUES: Mapping[str, Any] = {"what": "uuids", "value": _uuid}
_MAKERS: Mapping[str, Callable[[random.Random, int], Asked]] = {
    "single_1": functools.partial(_needle_question, _noise),
    "single_2": functools.partial(_needle_question, _sentences),
    "single_3": functools.partial(_needle_question, _sentences, **_UUID_VALUES),
    "multikey_1": functools.partial(_needle_question, _sentences, num_keys=4),
    "multikey_2": functools.partial(_needle_question, _other_needles),
    "multikey_3": functools.partial(
        _needle_question, _other_needles, make_keys=_uuids, **_UUID_VALUES
    ),
    "multivalue": functools.partial(_needle_question, _sentences, num_values=4),
    "multiquery": functools.partial(_needle_question, _sentences, num_keys=4, asked=4),
    "vt": _variable_question,
    "cwe": _common_words,
    "fwe": _frequent_words,
    "needle": _access_code,
}
FAMILIES = tuple(_MAKERS)


# --- RULER's files --------------------------------------------------------------------------------


_RULER_KINDS = {
    "special magic": "niah",
    "find all variables": "vt",
    "most common words": "cwe",
    "coded text": "fwe",
}
"""Maps words that occur in a question to the RULER task that the question belongs to. RULER's rows
do not name their task."""


def _ruler_item(row: Row) -> Item:
    """Convert a row of one of RULER's files to a task item.

    The last paragraph becomes the question, and the text before it the context.
    """
    text, golds = row["input"], row["outputs"]
    if not isinstance(text, str) or not isinstance(golds, list) or not golds:
        raise ValueError("its input is not a text, or its outputs are not a list with values")
    context, _, question = text.strip().rpartition("\n")
    asked = question.casefold()
    kind = next((kind for words, kind in _RULER_KINDS.items() if words in asked), "qa")
    golds = [str(gold) for gold in golds]
    right = golds[0] if kind == "qa" else ", ".join(golds)
    metadata = {"index": row["index"], "length": row["length"]}
    return Item(question, context, golds, kind, right=right, metadata=metadata)


RULER = BenchmarkFileFormat("RULER", ("index", "input", "outputs", "length"), _ruler_item)
