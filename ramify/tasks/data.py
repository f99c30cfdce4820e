"""Creates tasks from datasets: JSONL or Parquet files, Hugging Face ``datasets``, or lists of rows.

    dataset("questions.jsonl", question="q", gold="a")                   divided 80 : 10 : 10
    dataset({"train": "train.jsonl", "test": "test.parquet"}, context="document", reward="f1")
    dataset("hf:openai/gsm8k:main", gold="answer", reward="last_number")     its own splits
    dataset("train.parquet")                     columns of TRL, verifiers, prime-rl, SkyRL or verl
    dataset(rows, item=lambda row: Item(row["q"], gold=row["a"]), reward=lambda answer, item: …)

Columns are selected by name. An error names the file, the row and the column. A single source
without splits is divided by a hash of question and context: a row stays in its split when other
rows are added, and the same question is never in two splits. Rows are read on access.

The prompt around a question is written by ``engine/prompt_scaffold.py``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, SourceError
from ramify.format_quantities import pluralize
from ramify.logging import ComponentLogger
from ramify.pip_install_command import install_command
from ramify.tasks.base import (
    DATA_SUFFIXES,
    SPLITS,
    AnswerReward,
    DatasetTask,
    Item,
    LazySequence,
    TrajectoryRewardFunction,
)
from ramify.tasks.scoring import SCORERS
from ramify.tasks.scoring.batched import BatchedReward

_log = ComponentLogger("tasks")
Row = Mapping[str, Any]
Source = Any
"""A path to ``.jsonl`` or ``.parquet``, ``hf:NAME`` or ``hf:NAME:CONFIG``, a sequence of mappings,
or a loaded ``datasets.Dataset`` or ``DatasetDict``."""
_QUESTIONS = ("question", "prompt", "messages", "problem", "instruction")
_GOLDS = ("answer", "ground_truth", "solution", "target")
_METADATA = ("info", "extra_info", "data_source")
"""Metadata columns that datasets for other libraries use, in the order in which they are tried."""
_SHARE = 0.1
"""Share of the rows for each split except the first, if one source is divided into splits."""
_CONFLICT = "with the question of an earlier row but another gold answer"
_COPY = "equal to an earlier row"
_NUM_COMPARED_ROWS = 100
"""Number of rows among which an error about a missing column looks for one that has it."""
_ROW_FORM = "every line must be an object"
_HF_NAMES = {"dev": "validation", "valid": "validation", "val": "validation"}


class DatasetColumns(msgspec.Struct, frozen=True):
    """The names of the dataset columns that provide the fields of task items.

    Example:
        DatasetColumns(question="q", gold="a", context=("log", "notes"))
    """

    question: str = ""
    """Column with the question: a text, or messages of which the last is the user's. If empty, the
    first of ``question``, ``prompt``, ``messages``, ``problem`` and ``instruction`` that exists."""
    gold: str | None = ""
    """Column with the right answer, or None if the rows have none. If empty, the first of
    ``answer``, ``ground_truth``, ``solution``, ``target`` and ``reward_model.ground_truth`` that
    exists."""
    context: str | tuple[str, ...] | None = None
    """Column with the context, or None if the rows have none. If several columns are given, the
    context is a dict of their values."""
    kind: str | None = None
    metadata: tuple[str, ...] = ()
    """Additional columns to keep in the items' metadata for the score function, e.g. ``choices``
    for ``choice``. ``info``, ``extra_info`` and ``data_source`` are kept automatically if the rows
    have them."""

    def item(self, row: Row) -> Item:
        """Convert a table row of the dataset to a task item.

        Raises KeyError if a column is missing and TypeError if a value has the wrong type.
        """
        asked = self.question or _first_of(_QUESTIONS, row)
        question = row[asked]
        messages: Sequence[Any] = ()
        if isinstance(question, list | tuple) and question:
            messages, question = question, ""
        elif not isinstance(question, str) or not question.strip():
            raise TypeError(
                f"column '{asked}' is {question!r:.60}: a question must be a string or a list of "
                "messages"
            )
        gold = self._gold(row)
        is_choice = isinstance(gold, list | tuple) and len(gold)
        context: Any = None
        if isinstance(self.context, tuple):
            context = {name: row[name] for name in self.context}
        elif self.context is not None:
            context = row[self.context]
        named = dict.fromkeys((*self.metadata, *(name for name in _METADATA if name in row)))
        return Item(
            question,
            context,
            gold,
            str(row[self.kind]) if self.kind is not None else "",
            right=gold[0] if is_choice else None,
            metadata={name: row[name] for name in named},
            messages=tuple(messages),
        )

    def _gold(self, row: Row) -> Any:
        if self.gold is None:
            return None
        found = row.get("reward_spec", row.get("reward_model"))
        if not self.gold and isinstance(found, Mapping) and "ground_truth" in found:
            name, gold = "ground_truth", found["ground_truth"]
        else:
            name = self.gold or _first_of(_GOLDS, row)
            gold = row[name]
        if gold is None:
            raise TypeError(
                f"column '{name}' is empty; every row needs a gold answer, or give gold=None"
            )
        return gold


def _first_of(names: Sequence[str], row: Row) -> str:
    """Return the first of several possible column names that a dataset row contains.

    If none is, return the first name.
    """
    return next((name for name in names if name in row), names[0])


def dataset(
    source: Source,
    *,
    question: str = "",
    gold: str | None = "",
    context: str | Sequence[str] | None = None,
    kind: str | None = None,
    metadata: Sequence[str] = (),
    item: Callable[[Row], Item] | None = None,
    reward: str | AnswerReward | TrajectoryRewardFunction = "exact",
    weights: Mapping[str, float] = {},
    name: str = "",
) -> DatasetTask:
    """Return a task whose items are the rows of ``source``.

    ``question`` and ``gold`` are the columns of the question and of the right answer; without them,
    the columns of common datasets are recognised (see ``DatasetColumns``). ``item`` converts a row
    to an item and replaces the column names. ``reward`` is the name of a score in ``scoring``, or a
    function that takes an answer and an item, or the location of one, such as ``file.py:name``.
    ``weights`` are those of its named rewards in their sum; a reward without a weight has 1. With
    ``gold=None`` the rows have no right answer, and ``reward`` must be a function that does not
    need one.

    Raises ConfigError for invalid options and SourceError for an unreadable source. A malformed row
    raises when it is accessed.

    >>> rows = [{"q": "Who failed first?", "a": "web-3"}]
    >>> test = tasks.dataset({"test": rows}, question="q", gold="a").splits["test"]
    >>> test[0].gold
    'web-3'
    """
    if gold is None and item is None and isinstance(reward, str) and reward in SCORERS.ours:
        raise ConfigError(
            f"dataset with gold=None and reward='{reward}', which compares with a gold answer: "
            "give a function of (answer, item), in a configuration as file.py:name, or name the "
            "column with the gold answers"
        )
    several = context if isinstance(context, str) or context is None else tuple(context)
    columns = DatasetColumns(question, gold, several, kind, tuple(metadata))
    name = name or _name_of(source)
    make = item or columns.item
    sources = _rows_by_split(source)
    splits: dict[str, Sequence[Item]]
    if len(sources) == 1 and "" in sources:
        rows = sources[""]
        splits = {
            split: DatasetItems(f"{name}/{split}", rows, make, numbers)
            for split, numbers in _divide_rows(name, rows, make, SPLITS).items()
            if numbers
        }
    else:
        splits = {
            split: DatasetItems(f"{name}/{split}", rows, make) for split, rows in sources.items()
        }
        missing = [split for split in SPLITS if split not in sources]
        if "train" in sources and missing:
            # Only on access, since an evaluation may need the test split alone.
            rows, parts = sources["train"], ("train", *missing)
            divided = functools.cache(lambda: _divide_rows(name, rows, make, parts))
            splits |= {
                split: DatasetItems(
                    f"{name}/{split}", rows, make, partial(_rows_of_split, divided, split)
                )
                for split in parts
            }
    return DatasetTask(name, splits, resolve_scorer(reward), weights)


def resolve_scorer(
    reward: str | AnswerReward | TrajectoryRewardFunction,
) -> AnswerReward | TrajectoryRewardFunction:
    """Return the scoring function called ``reward``.

    Raises ConfigError for an unknown name.

    A function is returned unchanged, except that one with a parameter ``completions`` becomes a
    ``BatchedReward``.
    """
    scorer: Any = SCORERS.resolve(reward) if isinstance(reward, str) else reward
    if inspect.isfunction(scorer) and "completions" in inspect.signature(scorer).parameters:
        return BatchedReward(scorer)
    found: AnswerReward | TrajectoryRewardFunction = scorer
    return found


class DatasetItems(LazySequence[Item]):
    """A sequence of task items that are made from the rows of a dataset.

    Each is converted from its dataset row when it is accessed.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Row],
        make: Callable[[Row], Item],
        indices: Sequence[int] | Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Create the sequence of task items of the dataset ``name``.

        The function ``make`` converts a row to an item.

        ``indices`` selects rows. If it is a function, it returns the selection and is called on the
        first access. None selects all rows.
        """
        self._name = name
        self._rows = rows
        self._make = make
        self._selected = indices

    @functools.cached_property
    def _indices(self) -> Sequence[int]:
        if self._selected is None:
            return range(len(self._rows))
        return self._selected() if callable(self._selected) else self._selected

    def select(self, name: str, places: Sequence[int]) -> DatasetItems:
        """Return a selection of these task items as a new dataset split called ``name``.

        Their ids still contain the original row numbers.
        """
        return DatasetItems(
            name, self._rows, self._make, [self._indices[place] for place in places]
        )

    def __len__(self) -> int:
        return len(self._indices)

    def at(self, index: int) -> Item:
        number = self._indices[index]
        item = _item(self._name, self._rows, number, self._make)
        return msgspec.structs.replace(item, id=f"{self._name}/{number}")


def _item(name: str, rows: Sequence[Row], number: int, make: Callable[[Row], Item]) -> Item:
    """Convert the dataset's table row ``number`` to a task item.

    Raises ConfigError, which names the row, on failure.
    """
    row = rows[number]
    where = row_location(rows, number, name)
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: it is a {type(row).__name__}; each row must be a mapping")
    try:
        return make(row)
    except KeyError as error:
        columns = f"it has no column {error}; its columns are {', '.join(map(str, row))}"
        raise ConfigError(f"{where}: {columns}; {_column_advice(name, rows, row, make)}") from None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _column_advice(name: str, rows: Sequence[Row], wrong: Row, make: Callable[[Row], Item]) -> str:
    """Return the advice for a table row that lacks a column.

    Only this row is at fault if another row, one of the first few, converts to an item.
    """
    for number in range(min(len(rows), _NUM_COMPARED_ROWS)):
        with contextlib.suppress(Exception):  # another row may be at fault, too
            row = rows[number]
            make(row)
            lacking = " and ".join(f"'{column}'" for column in row if column not in wrong)
            where = row_location(rows, number, name)
            if lacking:
                return f"{where} has {lacking}: complete this row or remove it"
    return "name yours with the options question=… and gold=…"


def _divide_rows(
    name: str, rows: Sequence[Row], make: Callable[[Row], Item], splits: Sequence[str]
) -> dict[str, list[int]]:
    """Divide the table rows of a dataset among several splits, and return the row numbers of each.

    A hash of question and context decides the split of a row, so equal questions stay together.
    Each split but the first gets a tenth of the hashes, and the first gets the rest. A split that
    would be empty gets the question with the largest hash from the largest split.
    """
    same: dict[bytes, list[int]] = {}
    repeats = _RepeatedQuestions()
    for number in range(len(rows)):
        item = _item(name, rows, number, make)
        asked = (item.question, item.context, *([item.messages] if item.messages else []))
        try:
            text = msgspec.json.encode(asked, enc_hook=str)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{row_location(rows, number, name)}: the text is not valid Unicode (half of a "
                f"surrogate pair): {error}"
            ) from None
        digest = hashlib.sha256(text).digest()
        same.setdefault(digest[:8], []).append(number)
        repeats.add(digest[:8], number, item)
    repeats.report(name, rows)
    divided: dict[str, list[bytes]] = {split: [] for split in splits}
    for digest in sorted(same):
        share = int.from_bytes(digest, "big") / 2**64 - (1 - _SHARE * (len(splits) - 1))
        place = 0 if share < 0 else min(1 + int(share / _SHARE), len(splits) - 1)
        divided[splits[place]].append(digest)
    for empty in [split for split in splits if not divided[split]]:
        largest = max(divided.values(), key=len)
        if len(largest) > 1:
            divided[empty].append(largest.pop())
    return {
        split: sorted(number for digest in digests for number in same[digest])
        for split, digests in divided.items()
    }


class _RepeatedQuestions:
    """Counts the table rows of a dataset whose question and context occur in an earlier row.

    Rows with the same gold answer that differ in metadata are not counted, since a score may use
    the metadata.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[int, int, int]] = {}
        """Number of each question's first row, and hashes of its gold answer and of all else."""
        self._found: dict[str, list[tuple[int, int]]] = {}

    def add(self, question: bytes, number: int, item: Item) -> None:
        """Compare a row with the first one that has the same question and context."""
        gold, rest = hash(repr(item.gold)), hash(repr((item.kind, item.metadata)))
        first, first_gold, first_rest = self._first.setdefault(question, (number, gold, rest))
        if gold != first_gold:
            self._found.setdefault(_CONFLICT, []).append((first, number))
        elif rest == first_rest and number != first:
            self._found.setdefault(_COPY, []).append((first, number))

    def report(self, name: str, rows: Sequence[Row]) -> None:
        """Log one warning with the number of rows of both kinds and an example of each."""
        found = [
            f"{pluralize(len(pairs), 'row')} {what} (first: {row_location(rows, second, name)}, "
            f"like {row_location(rows, first, name).rpartition(', ')[2]})"
            for what, pairs in sorted(self._found.items())
            for first, second in pairs[:1]
        ]
        if found:
            text = f"task '{name}' has {' and '.join(found)}"
            _log.warning("repeated_questions", text, shown=True)


