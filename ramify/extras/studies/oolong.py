"""OOLONG: questions that need every line of a long text (Bertsch et al. 2025, 2511.02817).

    Date: Mar 07, 2024 || User: 48213 || Instance: How many miles is it to Lodavi ?

    oolong(tokens=131_072)                                generated, with all families of questions
    oolong(families=("counting",), with_labels=True)      labels are in the text, so code suffices
    oolong(test="test.parquet", tokens=4096)              the public files, for the named splits

Each line has a label that has to be inferred from its instance. Questions count and compare labels
(``counting``), over the lines of some users (``user``), or of some dates (``timeline``). Decides
the forms of questions, and the score: 0.75^|difference| for numbers, exact match for the rest. Not
here: the policy's way through the text.
"""

from __future__ import annotations

import ast
import datetime
import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.tasks.base import SPLITS, Item, SimpleTask, generated
from ramify.tasks.data import dataset
from ramify.tasks.scoring.answer_text import as_text

LABELS: Mapping[str, tuple[str, ...]] = {
    "numeric value": ("How many {} are there in {} ?", "What year did the {} of {} begin ?"),
    "human being": ("Who first painted the {} of {} ?", "Which inventor built the {} of {} ?"),
    "location": ("Where can one see the {} of {} ?", "What country has the {} of {} ?"),
    "abbreviation": ("What does the {} on the sign of {} stand for ?",),
    "entity": ("What animal guards the {} of {} ?", "What colour is the {} of {} ?"),
    "description": ("Why was the {} of {} closed ?", "How does the {} of {} work ?"),
}
"""Label -> forms of its instances."""
FAMILIES = ("counting", "user", "timeline")
COMPARISONS = ("more common than", "less common than", "same frequency as")
MIN_TOKENS, MAX_TOKENS = 1_000, 4_000_000
CHARS_PER_TOKEN = 4
_BASE = 0.75
_THINGS = ("bridge", "market", "lantern", "orchard", "tower", "river", "letter", "wheel")
_SYLLABLES = ["".join(pair) for pair in itertools.product("bdfklmnprstvz", "aeiou")]
_FIRST_DAY = datetime.date(2023, 1, 1)
_DATE_FORM = "%b %d, %Y"
_HEADER = (
    "The following lines contain {num} general-knowledge questions, one per line. Each line has a "
    "date, a user id and an instance. Each instance has one of these labels: {labels}."
)
_LABELLED = " || Label: {}"


class OolongLine(msgspec.Struct, frozen=True):
    """One line of a generated text."""

    date: datetime.date
    user: int
    label: str
    instance: str

    def text(self, with_label: bool) -> str:
        line = f"Date: {self.date.strftime(_DATE_FORM)} || User: {self.user} || Instance: "
        return line + self.instance + (_LABELLED.format(self.label) if with_label else "")


class OolongScore(msgspec.Struct, frozen=True):
    """0.75^|difference| if the right answer is a number. Otherwise 1 for the same text (case and
    surroundings such as ``Label:`` aside) or the same members of a list, and 0 for others.

    >>> tasks.OolongScore()("Answer: 12", tasks.Item("How many?", gold=14))
    0.5625
    """

    def __call__(self, answer: Any, item: Item) -> float:
        gold = item.gold
        if isinstance(gold, bool) or gold is None:
            raise ConfigError(f"item {item.id}: an OOLONG answer is a number, a text or a list")
        text = as_text(answer)
        if text is None:
            return 0.0
        given = _stripped(text)
        if isinstance(gold, int | float):
            number = _number(given)
            return 0.0 if number is None else _BASE ** min(abs(gold - number), 1e6)
        if isinstance(gold, list | tuple):
            named = sorted(_stripped(part).casefold() for part in re.split(r"[,;\n]", given))
            return float(named == sorted(str(each).strip().casefold() for each in gold))
        return float(_same(given, str(gold)))


def oolong(
    *,
    tokens: int = 8_192,
    families: Sequence[str] = FAMILIES,
    with_labels: bool = False,
    labels: int = len(LABELS),
    users: int = 12,
    days: int = 365,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    seed: int = 0,
) -> SimpleTask:
    """Questions over a text of many lines, generated or from OOLONG's public files.

    Args:
        tokens: Approximate length of a generated text, of four characters each: 1,000 to
            4,000,000.
        families: Which of ``counting``, ``user`` and ``timeline`` are asked.
        with_labels: Write the labels into the text.
        labels: Number of different labels, from 2.
        users: Number of different users, from 2.
        days: Number of days over which dates are spread, from 62.
        train: A ``.jsonl`` or ``.parquet`` file, or rows, in the form of
            ``oolongbench/oolong-synth`` or ``oolong-real``, which replaces the generated split. The
            same for ``validation`` and ``test``.
        seed: Seed of the generated items.

    Raises ConfigError for options with which no question can be asked."""
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"oolong: unknown family '{family}': {nearest(family, FAMILIES)}")
    if not (families and MIN_TOKENS <= tokens <= MAX_TOKENS):
        raise ConfigError(
            f"oolong: families={list(families)}, tokens={tokens}; give at least one family, and "
            f"{MIN_TOKENS:,} to {MAX_TOKENS:,} tokens"
        )
    if not 2 <= labels <= len(LABELS) or users < 2 or days < 62:
        raise ConfigError(
            f"oolong: labels={labels} must be from 2 to {len(LABELS)}, users={users} at least 2, "
            f"days={days} at least 62"
        )
    make = functools.partial(
        _make, tokens, tuple(families), with_labels, tuple(LABELS)[:labels], users, days
    )
    splits = dict(generated("oolong", make, seed=seed))
    for split, source in zip(SPLITS, (train, validation, test), strict=True):
        if source is not None:
            item = functools.partial(item_of, with_labels=with_labels)
            loaded = dataset({split: source}, item=item, reward=OolongScore(), name="oolong")
            splits[split] = loaded.splits[split]
    return SimpleTask("oolong", splits, OolongScore())


