"""The suite ``multihop``: questions that follow relations between people and towns across several
documents, as in BrowseComp-Plus.

    multihop(tokens=65_536)
    multihop(families=("hops_3", "hops_4"))
    multihop(test="browsecomp_plus.jsonl")                       the public file, decrypted

    # Lodavi Tamorusi
    Lodavi Tamorusi is a weaver, born in 1931 in Kobedami, and won the Amber Prize. …
    What is the title of the first book by the mayor of the town in which the weaver who was born in
    1931 and won the Amber Prize was born?  ->  The Quiet River of Zanomi

The person at the beginning of a question is described, not named. Each further hop is a relation
that is only stated in the document of the person or town before it, so a question with k hops needs
k documents. Other people share two of the three attributes of the first person, or the surname of
another person.

This module generates the documents and the questions. Answers are compared without regard to case
and punctuation.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from ramify.extras.suites.fact_planting import filler_rng, plant
from ramify.extras.suites.filler_text import (
    ADJECTIVES,
    NOUNS,
    PEOPLE,
    invented_name,
    invented_names,
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
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.scoring import normalised

FAMILIES = tuple(f"hops_{hops}" for hops in range(1, 5))
_PRIZES = ("Amber", "Cedar", "Coral", "Ivory", "Juniper", "Marble", "Opal", "Saffron", "Willow")
_YEARS = range(1900, 1960)
_TOWN_SHARE = 0.2
"""Fraction of the documents that are about towns."""
_RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {
        "teacher": "the teacher of {}",
        "spouse": "the person who is married to {}",
        "landlord": "the person from whom {} rents a house",
        "town": "the town in which {} was born",
    },
    "town": {"mayor": "the mayor of {}", "founder": "the founder of {}"},
}
"""Kind of entity -> its relations -> their wording in a question."""


class Person(NamedTuple):
    """The facts in a person's document."""

    name: str
    profession: str
    year: int
    prize: str
    teacher: str
    spouse: str
    landlord: str
    town: str
    book: str


class Town(NamedTuple):
    """The facts in a town's document."""

    name: str
    mayor: str
    founder: str
    bridge: str


def multihop(
    *,
    tokens: int = 8_192,
    families: str | Sequence[str] | None = None,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    seed: int = 0,
) -> DatasetTask:
    """Return a task of questions that need one to four documents, generated or read from
    BrowseComp-Plus.

    Args:
        tokens: Length of a generated text in tokens: 1,000 to 10,000,000. A token counts as four
            characters.
        families: Which of ``hops_1`` to ``hops_4`` are asked; None for all.
        train: A ``.jsonl`` or ``.parquet`` file in the decrypted form of BrowseComp-Plus, or its
            rows, which replaces the generated split. The same for ``validation`` and ``test``.
        seed: Seed of the generated items.

    Raises ConfigError for an unknown family, a length outside these bounds, or a file in another
    form.
    """
    chosen = chosen_families("multihop", families, FAMILIES, tokens)
    make = functools.partial(_make, tokens * CHARS_PER_TOKEN, chosen)
    sources = (train, validation, test)
    return suite_task(
        "multihop",
        make,
        normalised,
        seed=seed,
        families=chosen,
        sources=sources,
        file=BROWSECOMP_PLUS,
    )


def _make(chars: int, families: Sequence[str], rng: random.Random) -> Item:
    family = rng.choice(families)
    hops = int(family.removeprefix("hops_"))
    names_of = _Names(rng)
    first = _person(rng, names_of)
    chain: list[Person | Town] = [first]
    asked = f"the {first.profession} who was born in {first.year} and won the {first.prize} Prize"
    for _ in range(hops - 1):
        entity = chain[-1]
        relations = _RELATIONS["person" if isinstance(entity, Person) else "town"]
        relation = rng.choice(list(relations))
        asked = relations[relation].format(asked)
        target = getattr(entity, relation)
        other = (
            _town(rng, names_of)
            if relation == "town"
            else _non_matching_person(first, rng, names_of)
        )
        chain.append(other._replace(name=target))
    last = chain[-1]
    if isinstance(last, Person):
        question, gold = f"What is the title of the first book by {asked}?", last.book
    else:
        question, gold = f"What is the name of the only bridge of {asked}?", last.bridge
    similar = _similar_people(rng, names_of, chain)
    facts = [(rng.random(), _document(entity, sentence(rng))) for entity in (*chain, *similar)]
    passages = _documents(filler_rng(rng), chars, first, names_of.used)
    text = plant(facts, passages, chars, "\n\n")
    question += " Answer with the name alone."
    return Item(question, text, gold, family, wrong=similar[0].book)


class _Names:
    """A generator of invented names, none of which occurs twice."""

    def __init__(self, rng: random.Random) -> None:
        self.used: set[str] = set()
        self._rng = rng

    def word(self, num_syllables: int) -> str:
        word = invented_name(self._rng, num_syllables)
        while word in self.used:
            word = invented_name(self._rng, num_syllables)
        self.used.add(word)
        return word

    def person(self) -> str:
        return f"{self.word(3)} {self.word(3)}"


def _person(rng: random.Random, names_of: _Names) -> Person:
    return Person(
        names_of.person(),
        rng.choice(PEOPLE),
        rng.choice(_YEARS),
        rng.choice(_PRIZES),
        names_of.person(),
        names_of.person(),
        names_of.person(),
        names_of.word(4),
        _title(rng, names_of.word(3)),
    )


