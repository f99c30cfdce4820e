"""A summarization benchmark that scores how many facts planted in a long text a summary states.

    planted(tokens=65_536)
    planted(families=("updates",))

    … The council granted 4210 crowns to the bridge of Lodavi. The baker counts the quiet stone. …
    Summarise which grants the council made: one sentence for each place, with its amount.
      ->  Lodavi: 4210 crowns. Kelumo: …

There are three families. A summary states the ``grants`` of a council, among grants that the
council rejected and those of others; the ``updates``, which are the latest of several amounts for
each place; or what one ``person`` bought, among purchases of others.

This module defines the facts and the score: the share of the facts that the first 150 words of a
summary state, with a penalty for other amounts.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.extras.suites.fact_planting import Fact, filler_rng, plant
from ramify.extras.suites.filler_text import NOUNS, invented_names, sentence_pool
from ramify.extras.suites.suite_common import CHARS_PER_TOKEN, chosen_families, suite_task
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.scoring.answer_text import as_text

MAX_WORDS = 150
"""Maximum number of words of a summary that are scored. The summary is also cut after ten times as
many characters."""
_FACTS = 6
_AMOUNT = re.compile(r"(?<!\d)(?:\d{1,3}(?:,\d{3})+|\d{4,12})(?!\d)")
_SENTENCE_END = re.compile(r"[.;!?](?=\s)|\n")
_FORM = (
    "Summarise {} in at most {} words: one sentence for each place, with the name of the place and "
    "the amount in crowns."
)


class PlantedFactRecallScorer(msgspec.Struct, frozen=True):
    """A reward function: the fraction of planted facts that a summary states.

    Only the first 150 words of the summary count. Every wrong amount in those words counts as one
    more fact that the summary misses.

    A fact is a place with an amount. If a sentence or line names as many places as amounts, the
    first place has the first amount, and so on. Otherwise a place has the next amount after it, or
    else the last one before it.
    """

    def __call__(self, answer: Any, item: Item) -> float:
        facts: Mapping[str, str] = item.gold
        text = as_text(answer)
        if text is None:
            return 0.0
        words = re.findall(r"\S+\s*", text[: MAX_WORDS * 10])
        summary = "".join(words[:MAX_WORDS])
        stated = {
            place
            for part in _SENTENCE_END.split(summary)
            for place, amount in _stated_amounts(part, facts)
            if facts[place] == amount
        }
        others = {_remove_commas(amount) for amount in _AMOUNT.findall(summary)} - set(
            facts.values()
        )
        return len(stated) / (len(facts) + len(others))


def _remove_commas(amount: str) -> str:
    return amount.replace(",", "")


def _stated_amounts(part: str, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each place named in a sentence of a summary, and the amount stated for it."""
    by_name = {place.casefold(): place for place in places}
    names_of = re.compile(rf"\b(?:{'|'.join(places)})\b", re.IGNORECASE)
    named = [(found.start(), by_name[found[0].casefold()]) for found in names_of.finditer(part)]
    amounts = [(found.start(), _remove_commas(found[0])) for found in _AMOUNT.finditer(part)]
    if len(named) == len(amounts):
        yield from ((place, amount) for (_, place), (_, amount) in zip(named, amounts, strict=True))
        return
    for at, place in named:
        after = [amount for start, amount in amounts if start > at]
        before = [amount for start, amount in amounts if start < at]
        if after or before:
            yield place, (after[:1] or before[-1:])[0]


def planted(
    *, tokens: int = 8_192, families: str | Sequence[str] | None = None, seed: int = 0
) -> DatasetTask:
    """Return a summarization task that scores how many planted facts a summary states.

    Args:
        tokens: Length of a text in tokens: 1,000 to 10,000,000. A token counts as four characters.
        families: Which of ``grants``, ``updates`` and ``person`` are asked; None for all.
        seed: Seed of the generated items.

    Raises ConfigError for an unknown family and a length outside these bounds.
    """
    chosen = chosen_families("planted", families, FAMILIES, tokens)
    make = functools.partial(_make, tokens * CHARS_PER_TOKEN, chosen)
    return suite_task("planted", make, PlantedFactRecallScorer(), seed=seed, families=chosen)


