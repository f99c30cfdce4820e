"""A task of questions about ledgers, in one document or in several of different formats.

    ledger()                                    one document of 20 to 60 rows
    ledger(chars=10_000_000)                    one document of ten million characters
    ledger(multi=1.0, docs=(8, 8))              questions over eight documents
    ledger(multi=0.5, kinds=("count", "sum"))   half over one document, half over several
    ledger(long=0.05)                           one training item in twenty is long (to 3,000,000)

    sum qty of 'red' in all docs                several documents in one context, separated by a
                                                mark
    ###
    bavo,red,17
    ###
    qty;user;label
    5;kilu;red

In addition to the three usual splits there are two test splits: ``test_formats`` uses a text format
that no other split has, and ``test_names`` asks about users that no other split asks about. A call
below the root has its own reward if its question is a ledger question and its context has known
rows, because its right answer is then known.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Sequence
from typing import cast

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.sandbox.base import digest_of
from ramify.tasks.base import (
    DatasetTask,
    GeneratedSplit,
    Item,
    Score,
    TrajectoryRewardFunction,
    generated,
)
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
    LedgerRowTextFormat,
    Row,
    make_rows,
    mean_digits_below,
    quantity_bound,
    solve,
)
from ramify.tasks.scoring import exact
from ramify.types.trajectory import Call, ContextRef, Trajectory

MARKS = ("###", "===", "---")
"""Possible separators of documents; each context uses one."""
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
"""Mean number of characters in a row apart from its quantity: name, label, two separators and
newline.
"""


class LedgerDocumentSpan(msgspec.Struct, frozen=True):
    """The position and the text format of one ledger document in an item's context."""

    start: int
    end: int
    format: LedgerRowTextFormat

    def rows(self, context: str) -> list[Row]:
        return self.format.parse_rows(context[self.start : self.end])


class LedgerQuestion(msgspec.Struct, frozen=True):
    """A question about a ledger, with its kind and the label or user that it asks about."""

    kind: Kind
    about: str
    """The label that is asked about, or for ``latest`` the user; empty for ``top``."""
    over_all: bool = False

    @property
    def text(self) -> str:
        return QUESTIONS[self.kind].format(self.about) + ALL * self.over_all

    @classmethod
    def parse(cls, text: str) -> LedgerQuestion | None:
        """Parse a question about a ledger.

        Returns None if ``text`` is not such a question.
        """
        text, over_all = text.strip(), text.strip().endswith(ALL)
        for kind, pattern in _ASKED.items():
            match = pattern.fullmatch(text.removesuffix(ALL))
            if match:
                return cls(kind, match[1] if match.groups() else "", over_all)
        return None


class _Recipe(msgspec.Struct, frozen=True):
    """The options for generating items."""

    multi: float
    kinds: tuple[Kind, ...]
    rows: tuple[int, int]
    docs: tuple[int, int]
    doc_rows: tuple[int, int]
    chars: int | None
    formats: tuple[LedgerRowTextFormat, ...] = KNOWN_FORMATS
    names: tuple[str, ...] = KNOWN_NAMES
    long: float = 0.0
    long_chars: tuple[int, int] = (0, 0)

    def make(self, rng: random.Random) -> Item:
        if self.long and rng.random() < self.long:
            chars = round(math.exp(rng.uniform(*map(math.log, self.long_chars))))
            return msgspec.structs.replace(self, chars=chars, long=0.0).make(rng)
        return (
            self._make_multi_document_item(rng)
            if rng.random() < self.multi
            else self._make_single_item(rng)
        )

    def _make_single_item(self, rng: random.Random) -> Item:
        kind = rng.choice(self.kinds)
        asked = LedgerQuestion(kind, self._draw_subject(rng, kind))
        form = rng.choice(self.formats)
        rows = make_rows(
            rng,
            kind,
            asked.about,
            form.header,
            self._num_rows(rng, self.rows, 1),
            self._draw_scale(rng),
        )
        text = form.format_rows(rows)
        return _item(asked, text, rows, [LedgerDocumentSpan(0, len(text), form)], kind)

    def _make_multi_document_item(self, rng: random.Random) -> Item:
        kind = rng.choice([kind for kind in self.kinds if kind in COMBINED])
        asked = LedgerQuestion(kind, self._draw_subject(rng, kind), over_all=True)
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
                self._draw_scale(rng),
            )
            start = sum(map(len, parts)) + len(parts)
            parts.append(form.format_rows(own))
            documents.append(LedgerDocumentSpan(start, start + len(parts[-1]), form))
            parts.append(mark)
            rows += own
        text = "\n".join(parts[:-1])
        return _item(asked, text, rows, documents, f"multi {kind}", mark)

    def _draw_subject(self, rng: random.Random, kind: Kind) -> str:
        return "" if kind == "top" else rng.choice(self.names if kind == "latest" else LABELS)

    def _draw_scale(self, rng: random.Random) -> int:
        """Choose a random factor by which all quantities of one ledger are enlarged.

        The factor is 1 if the length of items is fixed, because larger numbers would make them
        longer.
        """
        return 1 if self.chars is not None else rng.choice(SCALES)

    def _num_rows(self, rng: random.Random, usual: tuple[int, int], num_docs: int) -> int:
        if self.chars is None:
            return rng.randint(*usual)
        num = chars = self.chars / num_docs
        for _ in range(4):  # iterate: longer quantities make rows longer, and rows fewer
            num = chars / (_TEXT_CHARS + mean_digits_below(quantity_bound(round(num))))
        return max(4, round(num))