def _rows_of_split(divided: Callable[[], Mapping[str, Sequence[int]]], split: str) -> Sequence[int]:
    return divided()[split]


# --- sources of rows ------------------------------------------------------------------------------


def _rows_by_split(source: Source) -> dict[str, Sequence[Row]]:
    """Return the table rows of each split of a dataset, by the name of the split.

    A single source without splits has the name "".
    """
    if isinstance(source, str) and source.startswith("hf:"):
        source = _hugging_face(source)
    if isinstance(source, Mapping):  # also a DatasetDict
        if not source:
            raise ConfigError(
                "a dataset needs a source for at least one split, as in {'test': 'questions.jsonl'}"
            )
        return {
            _HF_NAMES.get(str(split), str(split)): rows_of(part, f", split '{split}'")
            for split, part in source.items()
        }
    return {"": rows_of(source)}


def rows_of(source: Source, where: str = "") -> Sequence[Row]:
    """Return the rows of one file or list, which are read lazily.

    Raises ConfigError or SourceError, whose message names the source as ``where``.
    """
    rows: Any
    if isinstance(source, str) and source.startswith("hf:"):
        rows = _hugging_face(source)
        if isinstance(rows, Mapping):  # a DatasetDict
            if "train" not in rows:
                raise SourceError(f"{source} has no split 'train', only {', '.join(rows)}")
            rows = rows["train"]
    elif isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.suffix not in DATA_SUFFIXES:
            raise ConfigError(
                f"{path}: rows are read from {' and '.join(DATA_SUFFIXES)}, and from hf:NAME"
            )
        if not path.is_file():
            raise SourceError(f"file {path} does not exist")
        rows = JsonlRows(path) if path.suffix == ".jsonl" else ParquetRows(path)
    else:
        rows = source
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"a {type(rows).__name__} is not a dataset: give a file, hf:NAME, or a list of rows"
        )
    if len(rows) == 0:
        named = str(source) if isinstance(source, str | Path) else _name_of(source)
        raise SourceError(f"{named}{where}: it has no rows")
    checked: Sequence[Row] = rows
    return checked


