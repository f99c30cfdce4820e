"""A dataset as a task: rows of JSONL or Parquet files, of Hugging Face ``datasets``, or of a list,
and a score by name.

    dataset("questions.jsonl", question="q", gold="a")                          divided 80 : 10 : 10
    dataset({"train": "train.jsonl", "test": "test.parquet"}, context="document", reward="f1")
    dataset("hf:openai/gsm8k:main", gold="answer", reward="last_number")        the splits that it has
    dataset(rows, item=lambda row: Item(row["q"], gold=row["a"]), reward=lambda answer, item: …)

Which column is what is said by name; an error names the file, the row and the column. One source
without splits is divided by the hash of question and context, so that a row stays where it is when
others are added, and the same question is never in two splits. Rows are read when they are looked
at. Leaves out what a model is told beside them.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from ramify.errors import ConfigError, SourceError, nearest
from ramify.tasks.base import DATA_SUFFIXES, SPLITS, Item
from ramify.tasks.scoring import SCORERS
from ramify.tasks.simple import AnswerReward, SimpleTask, WholeTrajectoryReward

Row = Mapping[str, Any]
Source = Any
"""A path to ``.jsonl`` or ``.parquet``, ``hf:NAME`` or ``hf:NAME:CONFIG``, a sequence of mappings,
or a loaded ``datasets.Dataset`` or ``DatasetDict``."""
_SHARES = (("train", 0.8), ("validation", 0.1), ("test", 0.1))
_HF_NAMES = {"dev": "validation", "valid": "validation", "val": "validation"}


class DatasetColumns(msgspec.Struct, frozen=True):
    """Which column is what."""

    question: str = "question"
    gold: str | None = "answer"
    """None: the rows have no gold answer."""
    context: str | tuple[str, ...] | None = None
    """Of several columns the context is a dict."""
    kind: str | None = None
    metadata: tuple[str, ...] = ()
    """Columns that the score needs, by their own names; ``choice`` needs ``choices``."""

    def item(self, row: Row) -> Item:
        """Raises KeyError for a column that ``row`` does not have, TypeError for one of the wrong
        type."""
        question = row[self.question]
        if not isinstance(question, str) or not question.strip():
            raise TypeError(f"column '{self.question}' is {question!r:.60}; a question is text")
        gold: Any = None if self.gold is None else row[self.gold]
        if gold is None and self.gold is not None:
            raise TypeError(
                f"column '{self.gold}' is empty; every row needs a gold answer, or give gold=None"
            )
        is_choice = isinstance(gold, list | tuple) and len(gold)
        context = (
            {name: row[name] for name in self.context} if isinstance(self.context, tuple) else None
        )
        return Item(
            question,
            row[self.context] if isinstance(self.context, str) else context,
            gold,
            str(row[self.kind]) if self.kind is not None else "",
            right=gold[0] if is_choice else None,
            metadata={name: row[name] for name in self.metadata},
        )


def dataset(
    source: Source,
    *,
    question: str = "question",
    gold: str | None = "answer",
    context: str | Sequence[str] | None = None,
    kind: str | None = None,
    metadata: Sequence[str] = (),
    item: Callable[[Row], Item] | None = None,
    reward: str | AnswerReward | WholeTrajectoryReward = "exact",
    name: str = "",
) -> SimpleTask:
    """The task. ``item`` makes an item of a row instead of the columns; ``reward`` is a score of
    ``scoring`` by name, or a function of (answer, item). With ``gold=None`` the rows have no gold
    answer, and ``reward`` must be a function that needs none. Raises ConfigError, SourceError for
    what cannot be read, and when it is looked at, for a row that is not as it should be."""
    if gold is None and item is None and isinstance(reward, str):
        raise ConfigError(
            f"dataset with gold=None and reward='{reward}', which compares with a gold answer: "
            "give a function of "
            "(answer, item), or the column with the gold answers"
        )
    several = context if isinstance(context, str) or context is None else tuple(context)
    columns = DatasetColumns(question, gold, several, kind, tuple(metadata))
    name = name or _name_of(source)
    make = item or columns.item
    sources = _sources(source)
    splits: Mapping[str, Sequence[Item]]
    if len(sources) == 1 and "" in sources:
        splits = _divided(name, sources[""], make)
    else:
        splits = {
            split: DatasetItems(f"{name}/{split}", rows, make) for split, rows in sources.items()
        }
    return SimpleTask(name, splits, scorer_of(reward))


def scorer_of(
    reward: str | AnswerReward | WholeTrajectoryReward,
) -> AnswerReward | WholeTrajectoryReward:
    """A score by name, or as it is."""
    if not isinstance(reward, str):
        return reward
    if reward not in SCORERS:
        raise ConfigError(
            f"unknown score '{reward}': {nearest(reward, SCORERS)}; or give a function of (answer, "
            "item)"
        )
    return SCORERS[reward]


class DatasetItems(Sequence[Item]):
    """Rows as items, made when they are looked at."""

    def __init__(
        self,
        name: str,
        rows: Sequence[Row],
        make: Callable[[Row], Item],
        indices: Sequence[int] | None = None,
    ) -> None:
        """``indices`` are the rows that belong here; None: all."""
        self._name, self._rows, self._make = name, rows, make
        self._indices = range(len(rows)) if indices is None else indices

    def some(self, name: str, places: Sequence[int]) -> DatasetItems:
        """Those at ``places``, under another name; each keeps the number of its row."""
        return DatasetItems(
            name, self._rows, self._make, [self._indices[place] for place in places]
        )

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = self._indices[index]
        item = _made(self._name, self._rows, number, self._make)
        return msgspec.structs.replace(item, id=f"{self._name}/{number}")


def _made(name: str, rows: Sequence[Row], number: int, make: Callable[[Row], Item]) -> Item:
    row = rows[number]
    try:
        return make(row)
    except KeyError as error:
        raise ConfigError(
            f"{name}, row {number}: there is no column {error}; it has {', '.join(map(str, row))}"
        ) from None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{name}, row {number}: {error}") from error


def _divided(
    name: str, rows: Sequence[Row], make: Callable[[Row], Item]
) -> dict[str, Sequence[Item]]:
    """The three splits, by what is asked over what."""
    indices: dict[str, list[int]] = {split: [] for split in SPLITS}
    for number in range(len(rows)):
        item = _made(name, rows, number, make)
        asked = hashlib.sha256(
            msgspec.json.encode((item.question, item.context), enc_hook=str)
        ).digest()
        share = int.from_bytes(asked[:8], "big") / 2**64
        for split, size in _SHARES:
            share -= size
            if share < 0 or split == SPLITS[-1]:
                indices[split].append(number)
                break
    return {
        split: DatasetItems(f"{name}/{split}", rows, make, found)
        for split, found in indices.items()
        if found
    }


# --- where rows come from
# ----------------------------------------------------------------------------------------------


def _sources(source: Source) -> dict[str, Sequence[Row]]:
    """Split -> rows; a single source without splits has the empty name."""
    if isinstance(source, str) and source.startswith("hf:"):
        source = _hugging_face(source)
    if isinstance(source, Mapping):  # also a DatasetDict
        if not source:
            raise ConfigError(
                "a dataset needs a source for at least one split, as in {'test': 'questions.jsonl'}"
            )
        return {
            _HF_NAMES.get(str(split), str(split)): rows_of(each) for split, each in source.items()
        }
    return {"": rows_of(source)}


def rows_of(source: Source) -> Sequence[Row]:
    """The rows of one file or list, read when they are looked at. Raises ConfigError,
    SourceError."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.suffix not in DATA_SUFFIXES:
            raise ConfigError(
                f"{path}: rows are read from {' and '.join(DATA_SUFFIXES)}, and from hf:NAME"
            )
        if not path.is_file():
            raise SourceError(f"there is no file {path}")
        rows: Any = JsonlRows(path) if path.suffix == ".jsonl" else ParquetRows(path)
    else:
        rows = source
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"a {type(rows).__name__} is no dataset: give a file, hf:NAME, or a list of rows"
        )
    if len(rows) == 0:
        raise SourceError(f"{_name_of(source)}: there are no rows in it")
    found: Sequence[Row] = rows
    return found