def item_of(row: Mapping[str, Any], *, with_labels: bool = False) -> Item:
    """Convert a row of the public files. Raises KeyError or ValueError if a column is missing or
    has another form."""
    column = "context_window_text"
    if with_labels:
        column += "_with_labels"
    gold = _gold(str(row["answer"]))
    kind = str(row.get("task_group") or row.get("question_type") or "")
    return Item(row["question"], row[column], gold, kind, right=_right(gold), wrong=_wrong(gold))


def _right(gold: Any) -> Any:
    return ", ".join(map(str, gold)) if isinstance(gold, list) else gold


def _wrong(gold: Any) -> Any:
    return gold + 3 if isinstance(gold, int | float) else "none of these"


def _gold(text: str) -> Any:
    """The answer in a row: ``['spam']``, ``[12]``, ``[datetime.date(2024, 5, 3)]``, or plain."""
    dates = re.findall(r"datetime\.date\((\d+), (\d+), (\d+)\)", text)
    if dates:
        found = [datetime.date(*map(int, date)).strftime(_DATE_FORM) for date in dates]
        return found[0] if len(found) == 1 else found
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = [part.strip() for part in text.split(",")] if "," in text else text.strip()
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("its answer is an empty list")
        value = value[0] if len(value) == 1 else list(value)
    return value


# --- comparing answers ----------------------------------------------------------------------------


