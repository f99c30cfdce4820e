"""Questions over ledgers, as a task: single documents, and several that each have a format of their
own.

    ledger()                                    one document of 20 to 60 rows
    ledger(chars=10_000_000)                    one document of ten million characters; the same questions
    ledger(multi=1.0, docs=(8, 8))              eight documents; the question is about all of them
    ledger(multi=0.5, kinds=("count", "sum"))   half and half
    ledger(long=0.05)                           one training item in twenty has up to 3,000,000

    sum qty of 'red' in all docs                the context of several documents: each after a line with the mark
    ###
    bavo,red,17
    ###
    qty;user;label
    5;kilu;red

Besides the three usual splits there are ``test_formats``, written in a format that no other split
has, and ``test_names``, about users that no other split asks about. A call below the root has a
reward of its own where it was asked a question of the family about a context whose rows are known:
its own right answer follows from them.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Sequence
from typing import cast

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.sandbox.base import digest_of
from ramify.tasks.base import GeneratedSplit, Item, Score, generated
from ramify.tasks.ledger.ledger_rows import (
    COMBINED,
    HELD_OUT_FORMATS,
    HELD_OUT_NAMES,
    KINDS,
    KNOWN_FORMATS,
    KNOWN_NAMES,
    LABELS,
    SCALES,
    Kind,
    Row,
    RowFormat,
    highest_quantity,
    make_rows,
    mean_digits,
    solve,
)
from ramify.tasks.scoring import exact
from ramify.tasks.simple import SimpleTask, WholeTrajectoryReward
from ramify.types.trajectory import Call, ContextRef, Trajectory

MARKS = ("###", "===", "---")
"""What separates documents; the same throughout a context."""
QUESTIONS: dict[Kind, str] = {
    "count": "count rows of '{}'",
    "sum": "sum qty of '{}'",
    "max": "max qty of '{}'",
    "top": "user with top qty",
    "latest": "latest qty of '{}'",
}
ALL = " in all docs"
_ASKED = {
    kind: re.compile(re.escape(text).replace(r"\{\}", r"(\w{1,20})"))
    for kind, text in QUESTIONS.items()
}
_TEXT_CHARS = 11.3
"""Of a row, on average, without its quantity: name, label, two separators, newline."""


class LedgerDocument(msgspec.Struct, frozen=True):
    """Where a document lies in its context, and how it is written."""

    start: int
    end: int
    format: RowFormat

    def rows(self, context: str) -> list[Row]:
        return self.format.read(context[self.start : self.end])


class LedgerQuestion(msgspec.Struct, frozen=True):
    """A question of the family."""

    kind: Kind
    about: str
    """A label, or for ``latest`` a user; empty for ``top``."""
    over_all: bool = False

    @property
    def text(self) -> str:
        return QUESTIONS[self.kind].format(self.about) + ALL * self.over_all

    @classmethod
    def read(cls, text: str) -> LedgerQuestion | None:
        """The question that ``text`` asks; None where it is none of the family."""
        text, over_all = text.strip(), text.strip().endswith(ALL)
        for kind, pattern in _ASKED.items():
            found = pattern.fullmatch(text.removesuffix(ALL))
            if found:
                return cls(kind, found[1] if found.groups() else "", over_all)
        return None


class _Recipe(msgspec.Struct, frozen=True):
    """What an item of the family is made to."""

    multi: float
    kinds: tuple[Kind, ...]
    rows: tuple[int, int]
    docs: tuple[int, int]
    doc_rows: tuple[int, int]
    chars: int | None
    formats: tuple[RowFormat, ...] = KNOWN_FORMATS
    names: tuple[str, ...] = KNOWN_NAMES
    long: float = 0.0
    long_chars: tuple[int, int] = (0, 0)

    def make(self, rng: random.Random) -> Item:
        if self.long and rng.random() < self.long:
            chars = round(math.exp(rng.uniform(*map(math.log, self.long_chars))))
            return msgspec.structs.replace(self, chars=chars, long=0.0).make(rng)
        return self._several(rng) if rng.random() < self.multi else self._single(rng)

    def _single(self, rng: random.Random) -> Item:
        kind = rng.choice(self.kinds)
        asked = LedgerQuestion(kind, self._about(rng, kind))
        form = rng.choice(self.formats)
        rows = make_rows(
            rng, kind, asked.about, form.header, self._num_rows(rng, self.rows, 1), self._scale(rng)
        )
        text = form.write(rows)
        return _item(asked, text, rows, [LedgerDocument(0, len(text), form)], kind)

    def _several(self, rng: random.Random) -> Item:
        kind = rng.choice([kind for kind in self.kinds if kind in COMBINED])
        asked = LedgerQuestion(kind, self._about(rng, kind), over_all=True)
        mark, num = rng.choice(MARKS), rng.randint(*self.docs)
        text, rows, documents = "", [], []
        parts = [mark]
        for _ in range(num):
            form = rng.choice(self.formats)
            own = make_rows(
                rng,
                kind,
                asked.about,
                form.header,
                self._num_rows(rng, self.doc_rows, num),
                self._scale(rng),
            )
            start = sum(map(len, parts)) + len(parts)
            parts.append(form.write(own))
            documents.append(LedgerDocument(start, start + len(parts[-1]), form))
            parts.append(mark)
            rows += own
        text = "\n".join(parts[:-1])
        return _item(asked, text, rows, documents, f"multi {kind}", mark)

    def _about(self, rng: random.Random, kind: Kind) -> str:
        return "" if kind == "top" else rng.choice(self.names if kind == "latest" else LABELS)

    def _scale(self, rng: random.Random) -> int:
        """Of the quantities; 1 where the length is given, since it follows from theirs."""
        return 1 if self.chars is not None else rng.choice(SCALES)

    def _num_rows(self, rng: random.Random, usual: tuple[int, int], num_docs: int) -> int:
        if self.chars is None:
            return rng.randint(*usual)
        num = chars = self.chars / num_docs
        for _ in range(4):  # quantities grow with the number of rows, and rows with them
            num = chars / (_TEXT_CHARS + mean_digits(highest_quantity(round(num))))
        return max(4, round(num))


def _item(
    asked: LedgerQuestion,
    text: str,
    rows: list[Row],
    documents: list[LedgerDocument],
    kind: str,
    mark: str = "",
) -> Item:
    gold = solve(rows, asked.kind, asked.about)
    about = {"documents": msgspec.to_builtins(documents), "mark": mark}
    return Item(
        asked.text,
        text,
        gold,
        kind,
        wrong=gold + 1 if isinstance(gold, int) else None,
        metadata=about,
    )


def ledger(
    *,
    seed: int = 0,
    multi: float = 0.0,
    kinds: Sequence[str] = KINDS,
    rows: tuple[int, int] = (20, 60),
    docs: tuple[int, int] = (2, 3),
    doc_rows: tuple[int, int] = (12, 30),
    chars: int | None = None,
    long: float = 0.0,
    long_chars: tuple[int, int] = (10_000, 3_000_000),
) -> SimpleTask:
    """The family as a task.

    ``multi`` is the share of items with several documents, whose number is drawn from ``docs``;
    ``kinds`` those that are asked (over several documents only count, sum and max); ``rows`` and
    ``doc_rows`` bound the rows of a single document and of each of several. ``chars`` sets the
    length of the whole context instead, to within some percent. ``long`` is the share of training
    items whose length is drawn from ``long_chars``, each order of magnitude as often as the next;
    other splits have none. Raises ConfigError for what leaves nothing to ask."""
    recipe = _Recipe(multi, _kinds(kinds, multi), rows, docs, doc_rows, chars)
    for name, (low, high), least in (
        ("rows", rows, 4),
        ("doc_rows", doc_rows, 4),
        ("docs", docs, 2),
    ):
        if not least <= low <= high:
            raise ConfigError(
                f"ledger: {name}=({low}, {high}); give at least {least}, the smaller first"
            )
    fewest = 200 * (docs[1] if multi else 1)
    if chars is not None and chars < fewest:
        raise ConfigError(
            f"ledger: chars={chars} holds no question; give at least 200 for each document"
        )
    if not 0 <= long <= 1 or (long and not fewest <= long_chars[0] <= long_chars[1]):
        raise ConfigError(
            f"ledger: long={long}, long_chars={tuple(long_chars)}; give a share from 0 to 1, and "
            "at "
            "least 200 characters for each document, the smaller number first"
        )
    name = "ledger"
    splits: dict[str, Sequence[Item]] = {**generated(name, recipe.make, seed=seed)}
    longer = msgspec.structs.replace(recipe, long=long, long_chars=long_chars)
    splits["train"] = GeneratedSplit(name, "train", longer.make, seed)
    other = msgspec.structs.replace(recipe, formats=HELD_OUT_FORMATS)
    splits["test_formats"] = GeneratedSplit(name, "test_formats", other.make, seed)
    if "latest" in recipe.kinds and multi < 1:
        named = msgspec.structs.replace(recipe, kinds=("latest",), names=HELD_OUT_NAMES, multi=0.0)
        splits["test_names"] = GeneratedSplit(name, "test_names", named.make, seed)
    return SimpleTask(name, splits, WholeTrajectoryReward(score))


def _kinds(given: Sequence[str], multi: float) -> tuple[Kind, ...]:
    for kind in given:
        if kind not in KINDS:
            raise ConfigError(f"ledger: unknown kind '{kind}': {nearest(kind, KINDS)}")
    if not given or not 0 <= multi <= 1:
        raise ConfigError(
            f"ledger: kinds={list(given)}, multi={multi}; give at least one kind, and a share from "
            "0 to 1"
        )
    if multi and not set(given) & set(COMBINED):
        raise ConfigError(
            f"ledger: none of {list(given)} can be asked over several documents; {list(COMBINED)} "
            "can"
        )
    return cast(tuple[Kind, ...], tuple(given))


# --- scoring
# -------------------------------------------------------------------------------------------------------


def documents_of(item: Item) -> list[LedgerDocument]:
    """The documents of an item's context, in order."""
    return msgspec.convert(item.metadata["documents"], list[LedgerDocument])


