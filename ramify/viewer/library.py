"""Which runs and trainings there are, under the places that were named: the rows of the pages' lists.

A place is a store (a folder with ``runs/``), a journal, a file of trajectories, a folder of ``ramify train``, or a folder
that holds such. Everything is looked at anew when it is asked for, since files grow; what did not change is remembered.
Decides how a run is named in an address:

    20260301-142501-5gk0x7m-which-host      a run of the first store
    p2:20260301-…                           of the place with number 2
    p3/rollouts/step-000010.jsonl:7         line 7 of a file of trajectories under place 3

A file that cannot be read is a row that says why. Leaves out what a run's page shows (``watch.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.store.index import RunSummary, summarise
from ramify.store.journal import writer
from ramify.store.store import Store
from ramify.train.metrics import FILE as METRICS
from ramify.types.message import Usage
from ramify.types.trajectory import SCHEMA_VERSION, Stop

MAX_DEPTH = 4
"""Folders below a named one that are searched."""
MAX_FILES = 5_000
"""Of one place; what is left out is told."""
Kind = Literal["journal", "trajectory"]


class RunRow(msgspec.Struct, omit_defaults=True):
    """One line of the page's list of runs."""

    key: str
    """How its page is addressed."""
    id: str
    question: str = ""
    model: str = ""
    started_at: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    depth: int = 0
    num_calls: int = 0
    """Calls in the tree."""
    requests: int = 0
    """Sent to models."""
    tokens: int = 0
    """In and out."""
    cost: float | None = None
    """Dollars; None where no model had a price."""
    stop: str = ""
    """Empty while it runs, and where it was cut off."""
    reward: float | None = None
    """The first of its rewards, where it has any."""
    rewards: dict[str, float] = {}
    alive: bool = False
    source: str = ""
    """The file of trajectories that it is from; empty for a journal of the default store."""
    task: str = ""
    problem: str | None = None


class Found(NamedTuple):
    """Where one run is."""

    key: str
    path: Path
    line: int | None
    """Of a file of trajectories, from 1; None for a journal."""


class TrainingRow(msgspec.Struct, omit_defaults=True):
    """One folder of ``ramify train``."""

    key: str
    name: str
    folder: str


class Problem(msgspec.Struct):
    """A file or folder that was named or found, and why it is not shown."""

    path: str
    text: str


class _Place(NamedTuple):
    number: int
    path: Path
    store: Store | None


class _Glance(msgspec.Struct):
    """As much of a trajectory as its row needs; the decoder skips token ids and texts."""

    id: str
    question: str
    calls: list[_CallGlance]
    schema_version: int = SCHEMA_VERSION
    task: str = ""
    rewards: dict[str, float] = {}
    stop: Stop | None = None
    usage: Usage = Usage()
    cost: float | None = None
    seconds: float = 0.0
    started_at: float = 0.0


class _CallGlance(msgspec.Struct):
    model: str
    depth: int = 0


_glance = msgspec.json.Decoder(_Glance)
_Stamp = tuple[int, int]


