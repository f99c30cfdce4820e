"""The OOLONG benchmark: questions that depend on every line of a long text (Bertsch et al. 2025,
2511.02817).

    Date: Mar 07, 2024 || User: 48213 || Instance: How many miles is it to Lodavi ?

    oolong(tokens=131_072)                                generated, with all families of questions
    oolong(families=("counting",), with_labels=True)      labels are in the text, so code suffices
    oolong(test="test.parquet", tokens=4096)              the public files, for the named splits

Each line of the text has a label that has to be inferred from what the line says. Questions count
and compare labels over all lines (``counting``), over the lines of some users (``user``), or of
some dates (``timeline``). This module defines the forms of the questions and the score:
0.75^|difference| for numbers, exact match for the rest. How a policy finds an answer is up to the
policy.
"""

from __future__ import annotations

import ast
import datetime
import functools
import itertools
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.extras.suites.filler_text import SYLLABLES
from ramify.extras.suites.suite_common import (
    CHARS_PER_TOKEN,
    BenchmarkFileFormat,
    Row,
    chosen_families,
    suite_task,
)
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.scoring.answer_text import as_text

LABELS: Mapping[str, tuple[str, ...]] = {
    "numeric value": ("How many {} are there in {} ?", "What year did the {} of {} begin ?"),
    "human being": ("Who first painted the {} of {} ?", "Which inventor built the {} of {} ?"),
    "location": ("Where can one see the {} of {} ?", "What country has the {} of {} ?"),
    "abbreviation": ("What does the {} on the sign of {} stand for ?",),
    "entity": ("What animal guards the {} of {} ?", "What colour is the {} of {} ?"),
    "description": ("Why was the {} of {} closed ?", "How does the {} of {} work ?"),
}
"""Label -> templates of sentences with that label."""
FAMILIES = ("counting", "user", "timeline")
COMPARISONS = ("more common than", "less common than", "same frequency as")
THINGS = ("bridge", "market", "lantern", "orchard", "tower", "river", "letter", "wheel")
FIRST_DAY = datetime.date(2023, 1, 1)
_BASE = 0.75
_DATE_FORM = "%b %d, %Y"
_PLACES = len(SYLLABLES) ** 3
"""Number of invented place names. Each has three syllables."""
_HEADER = (
    "The following lines contain {num} general-knowledge questions, one per line. Each line has a "
    "date, a user id and an instance. Each instance has one of these labels: {labels}."
)
_LINE = "Date: {} || User: {} || Instance: {}{}"
_LABELLED = " || Label: {}"


def header(num: int, labels: Sequence[str]) -> str:
    """Return the first line of a generated text, which states its number of lines and its
    labels."""
    return _HEADER.format(num=num, labels=", ".join(labels))


def format_text_line(day: int, user: int, instance: str, label: str = "") -> str:
    """Format one line of a generated text, which names a date, a user and a sentence.

    The label is added only if given.
    """
    return _LINE.format(written_date(day), user, instance, _LABELLED.format(label) if label else "")


@functools.lru_cache(maxsize=4_096)
def written_date(day: int) -> str:
    """Format a day number as a date in the notation of the generated text.

    Days count from 0, so day 2 is ``Jan 03, 2023``.
    """
    return (FIRST_DAY + datetime.timedelta(days=day)).strftime(_DATE_FORM)


class OolongLines(msgspec.Struct, frozen=True):
    """The lines of a generated OOLONG text, ordered by date.

    They are stored as columns, because a text of 40 MB has half a million lines.
    """

    days: array[int]
    """Day of each line, as the number of days since ``FIRST_DAY``."""
    users: array[int]
    labels: array[int]
    """Label of each line, as an index into the list of labels."""

    def __len__(self) -> int:
        return len(self.days)

    def where(self, is_chosen: Callable[[int, int], bool]) -> OolongLines:
        """Return the lines of the text whose day and user satisfy a condition."""
        places = [
            place
            for place, (day, user) in enumerate(zip(self.days, self.users, strict=True))
            if is_chosen(day, user)
        ]
        return OolongLines(
            *(
                array(column.typecode, [column[place] for place in places])
                for column in (self.days, self.users, self.labels)
            )
        )

    def label_counts(self, labels: Sequence[str]) -> dict[str, int]:
        """Return the number of text lines with each label.

        Labels that occur in no line are included with 0.
        """
        found = Counter(self.labels)
        return {label: found[index] for index, label in enumerate(labels)}