def _stripped(text: str) -> str:
    """The answer without what often surrounds it: ``Label: [spam]`` is ``spam``."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    last = last.rpartition(":")[2] if re.match(r"\W*[A-Za-z ]{1,30}:", last) else last
    return last.strip(" *[]'\"`.\t")


def _number(text: str) -> float | None:
    match = re.fullmatch(r"-?\d{1,15}(?:\.\d{1,15})?", text.replace(",", ""))
    return float(match[0]) if match else None


def _same(given: str, gold: str) -> bool:
    if given.casefold() == gold.strip().casefold():
        return True
    for words in COMPARISONS:  # a whole sentence: "abbreviation is less common than entity"
        short = words.removesuffix(" than").removesuffix(" as")
        if short in gold:
            return short in given.casefold() and not any(
                other.split(" than")[0].removesuffix(" as") in given.casefold()
                for other in COMPARISONS
                if other != words
            )
    dates = [_date(text) for text in (given, gold)]
    return dates[0] is not None and dates[0] == dates[1]


def _date(text: str) -> datetime.date | None:
    for form in (_DATE_FORM, "%Y-%m-%d", "%B %d, %Y", "%m/%d/%Y"):
        try:
            return datetime.datetime.strptime(text, form).date()
        except ValueError:
            continue
    return None


# --- generating -----------------------------------------------------------------------------------


def _make(
    tokens: int,
    families: Sequence[str],
    with_labels: bool,
    labels: Sequence[str],
    users: int,
    days: int,
    rng: random.Random,
) -> Item:
    lines = _lines(rng, tokens * CHARS_PER_TOKEN, with_labels, labels, users, days)
    family = rng.choice(list(families))
    name, ask = rng.choice(_QUESTIONS[family])
    question, gold = ask(rng, lines, labels)
    header = _HEADER.format(num=len(lines), labels=", ".join(labels))
    text = "\n".join([header, *(line.text(with_labels) for line in lines)])
    return Item(question, text, gold, f"{family} {name}", wrong=_wrong(gold))


def _lines(
    rng: random.Random,
    chars: int,
    with_labels: bool,
    labels: Sequence[str],
    users: int,
    days: int,
) -> list[OolongLine]:
    """Lines of about ``chars`` characters in all, in order of their dates."""
    ids = rng.sample(range(10_000, 100_000), users)
    # Labels, users and months are unequally frequent, so that most questions have one answer.
    shares = {label: rng.uniform(1, 4) for label in labels}
    active = [rng.uniform(1, 4) for _ in ids]
    left, lines = chars - len(_HEADER), []
    while left > 0:
        label = rng.choices(list(shares), list(shares.values()))[0]
        place = "".join(rng.choices(_SYLLABLES, k=3)).capitalize()
        instance = rng.choice(LABELS[label]).format(rng.choice(_THINGS), place)
        day = _FIRST_DAY + datetime.timedelta(days=int(days * rng.betavariate(1.2, 1.5)))
        lines.append(OolongLine(day, rng.choices(ids, active)[0], label, instance))
        left -= len(lines[-1].text(with_labels)) + 1
    return sorted(lines, key=lambda line: line.date)


Asked = tuple[str, Any]
"""(question, right answer)"""


def _most(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    return _extreme(lines, labels, "most")


def _least(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    return _extreme(lines, labels, "least")


def _extreme(lines: Sequence[OolongLine], labels: Sequence[str], which: str) -> Asked:
    """The most or least common label; if several are, all that are."""
    counts = {label: sum(line.label == label for line in lines) for label in labels}
    end = (max if which == "most" else min)(counts.values())
    found = sorted(label for label, count in counts.items() if count == end)
    return f"Which of the labels is the {which} common?", found[0] if len(found) == 1 else found


def _second(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    counts = Counter(line.label for line in lines)
    sizes = sorted(set(counts.values()), reverse=True)
    found = sorted(label for label in counts if counts[label] == sizes[min(1, len(sizes) - 1)])
    return "Which of the labels is the second most common?", (
        found[0] if len(found) == 1 else found
    )


def _number_of(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    label = rng.choice(list(labels))
    return f"How many instances have the label '{label}'?", _count(lines, label)


def _compare(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    one, other = rng.sample(list(labels), 2)
    return (
        f"Is the label '{one}' more common than, less common than, or of the same frequency as "
        f"the label '{other}'?",
        _comparison(_count(lines, one), _count(lines, other)),
    )


def _times(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    counts = Counter(line.date for line in lines)
    times = rng.choice(sorted(counts.values()))
    gold = sum(count == times for count in counts.values())
    return f"How many dates occur in exactly {times} lines?", gold


def _for_users(ask: Callable[..., Asked]) -> Callable[..., Asked]:
    def about(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
        known = sorted({line.user for line in lines})
        users = sorted(rng.sample(known, min(len(known), rng.randint(1, 3))))
        question, gold = ask(rng, [line for line in lines if line.user in users], labels)
        return (
            f"Consider only the lines of the users {', '.join(map(str, users))}. {question}",
            gold,
        )

    return about


def _top_user(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    label = rng.choice(sorted({line.label for line in lines}))
    counts = Counter(line.user for line in lines if line.label == label)
    most = max(counts.values())
    found = sorted(str(user) for user, count in counts.items() if count == most)
    question = f"Which user has the most instances with the label '{label}'?"
    return question, found[0] if len(found) == 1 else found


def _in_month(ask: Callable[..., Asked]) -> Callable[..., Asked]:
    def about(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
        month = rng.choice(sorted({(line.date.year, line.date.month) for line in lines}))
        own = [line for line in lines if (line.date.year, line.date.month) == month]
        question, gold = ask(rng, own, labels)
        name = datetime.date(*month, 1).strftime("%B %Y")
        return f"Consider only the lines of {name}. {question}", gold

    return about


def _before(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    label, day = rng.choice(list(labels)), rng.choice(lines).date
    counts = [
        sum(line.label == label and (line.date < day) == is_before for line in lines)
        for is_before in (True, False)
    ]
    return (
        f"Is the label '{label}' more common before {day.strftime(_DATE_FORM)} than from then on, "
        "less common, or of the same frequency?",
        _comparison(*counts),
    )


def _busiest(rng: random.Random, lines: Sequence[OolongLine], labels: Sequence[str]) -> Asked:
    counts = Counter(line.date.strftime("%B %Y") for line in lines)
    most = max(counts.values())
    found = sorted(month for month, count in counts.items() if count == most)
    return "Which month, as in 'May 2023', has the most lines?", (
        found[0] if len(found) == 1 else found
    )


def _count(lines: Sequence[OolongLine], label: str) -> int:
    return sum(line.label == label for line in lines)


def _comparison(one: int, other: int) -> str:
    return COMPARISONS[0 if one > other else 1 if one < other else 2]


_COMMON = (
    ("most", _most),
    ("least", _least),
    ("second", _second),
    ("number", _number_of),
    ("compare", _compare),
)
_QUESTIONS: Mapping[str, Sequence[tuple[str, Callable[..., Asked]]]] = {
    "counting": (*_COMMON, ("times", _times)),
    "user": (*((name, _for_users(ask)) for name, ask in _COMMON), ("top", _top_user)),
    "timeline": (
        *((name, _in_month(ask)) for name, ask in _COMMON),
        ("before", _before),
        ("busiest", _busiest),
    ),
}
"""Family -> (name, how it is asked)"""