class Library:
    """Runs and trainings under the places given; without any, the default store. ``runs`` is for one thread at a time."""

    def __init__(self, paths: Sequence[str | Path] = ()) -> None:
        """Raises ConfigError for a path that is not there."""
        self._places = [self._place(index, path) for index, path in enumerate(paths)]
        if not paths:
            store = Store()
            self._places = [_Place(0, store.root, store)]
        self._rows: dict[Path, tuple[_Stamp, list[RunRow]]] = {}
        self._problems: list[Problem] = []

    @staticmethod
    def _place(index: int, given: str | Path) -> _Place:
        path = Path(given).expanduser().resolve()
        if not path.exists():
            raise ConfigError(f"there is no file or folder {given}, and no run of that name")
        return _Place(index, path, Store(path) if (path / "runs").is_dir() and path.is_dir() else None)

    @property
    def places(self) -> list[str]:
        """What is shown, for the page's head."""
        return [str(place.path) for place in self._places]

    # --- lists ---------------------------------------------------------------------------------------------------

    def runs(self) -> tuple[list[RunRow], list[Problem]]:
        """Every run, newest first, those with a problem among them; and the files that are no runs at all."""
        self._problems = []
        rows = [row for place in self._places for row in self._runs_of(place)]
        return sorted(rows, key=lambda row: row.started_at, reverse=True), self._problems

    def trainings(self) -> list[TrainingRow]:
        """Every folder with metrics, in the order of the places."""
        return [
            TrainingRow(self._key(place, folder), folder.name, str(folder))
            for place in self._places
            for folder in _trainings_in(place)
        ]

    def _runs_of(self, place: _Place) -> Iterator[RunRow]:
        if place.store is not None:
            for summary in place.store.runs():
                yield _row_of_summary(summary, summary.id if place.number == 0 else f"p{place.number}:{summary.id}")
            return
        files = list(self._files(place))
        for path in files:
            try:
                yield from self._remembered(place, path)
            except OSError as error:
                self._problems.append(Problem(str(path), f"cannot be read: {error.strerror}"))
        if not files and not _trainings_in(place):
            self._problems.append(
                Problem(
                    str(place.path),
                    "holds no runs: give a store, a journal, a file of trajectories or a folder of ramify train",
                )
            )

    def _files(self, place: _Place) -> Iterator[Path]:
        if place.path.is_file():
            yield place.path
            return
        for number, path in enumerate(_walk(place.path, lambda name: name.endswith(".jsonl") and name != METRICS)):
            if number == MAX_FILES:
                self._problems.append(
                    Problem(str(place.path), f"has more than {MAX_FILES:,} files: name a folder below it")
                )
                return
            yield path

    def _remembered(self, place: _Place, path: Path) -> list[RunRow]:
        stat = path.stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
        known, rows = self._rows.get(path, (None, []))
        if known != stamp:
            rows = list(self._rows_of(place, path))
            self._rows[path] = (stamp, rows)
        for row in rows:
            row.alive = row.stop == "" and not row.problem and writer(path) is not None
        return rows

    def _rows_of(self, place: _Place, path: Path) -> Iterator[RunRow]:
        match kind_of(path):
            case "journal":
                summary = summarise(path)
                row = _row_of_summary(summary, self._key(place, path))
                row.source = str(path)
                yield row
            case "trajectory":
                for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                    yield _row_of_line(line, f"{self._key(place, path)}:{number}", path, number)
            case problem:
                yield RunRow(self._key(place, path), path.name, source=str(path), problem=problem)

    # --- one of them ---------------------------------------------------------------------------------------------

    def find(self, key: str) -> Found:
        """The run that ``key`` names. Raises StoreError where there is none."""
        place, rest, is_file = self._split(key)
        if place is None:
            raise StoreError(f"there is no run {key!r} here: the list has those that are")
        if not is_file:
            if place.store is None:
                raise StoreError(f"there is no run {key!r} in {place.path}")
            return Found(key, place.store.path(rest), None)
        name, colon, number = rest.rpartition(":")
        is_line = bool(colon) and number.isdigit()
        path = self._below(place, name if is_line else rest)
        return Found(key, path, int(number) if is_line else None)

    def training(self, key: str) -> Path:
        """The folder that ``key`` names. Raises StoreError where there is none."""
        place, rest, is_file = self._split(key)
        path = self._below(place, rest) if place is not None and is_file else None
        if path is None or not (path / METRICS).is_file():
            raise StoreError(f"there is no training {key!r} here: the list has those that are")
        return path

    def key_of(self, path: Path) -> str | None:
        """How ``path`` is addressed, where it lies under a place."""
        for place in self._places:
            if path.is_relative_to(place.path):
                return self._key(place, path)
        return None

    def _split(self, key: str) -> tuple[_Place | None, str, bool]:
        """(place, what of it, whether that is a path); ``p3/a.jsonl:7`` -> (place 3, ``a.jsonl:7``, True)."""
        head, colon, tail = key.partition(":")
        if colon and head[:1] == "p" and head[1:].isdigit() and "/" not in head:
            return self._numbered(head), tail, False
        head, slash, tail = key.partition("/")
        if slash and head[:1] == "p" and head[1:].isdigit():
            return self._numbered(head), tail, True
        return self._places[0], key, False

    def _numbered(self, head: str) -> _Place | None:
        number = int(head[1:])
        return self._places[number] if number < len(self._places) else None

    @staticmethod
    def _below(place: _Place, rest: str) -> Path:
        """Never outside of the place, whatever the address says."""
        path = (place.path / rest).resolve() if rest else place.path
        if not path.is_relative_to(place.path) or not path.exists():
            raise StoreError(f"there is no {rest!r} in {place.path}")
        return path

    @staticmethod
    def _key(place: _Place, path: Path) -> str:
        rest = path.relative_to(place.path).as_posix()
        return f"p{place.number}/{'' if rest == '.' else rest}"