def _hugging_face(name: str) -> Any:
    _, repository, *config = name.split(":")
    load_dataset = _package("datasets", "datasets").load_dataset
    try:
        return load_dataset(repository, *config)
    except Exception as error:
        raise SourceError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"this needs {module.partition('.')[0]}: pip install 'ramify[{extra}]'"
        ) from None


def _name_of(source: Source) -> str:
    if isinstance(source, str | Path):
        return Path(str(source).removeprefix("hf:").partition(":")[0]).stem
    if isinstance(source, Mapping) and source:
        return _name_of(next(iter(source.values())))
    return "dataset"


class JsonlRows(Sequence[Row]):
    """The objects of a JSONL file, found once and decoded when they are looked at. Blank lines are
    no rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = [(number, start, size) for number, start, size in _lines(path)]

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number, start, size = self._lines[index]
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(size)
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceError(f"{self._path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise SourceError(
                f"{self._path}, line {number}: a {type(row).__name__}; every line is an object"
            )
        return row


def _lines(path: Path) -> Iterator[tuple[int, int, int]]:
    """(number from 1, offset, length) of each line that is not blank."""
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, start, len(line)
                start += len(line)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


class ParquetRows(Sequence[Row]):
    """The rows of a Parquet file, a group of rows at a time."""

    def __init__(self, path: Path) -> None:
        parquet = _package("pyarrow.parquet", "datasets")
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except Exception as error:
            raise SourceError(f"{path} is not Parquet: {error}") from error
        groups = range(self._file.num_row_groups)
        self._sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._group, self._table = -1, None

    def __len__(self) -> int:
        return sum(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        rest, group = index % len(self), 0
        while rest >= self._sizes[group]:
            rest, group = rest - self._sizes[group], group + 1
        if group != self._group:
            self._group, self._table = group, self._file.read_row_group(group)
        table: Any = self._table
        row: Row = table.slice(rest, 1).to_pylist()[0]
        return row