def score(item: Item, trajectory: Trajectory) -> Score:
    """``correct``, of the whole and of each call whose right answer is known."""
    known = _KnownRows(item, trajectory)
    calls = {
        call.id: {"correct": right}
        for call in trajectory.calls
        if (right := known.right(call)) is not None
    }
    children = [
        rewards["correct"]
        for id, rewards in calls.items()
        if trajectory.call(id).parent is not None
    ]
    metrics = {"children_correct": sum(children) / len(children)} if children else {}
    return Score({"correct": exact(trajectory.answer, item)}, calls, metrics)


class _KnownRows:
    """Which rows a call was given, by the length and digest of its context."""

    def __init__(self, item: Item, trajectory: Trajectory) -> None:
        self._item, self._whole = item, trajectory.context
        self._documents = documents_of(item)
        self.rows = functools.cache(self._rows)
        self._digest = functools.cache(digest_of)

    def right(self, call: Call) -> float | None:
        """Whether ``call`` answered right what it was asked; None where that cannot be told."""
        asked = LedgerQuestion.read(call.question)
        index = (
            self._index(call.context) if asked is not None and call.context is not None else None
        )
        if asked is None or index is None:
            return None
        try:
            gold = solve(self.rows(index), asked.kind, asked.about)
        except ValueError:  # nothing there is about that
            return None
        return exact(call.answer, Item(asked.text, gold=gold))

    def _index(self, given: ContextRef) -> int | None:
        """Of the document that was given, perhaps with a newline around it; -1: all of them."""
        context = self._item.context
        if self._whole is not None and given.digest == self._whole.digest:
            return -1
        for index, document in enumerate(self._documents):
            extra = given.chars - (document.end - document.start)
            for before in range(extra + 1) if 0 <= extra <= 2 else ():
                part = (
                    "\n" * before + context[document.start : document.end] + "\n" * (extra - before)
                )
                if self._digest(part) == given.digest:
                    return index
        return None

    def _rows(self, index: int) -> list[Row]:
        documents = self._documents if index < 0 else [self._documents[index]]
        return [row for document in documents for row in document.rows(self._item.context)]