def _town(rng: random.Random, names_of: _Names) -> Town:
    return Town(
        names_of.word(4),
        names_of.person(),
        names_of.person(),
        f"{rng.choice(ADJECTIVES).capitalize()} {names_of.word(3)} Bridge",
    )


def _title(rng: random.Random, place: str) -> str:
    return f"The {rng.choice(ADJECTIVES).capitalize()} {rng.choice(NOUNS).capitalize()} of {place}"


def _non_matching_person(first: Person, rng: random.Random, names_of: _Names) -> Person:
    """Generate a person who does not match the question's description of its first person."""
    person = _person(rng, names_of)
    if (person.profession, person.prize) == (first.profession, first.prize):
        person = person._replace(year=first.year + 1)
    return person


def _similar_people(
    rng: random.Random, names_of: _Names, chain: Sequence[Person | Town]
) -> list[Person]:
    """Generate people who are easily confused with the people whom a question is about.

    Some share two attributes with the first person, and others the surname of a later one.
    """
    first = chain[0]
    assert isinstance(first, Person)
    profession = rng.choice([each for each in PEOPLE if each != first.profession])
    year = rng.choice([each for each in _YEARS if each != first.year])
    prize = rng.choice([each for each in _PRIZES if each != first.prize])
    found = [
        _person(rng, names_of)._replace(profession=profession, year=first.year, prize=first.prize),
        _person(rng, names_of)._replace(profession=first.profession, year=year, prize=first.prize),
        _person(rng, names_of)._replace(profession=first.profession, year=first.year, prize=prize),
    ]
    for entity in chain[1:]:
        if isinstance(entity, Person):
            namesake = f"{names_of.word(3)} {entity.name.split()[1]}"
            found.append(_non_matching_person(first, rng, names_of)._replace(name=namesake))
    return found


def _document(entity: Person | Town, end: str) -> str:
    if isinstance(entity, Town):
        return (
            f"# {entity.name}\n{entity.name} is a town. Its only bridge is the {entity.bridge}. It "
            f"was founded by {entity.founder}, and its mayor is {entity.mayor}. {end}"
        )
    surname = entity.name.split()[1]
    return (
        f"# {entity.name}\n{entity.name} is a {entity.profession}, born in {entity.year} in "
        f"{entity.town}, and won the {entity.prize} Prize. {surname} studied under "
        f"{entity.teacher}, is married to {entity.spouse}, and rents a house from "
        f"{entity.landlord}. The first book by {surname} is '{entity.book}'. {end}"
    )


def _documents(
    rng: random.Random, chars: int, first: Person, used: AbstractSet[str]
) -> Callable[[int], list[str]]:
    """Return a function that generates filler documents about other people and towns.

    None fits the description of the first person.
    """
    pool = sentence_pool(rng, chars)
    words = [word for word in invented_names(rng, len(pool)) if word not in used]
    titles = [_title(rng, word) for word in words]
    bridges = [f"{rng.choice(ADJECTIVES).capitalize()} {word} Bridge" for word in words]
    towns = [word for word in invented_names(rng, len(pool), 4) if word not in used]
    prizes = {
        profession: tuple(
            prize for prize in _PRIZES if (profession, prize) != (first.profession, first.prize)
        )
        for profession in PEOPLE
    }
    # Numbers of people are visited in steps, so that no two documents have the same name.
    num_people = len(words) ** 2
    at, step = rng.randrange(num_people), 1_000_003

    def named(number: int) -> str:
        return f"{words[number // len(words)]} {words[number % len(words)]}"

    def anyone() -> str:
        return named(int(rng.random() * num_people))

    def made(num: int) -> list[str]:
        nonlocal at
        documents = []
        for _ in range(num):
            end = rng.choice(pool)
            if rng.random() < _TOWN_SHARE:
                town = invented_name(rng, 4)
                while town in used:
                    town = invented_name(rng, 4)
                documents.append(
                    _document(Town(town, anyone(), anyone(), rng.choice(bridges)), end)
                )
                continue
            at = (at + step) % num_people
            profession = rng.choice(PEOPLE)
            person = Person(
                named(at),
                profession,
                rng.choice(_YEARS),
                rng.choice(prizes[profession]),
                anyone(),
                anyone(),
                anyone(),
                rng.choice(towns),
                rng.choice(titles),
            )
            documents.append(_document(person, end))
        return documents

    return made


# --- BrowseComp-Plus ------------------------------------------------------------------------------


_DOCUMENTS = ("gold_docs", "evidence_docs", "negative_docs")


def _browsecomp_item(row: Row) -> Item:
    """Convert a row of BrowseComp-Plus to a task item.

    Documents are sorted by a hash of their ids, so that their order does not give away the answer.
    """
    texts: dict[str, str] = {}
    for column in _DOCUMENTS:
        for document in row[column] or ():
            try:
                number, url, text = (str(document[name]) for name in ("docid", "url", "text"))
            except (KeyError, TypeError):
                raise ValueError(
                    f"its {column} is not a list of documents with docid, url and text"
                ) from None
            texts[number] = f"# {url}\n{text}"
    order = sorted(texts, key=lambda number: hashlib.sha256(number.encode()).digest())
    return Item(
        row["query"],
        "\n\n".join(texts[number] for number in order),
        row["answer"],
        "browsecomp_plus",
        metadata={"query_id": row["query_id"]},
    )


BROWSECOMP_PLUS = BenchmarkFileFormat(
    "BrowseComp-Plus", ("query_id", "query", "answer", *_DOCUMENTS), _browsecomp_item
)