class PlantedFacts(NamedTuple):
    """Facts that are planted in a text and that a good summary must state.

    The sentences that state them in the text are stored, too.
    """

    asked: str
    """What to summarize, as worded in the question."""
    facts: Mapping[str, str]
    """Place -> the amount that a summary should state."""
    sentences: Sequence[str]
    """All planted sentences, in text order."""


def _make(chars: int, families: Sequence[str], rng: random.Random) -> Item:
    family = rng.choice(families)
    places = invented_names(rng, 2 * _FACTS)
    amounts = [str(amount) for amount in rng.sample(range(1_000, 10_000), 4 * _FACTS)]
    report = _REPORTS[family](rng, places, amounts)
    shares = sorted(rng.random() for _ in report.sentences)
    facts: list[Fact] = list(zip(shares, report.sentences, strict=True))
    filler = filler_rng(rng)
    pool = sentence_pool(filler, chars)
    text = plant(facts, lambda num: filler.choices(pool, k=num), chars, " ")
    right = "\n".join(f"{place}: {amount} crowns." for place, amount in report.facts.items())
    return Item(
        _FORM.format(report.asked, MAX_WORDS),
        text,
        dict(report.facts),
        family,
        right=right,
        wrong=f"{right}\nZavu: {amounts[-1]} crowns.",
    )


def _plant_grants(
    rng: random.Random, places: Sequence[str], amounts: Sequence[str]
) -> PlantedFacts:
    """Generate the facts of a text about grants that a council made.

    Distractors are grants that the council rejected, and grants made by a guild.
    """
    facts = dict(zip(places[:_FACTS], amounts[:_FACTS], strict=True))
    written = [
        f"The council granted {amount} crowns to the {rng.choice(NOUNS)} of {place}."
        for place, amount in facts.items()
    ]
    for number, (place, amount) in enumerate(zip(places[_FACTS:], amounts[_FACTS:], strict=False)):
        written.append(
            f"The guild granted {amount} crowns to the {rng.choice(NOUNS)} of {place}."
            if number % 2
            else f"The council rejected a grant of {amount} crowns to the {rng.choice(NOUNS)} of "
            f"{place}."
        )
    return PlantedFacts("which grants the council made", facts, _shuffle_sentences(rng, written))


def _plant_updates(
    rng: random.Random, places: Sequence[str], amounts: Sequence[str]
) -> PlantedFacts:
    """Plant yearly grants, whose amounts may be replaced by newer ones later in the text.

    The fact to summarize is the last amount stated for each place.
    """
    own = {place: amounts[3 * number : 3 * number + 3] for number, place in enumerate(places[:6])}
    order = _shuffle_sentences(rng, [place for place in own for _ in range(rng.randint(1, 3))])
    written: list[str] = []
    facts: dict[str, str] = {}
    for place in order:
        facts[place] = own[place][order[: len(written)].count(place)]
        written.append(f"The yearly grant of {place} is now {facts[place]} crowns.")
    return PlantedFacts("the latest yearly grant of each place", facts, written)


def _plant_purchases(
    rng: random.Random, places: Sequence[str], amounts: Sequence[str]
) -> PlantedFacts:
    """Plant one person's purchases as the facts to summarize.

    Distractors are purchases of another person with the same surname.
    """
    one, other, surname = invented_names(rng, 3)
    facts = dict(zip(places[:_FACTS], amounts[:_FACTS], strict=True))
    written = [
        f"{one if place in facts else other} {surname} bought the {rng.choice(NOUNS)} of {place} "
        f"for {amount} crowns."
        for place, amount in zip(places, amounts, strict=False)
    ]
    return PlantedFacts(f"what {one} {surname} bought", facts, _shuffle_sentences(rng, written))


def _shuffle_sentences(rng: random.Random, sentences: Sequence[str]) -> list[str]:
    return rng.sample(list(sentences), len(sentences))


_REPORTS: Mapping[str, Callable[[random.Random, Sequence[str], Sequence[str]], PlantedFacts]] = {
    "grants": _plant_grants,
    "updates": _plant_updates,
    "person": _plant_purchases,
}
FAMILIES = tuple(_REPORTS)