class OolongScorer(msgspec.Struct, frozen=True):
    """The reward function of the OOLONG benchmark.

    A number scores 0.75^|difference| against the right number. Any other answer scores 1 if it is
    the same text or has the same list members, and 0 otherwise. Case, and additions such as
    ``Label:``, make no difference.

    >>> tasks.OolongScorer()("Answer: 12", tasks.Item("How many?", gold=14))
    0.5625
    """

    def __call__(self, answer: Any, item: Item) -> float:
        gold = item.gold
        if isinstance(gold, bool) or gold is None:
            raise ConfigError(f"item {item.id}: an OOLONG answer is a number, a text or a list")
        text = as_text(answer)
        if text is None:
            return 0.0
        given = _strip_answer(text)
        if isinstance(gold, int | float):
            number = _number(given)
            return 0.0 if number is None else _BASE ** min(abs(gold - number), 1e6)
        if isinstance(gold, list | tuple):
            named = sorted(_strip_answer(part).casefold() for part in re.split(r"[,;\n]", given))
            return float(named == sorted(str(each).strip().casefold() for each in gold))
        return float(_is_same(given, str(gold)))


def oolong(
    *,
    tokens: int = 8_192,
    families: str | Sequence[str] | None = None,
    with_labels: bool = False,
    labels: int = len(LABELS),
    users: int = 12,
    days: int = 365,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    seed: int = 0,
) -> DatasetTask:
    """Return a task whose questions depend on every line of a long text, generated or from
    OOLONG's public files.

    Args:
        tokens: Approximate length of a generated text in tokens: 1,000 to 10,000,000. A token
            counts as four characters.
        families: Which of ``counting``, ``user`` and ``timeline`` are asked; None for all.
        with_labels: Write the labels into the text.
        labels: Number of different labels, from 2.
        users: Number of different users, from 2.
        days: Number of days over which dates are spread, from 62.
        train: A ``.jsonl`` or ``.parquet`` file, or rows, in the form of
            ``oolongbench/oolong-synth`` or ``oolong-real``, which replaces the generated split. The
            same for ``validation`` and ``test``.
        seed: Seed of the generated items.

    Raises ConfigError for options with which no question can be asked.
    """
    chosen = chosen_families("oolong", families, FAMILIES, tokens)
    if not 2 <= labels <= len(LABELS) or users < 2 or days < 62:
        raise ConfigError(
            f"oolong: labels={labels} must be from 2 to {len(LABELS)}, users={users} at least 2, "
            f"days={days} at least 62"
        )
    make = functools.partial(
        _make, tokens, chosen, with_labels, tuple(LABELS)[:labels], users, days
    )
    sources = (train, validation, test)
    return suite_task(
        "oolong",
        make,
        OolongScorer(),
        seed=seed,
        families=chosen,
        sources=sources,
        file=_public_file(with_labels),
    )


def _public_file(with_labels: bool) -> BenchmarkFileFormat:
    context = "context_window_text" + ("_with_labels" if with_labels else "")
    columns = (context, "question", "answer")
    return BenchmarkFileFormat("OOLONG", columns, functools.partial(_public_item, context))


def _public_item(context: str, row: Row) -> Item:
    gold = _parse_gold(str(row["answer"]))
    kind = str(row.get("task_group") or row.get("question_type") or "")
    return Item(
        row["question"],
        row[context],
        gold,
        kind,
        right=_format_gold(gold),
        wrong=_wrong_answer(gold),
    )


def _format_gold(gold: Any) -> Any:
    return ", ".join(map(str, gold)) if isinstance(gold, list) else gold


def _wrong_answer(gold: Any) -> Any:
    return gold + 3 if isinstance(gold, int | float) else "none of these"


def _parse_gold(text: str) -> Any:
    """Parse the expected answer in a row of OOLONG's public files.

    It is plain text, or a list in Python notation such as ``['spam']``, ``[12]`` or
    ``[datetime.date(2024, 5, 3)]``. A list with one element becomes that element. Raises ValueError
    for an empty list.
    """
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