def _item(
    asked: LedgerQuestion,
    text: str,
    rows: list[Row],
    documents: list[LedgerDocumentSpan],
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
) -> DatasetTask:
    """Return a task of questions about generated ledgers, in one or several documents.

    Args:
        seed: Seed of the generated items.
        multi: Share of items with several documents.
        kinds: Kinds of questions; over several documents only count, sum and max are asked.
        rows: Bounds of the number of rows of a single document.
        docs: Bounds of the number of documents, if there are several.
        doc_rows: Bounds of the number of rows of each of several documents.
        chars: Length of the whole context, to within a few percent; replaces the bounds of rows.
        long: Share of training items with a long context; other splits have none.
        long_chars: Bounds of that context's length, drawn log-uniformly.

    Raises ConfigError for options with which no question can be asked.
    """
    recipe = _Recipe(multi, _validate_kinds(kinds, multi), rows, docs, doc_rows, chars)
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
            f"ledger: chars={chars} is too short for a question: give at least 200 for each "
            "document"
        )
    if not 0 <= long <= 1 or (long and not fewest <= long_chars[0] <= long_chars[1]):
        raise ConfigError(
            f"ledger: long={long}, long_chars={tuple(long_chars)}: long must be from 0 to 1, and "
            "long_chars two numbers of at least 200 for each document, the smaller first"
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
    return DatasetTask(name, splits, TrajectoryRewardFunction(score))


def _validate_kinds(given: Sequence[str], multi: float) -> tuple[Kind, ...]:
    for kind in given:
        if kind not in KINDS:
            raise ConfigError(f"ledger: unknown kind '{kind}': {did_you_mean(kind, KINDS)}")
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


# --- scoring --------------------------------------------------------------------------------------


def documents_of(item: Item) -> list[LedgerDocumentSpan]:
    """Return the positions and text formats of the ledger documents in an item's context."""
    return msgspec.convert(item.metadata["documents"], list[LedgerDocumentSpan])


def score(item: Item, trajectory: Trajectory) -> Score:
    """Score the answer of the root call, and the answers of other calls whose right answers are
    known.
    """
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
    """Scores calls whose context is the item's context or one of its documents.

    A call's rows are recognised by the length and hash of its context.
    """

    def __init__(self, item: Item, trajectory: Trajectory) -> None:
        self._item, self._whole = item, trajectory.context
        self._documents = documents_of(item)
        self.rows = functools.cache(self._rows)
        self._digest = functools.cache(digest_of)

    def right(self, call: Call) -> float | None:
        """Return 1 if a call's answer is right, 0 if it is wrong, or None if it cannot be judged.

        Returns None if the right answer is unknown.
        """
        asked = LedgerQuestion.parse(call.question)
        index = (
            self._document_index(call.context)
            if asked is not None and call.context is not None
            else None
        )
        if asked is None or index is None:
            return None
        try:
            gold = solve(self.rows(index), asked.kind, asked.about)
        except ValueError:  # no row is about this user or label
            return None
        return exact(call.answer, Item(asked.text, gold=gold))

    def _document_index(self, given: ContextRef) -> int | None:
        """Return the index of the ledger document that a call received as its context.

        The index is -1 for the item's whole context. Returns None for any other context. Newlines
        around the document are ignored.
        """
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
