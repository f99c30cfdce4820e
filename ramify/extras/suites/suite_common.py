"""Code shared by all benchmark suites: checking options, building splits, and reading rows of
public files.

    niah(tokens=65_536, families=("single_1", "vt"))          generated, at a length
    niah(test="niah_single_1/validation.jsonl")               a file that its authors publish

Invalid options are rejected before any cost arises: an unknown family of questions, a length that a
suite cannot have, and a file that lacks columns. How an item is made and scored is decided by each
suite's module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, SourceError, did_you_mean
from ramify.tasks.base import SPLITS, AnswerReward, DatasetTask, Item, LazySequence, generated
from ramify.tasks.data import dataset

MIN_TOKENS, MAX_TOKENS = 1_000, 10_000_000
CHARS_PER_TOKEN = 4
Row = Mapping[str, Any]


class BenchmarkFileFormat(msgspec.Struct, frozen=True):
    """The file format of a published benchmark, and how its rows become task items."""

    benchmark: str
    """Name of the benchmark, for errors."""
    columns: Sequence[str]
    """Columns that each row must have."""
    item: Callable[[Row], Item]
    """Converts a row to an item. Raises ValueError for values in another format."""

    def row_to_item(self, row: Row) -> Item:
        """Convert a row of a published benchmark's file to a task item.

        Raises ValueError that names any missing columns.
        """
        missing = [column for column in self.columns if column not in row]
        if missing:
            raise ValueError(
                f"it lacks the columns {', '.join(missing)} of {self.benchmark}'s files; it has "
                f"{', '.join(map(str, row))}"
            )
        return self.item(row)


class JsonArrayRows(LazySequence[Row]):
    """The rows of a benchmark file that is a single JSON array of objects.

    Each row is decoded on access.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the rows in the JSON array of the file at ``path``.

        Raises SourceError if it cannot be read or is not a JSON array.
        """
        self._path = Path(path).expanduser()
        try:
            self._rows = msgspec.json.decode(self._path.read_bytes(), type=list[msgspec.Raw])
        except OSError as error:
            raise SourceError(f"file {path} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceError(f"{path} is not a JSON array: {error}") from None

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Row:
        row: Row = msgspec.json.decode(self._rows[index])
        return row


def chosen_families(
    suite: str, families: str | Sequence[str] | None, known: Sequence[str], tokens: int
) -> tuple[str, ...]:
    """Return the names of the question families that the user chose, after checking them.

    Each name occurs once.

    Args:
        suite: Name of the suite, for errors.
        families: The chosen families: a sequence of names, a text of names separated by commas,
            or None for all.
        known: The families of the suite.
        tokens: Length of a text, which is checked, too.

    Raises ConfigError for an unknown family, and for a length that a suite cannot have.
    """
    named = families.split(",") if isinstance(families, str) else families
    if named is None:
        named = known
    if not isinstance(named, list | tuple) or not all(isinstance(each, str) for each in named):
        raise ConfigError(f"{suite}: families={named!r:.60}; give names, as in families=a,b")
    chosen = tuple(dict.fromkeys(family.strip() for family in named))
    for family in chosen:
        if family not in known:
            raise ConfigError(f"{suite}: unknown family '{family}': {did_you_mean(family, known)}")
    if not chosen:
        raise ConfigError(f"{suite}: give at least one family: {', '.join(known)}")
    if not isinstance(tokens, int) or not MIN_TOKENS <= tokens <= MAX_TOKENS:
        raise ConfigError(f"{suite}: tokens={tokens}; give {MIN_TOKENS:,} to {MAX_TOKENS:,} tokens")
    return chosen


def suite_task(
    name: str,
    make: Callable[[random.Random], Item],
    reward: AnswerReward,
    *,
    seed: int,
    families: Sequence[str],
    sources: Sequence[Any] = (),
    file: BenchmarkFileFormat | None = None,
) -> DatasetTask:
    """Create the task of a benchmark suite from generated or published items.

    Its splits are generated unless files or rows replace them.

    Args:
        name: Name of the suite.
        make: Generates an item.
        reward: Score of an answer.
        seed: Seed of the generated items.
        families: Families of questions that are asked.
        sources: Files or rows that replace the generated splits, in the order of ``SPLITS``; None
            keeps a split generated.
        file: Form of those files.

    Raises ConfigError if the first row of a file is not in that form.
    """
    splits = dict(generated(name, make, seed=seed))
    for split, source in zip(SPLITS, sources, strict=False):
        if source is not None and file is not None:
            rows = JsonArrayRows(source) if str(source).endswith(".json") else source
            loaded = dataset({split: rows}, item=file.row_to_item, reward=reward, name=name)
            splits[split] = loaded.splits[split]
            # Decode the first row now, so that a file in another format is rejected here.
            splits[split][0]
    return DatasetTask(name, splits, reward, families=families)