def row_location(rows: Sequence[Row], number: int, name: str) -> str:
    """Return the location of a dataset row for error messages, such as ``rows.jsonl, line 3``.

    Lines of a JSONL file count from 1. For other sources the result is ``NAME, row 2``, with rows
    counted from 0. ``name`` is that of the source.
    """
    return rows.row_location(number) if isinstance(rows, JsonlRows) else f"{name}, row {number}"


def _hugging_face(name: str) -> Any:
    _, repository, *config = name.split(":")
    load_dataset = _import_package("datasets", "datasets").load_dataset
    try:
        return load_dataset(repository, *config)
    except Exception as error:
        raise SourceError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def _import_package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"this needs {module.partition('.')[0]}: {install_command(extra)}"
        ) from None


def _name_of(source: Source) -> str:
    if isinstance(source, str | Path):
        return Path(str(source).removeprefix("hf:").partition(":")[0]).stem
    if isinstance(source, Mapping) and source:
        return _name_of(next(iter(source.values())))
    return "dataset"


class JsonlRows(LazySequence[Row]):
    """The objects of a JSONL file as a sequence.

    Blank lines are ignored.

    The start of each line is found once, and a line is decoded when it is accessed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = [(number, start, size) for number, start, size in _line_positions(path)]

    def __len__(self) -> int:
        return len(self._lines)

    def row_location(self, index: int) -> str:
        """Return the location of a row for error messages, such as ``rows.jsonl, line 3``."""
        return f"{self._path}, line {self._lines[index][0]}"

    def at(self, index: int) -> Row:
        _, start, size = self._lines[index]
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(size)
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem: object = error
            kind = {b"[": "list", b"{": "object"}.get(line.lstrip()[:1])
            if kind and "truncated" in str(error):  # an indented file, or one that was cut off
                problem = f"the {kind} does not end in this line; {_ROW_FORM}"
            raise SourceError(f"{self.row_location(index)}: not JSON: {problem}") from None
        if not isinstance(row, dict):
            raise SourceError(f"{self.row_location(index)}: a {type(row).__name__}; {_ROW_FORM}")
        return row


def _line_positions(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield the line number, byte offset and length of each line of a JSONL file that is not blank.

    Line numbers start at 1.
    """
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                mark = len(BOM_UTF8) if number == 1 and line.startswith(BOM_UTF8) else 0
                if line[mark:].strip():
                    yield number, start + mark, len(line) - mark
                start += len(line)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


class ParquetRows(LazySequence[Row]):
    """The rows of a Parquet file as a sequence.

    Only one row group is in memory at a time.
    """

    def __init__(self, path: Path) -> None:
        parquet = _import_package("pyarrow.parquet", "datasets")
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except Exception as error:
            raise SourceError(f"{path} is not Parquet: {error}") from error
        groups = range(self._file.num_row_groups)
        self._sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._group = -1
        self._table = None

    def __len__(self) -> int:
        return sum(self._sizes)

    def at(self, index: int) -> Row:
        offset, group = index, 0
        while offset >= self._sizes[group]:
            offset, group = offset - self._sizes[group], group + 1
        if group != self._group:
            self._group, self._table = group, self._file.read_row_group(group)
        table: Any = self._table
        row: Row = table.slice(offset, 1).to_pylist()[0]
        return row