def _strip_answer(text: str) -> str:
    """Remove the words and punctuation around a short answer: ``Label: [spam]`` becomes
    ``spam``."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    last = last.rpartition(":")[2] if re.match(r"\W*[A-Za-z ]{1,30}:", last) else last
    return last.strip(" *[]'\"`.\t")


def _number(text: str) -> float | None:
    match = re.fullmatch(r"-?\d{1,15}(?:\.\d{1,15})?", text.replace(",", ""))
    return float(match[0]) if match else None


def _is_same(given: str, gold: str) -> bool:
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
    lines, text = _lines(rng, tokens * CHARS_PER_TOKEN, with_labels, labels, users, days)
    family = rng.choice(families)
    name, ask = rng.choice(_QUESTIONS[family])
    question, gold = ask(rng, lines, labels)
    return Item(question, text, gold, f"{family} {name}", wrong=_wrong_answer(gold))


def _lines(
    rng: random.Random,
    chars: int,
    with_labels: bool,
    labels: Sequence[str],
    users: int,
    days: int,
) -> tuple[OolongLines, str]:
    """Generate the lines of a text, each with a date, a user and a labelled sentence.

    The text has about ``chars`` characters. Returns the lines, and the full text with its header.
    """
    ids = rng.sample(range(10_000, 100_000), users)
    # Labels, users and months are unequally frequent, so that most questions have one answer.
    label_shares = list(itertools.accumulate([rng.uniform(1, 4) for _ in labels]))
    user_shares = list(itertools.accumulate([rng.uniform(1, 4) for _ in ids]))
    bare = len(format_text_line(0, ids[0], ""))
    # The generator is asked for the same numbers as if it chose the words themselves.
    indices, syllables = range(len(labels)), range(len(SYLLABLES))
    forms = [range(len(LABELS[label])) for label in labels]
    things = range(len(THINGS))
    drawn = [_Day(array("B"), array("I"), array("I")) for _ in range(days)]
    left = chars - len(_HEADER)
    while left > 0:
        label = rng.choices(indices, cum_weights=label_shares)[0]
        one, two, three = rng.choices(syllables, k=3)
        place = (one * len(SYLLABLES) + two) * len(SYLLABLES) + three
        number = (rng.choice(forms[label]) * len(THINGS) + rng.choice(things)) * _PLACES + place
        day = drawn[int(days * rng.betavariate(1.2, 1.5))]
        day.labels.append(label)
        day.users.append(rng.choices(range(users), cum_weights=user_shares)[0])
        day.instances.append(number)
        left -= bare + len(_instance(labels[label], number)) + 1
        if with_labels:
            left -= len(_LABELLED.format(labels[label]))
    lines = OolongLines(array("I"), array("I"), array("B"))
    parts = [header(sum(len(day.labels) for day in drawn), labels)]
    for number, day in enumerate(drawn):
        lines.days.extend([number] * len(day.labels))
        lines.users.extend([ids[user] for user in day.users])
        lines.labels.extend(day.labels)
        parts.append("".join(_format_lines(number, day, ids, labels, with_labels)))
    return lines, "".join(parts)


class _Day(NamedTuple):
    """The generated text lines of one day, in the order in which they were generated."""

    labels: array[int]
    users: array[int]
    """User of each sentence, as an index into the list of users."""
    instances: array[int]
    """One number for each sentence, which encodes its template, thing and place."""


def _format_lines(
    number: int, day: _Day, ids: Sequence[int], labels: Sequence[str], with_labels: bool
) -> Iterator[str]:
    for label, user, instance in zip(day.labels, day.users, day.instances, strict=True):
        shown = labels[label] if with_labels else ""
        yield "\n" + format_text_line(number, ids[user], _instance(labels[label], instance), shown)


def _instance(label: str, number: int) -> str:
    form, place = divmod(number, _PLACES)
    form, thing = divmod(form, len(THINGS))
    first, last = divmod(place, len(SYLLABLES))
    first, middle = divmod(first, len(SYLLABLES))
    name = SYLLABLES[first].capitalize() + SYLLABLES[middle] + SYLLABLES[last]
    return LABELS[label][form].format(THINGS[thing], name)


Asked = tuple[str, Any]
"""A question: (text, right answer)."""


def _most_common_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    return _extreme_question(lines, labels, "most")


def _least_common_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    return _extreme_question(lines, labels, "least")


def _extreme_question(lines: OolongLines, labels: Sequence[str], which: str) -> Asked:
    """Generate a question that asks for the most or the least common label.

    If several labels tie, all of them together are the right answer.
    """
    counts = lines.label_counts(labels)
    end = (max if which == "most" else min)(counts.values())
    found = sorted(label for label, count in counts.items() if count == end)
    return f"Which of the labels is the {which} common?", found[0] if len(found) == 1 else found


def _second_most_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    counts = {label: count for label, count in lines.label_counts(labels).items() if count}
    sizes = sorted(set(counts.values()), reverse=True)
    found = sorted(label for label in counts if counts[label] == sizes[min(1, len(sizes) - 1)])
    return "Which of the labels is the second most common?", (
        found[0] if len(found) == 1 else found
    )


def _number_of(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    label = rng.choice(list(labels))
    return f"How many instances have the label '{label}'?", lines.label_counts(labels)[label]


def _comparison_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    one, other = rng.sample(list(labels), 2)
    counts = lines.label_counts(labels)
    return (
        f"Is the label '{one}' more common than, less common than, or of the same frequency as "
        f"the label '{other}'?",
        _comparison(counts[one], counts[other]),
    )


def _times_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    counts = Counter(lines.days)
    times = rng.choice(sorted(counts.values()))
    gold = sum(count == times for count in counts.values())
    return f"How many dates occur in exactly {times} lines?", gold


def _for_users(ask: Callable[..., Asked]) -> Callable[..., Asked]:
    def about(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
        known = sorted(set(lines.users))
        users = sorted(rng.sample(known, min(len(known), rng.randint(1, 3))))
        question, gold = ask(rng, lines.where(lambda _, user: user in users), labels)
        return (
            f"Consider only the lines of the users {', '.join(map(str, users))}. {question}",
            gold,
        )

    return about


def _top_user(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    label = rng.choice(
        sorted(label for label, count in lines.label_counts(labels).items() if count)
    )
    wanted = list(labels).index(label)
    counts = Counter(
        user for user, own in zip(lines.users, lines.labels, strict=True) if own == wanted
    )
    most = max(counts.values())
    found = sorted(str(user) for user, count in counts.items() if count == most)
    question = f"Which user has the most instances with the label '{label}'?"
    return question, found[0] if len(found) == 1 else found


def _month(day: int) -> tuple[int, int]:
    date = FIRST_DAY + datetime.timedelta(days=day)
    return date.year, date.month


def _in_month(ask: Callable[..., Asked]) -> Callable[..., Asked]:
    def about(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
        months = {day: _month(day) for day in set(lines.days)}
        month = rng.choice(sorted(set(months.values())))
        question, gold = ask(rng, lines.where(lambda day, _: months[day] == month), labels)
        name = datetime.date(*month, 1).strftime("%B %Y")
        return f"Consider only the lines of {name}. {question}", gold

    return about


def _before_date_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    label, first = rng.choice(list(labels)), rng.choice(lines.days)
    before = lines.where(lambda day, _: day < first).label_counts(labels)[label]
    after = lines.where(lambda day, _: day >= first).label_counts(labels)[label]
    return (
        f"Is the label '{label}' more common before {written_date(first)} than from then on, "
        "less common, or of the same frequency?",
        _comparison(before, after),
    )


def _busiest_month_question(rng: random.Random, lines: OolongLines, labels: Sequence[str]) -> Asked:
    counts: Counter[str] = Counter()
    for day, count in Counter(lines.days).items():
        counts[datetime.date(*_month(day), 1).strftime("%B %Y")] += count
    most = max(counts.values())
    found = sorted(month for month, count in counts.items() if count == most)
    return "Which month, as in 'May 2023', has the most lines?", (
        found[0] if len(found) == 1 else found
    )


def _comparison(one: int, other: int) -> str:
    return COMPARISONS[0 if one > other else 1 if one < other else 2]


_COMMON = (
    ("most", _most_common_question),
    ("least", _least_common_question),
    ("second", _second_most_question),
    ("number", _number_of),
    ("compare", _comparison_question),
)
_QUESTIONS: Mapping[str, Sequence[tuple[str, Callable[..., Asked]]]] = {
    "counting": (*_COMMON, ("times", _times_question)),
    "user": (*((name, _for_users(ask)) for name, ask in _COMMON), ("top", _top_user)),
    "timeline": (
        *((name, _in_month(ask)) for name, ask in _COMMON),
        ("before", _before_date_question),
        ("busiest", _busiest_month_question),
    ),
}
"""Family -> (name, function that makes the question) of each kind of question."""