def kind_of(path: Path) -> Kind | str:
    """What a file holds, by its first line; where it is neither, a sentence that says so."""
    with path.open("rb") as file:
        line = file.readline(1 << 26).strip()
    if line.startswith(b'{"type":"RunStarted"'):
        return "journal"
    if not line:
        return f"{path} is empty: not a run (yet)"
    try:
        first: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"{path} is not a run: its first line is not JSON"
    if isinstance(first, dict):
        if first.get("type") == "RunStarted":
            return "journal"
        if "calls" in first and "question" in first:
            return "trajectory"
        if first.get("type") in ("plan", "outcome"):
            return f"{path} is an evaluation's record: its figures are shown by ramify eval, its runs are in the store"
    return f"{path} is not a run: its first line is neither a RunStarted event nor a trajectory"


def _trainings_in(place: _Place) -> list[Path]:
    if place.path.is_file():
        return []
    return [path.parent for path in _walk(place.path, lambda name: name == METRICS)]


def _walk(folder: Path, wanted: Callable[[str], bool], depth: int = 0) -> Iterator[Path]:
    """Files below ``folder`` in order of name; checkpoints of a policy are not looked into."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            if (
                depth < MAX_DEPTH
                and entry.name not in ("checkpoints", "policy", "blobs", "reference")
                and not entry.is_symlink()
            ):
                yield from _walk(entry, wanted, depth + 1)
        elif wanted(entry.name):
            yield entry


def _row_of_summary(summary: RunSummary, key: str) -> RunRow:
    return RunRow(
        key, summary.id, summary.question, summary.model, summary.started_at, summary.seconds, summary.depth,
        summary.num_calls, summary.usage.calls, summary.usage.total_tokens, summary.cost, summary.stop or "",
        alive=summary.alive, problem=summary.problem,
    )  # fmt: skip


def _row_of_line(line: bytes, key: str, path: Path, number: int) -> RunRow:
    try:
        found = _glance.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return RunRow(
            key, f"{path.name}:{number}", source=str(path), problem=f"{path}, line {number} is damaged: {error}"
        )
    if found.schema_version > SCHEMA_VERSION:
        return RunRow(key, found.id, source=str(path), problem=newer(path, number, found.schema_version))
    return RunRow(
        key, found.id, found.question, found.calls[0].model if found.calls else "", found.started_at, found.seconds,
        max((call.depth for call in found.calls), default=0), len(found.calls), found.usage.calls,
        found.usage.total_tokens, found.cost, found.stop or "", next(iter(found.rewards.values()), None), found.rewards,
        source=str(path), task=found.task,
    )  # fmt: skip


def newer(path: Path, number: int, version: int) -> str:
    return (
        f"{path}, line {number} was written by a newer Ramify (schema {version}; this one reads up to {SCHEMA_VERSION}): "
        "pip install -U ramify"
    )
