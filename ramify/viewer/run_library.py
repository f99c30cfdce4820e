"""Which runs, trainings and evaluations there are, in the places that were named: the rows of the
pages' lists.

A place is a store (a folder with ``runs/``), a journal, a file of trajectories, an evaluation's
record, a folder of ``ramify train``, or a folder that holds such. Everything is looked at anew when
it is asked for, since files grow; what did not change is remembered. A file that cannot be read is
a row that says why. Leaves out addresses (``run_locations.py``) and what the page of one shows
(``watched_run.py``, ``training.py``, ``evaluation.py``).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from ramify.errors import StoreError
from ramify.store.index import summarise
from ramify.store.journal import writer
from ramify.store.private_files import EVALUATIONS as EVALUATIONS
from ramify.train.metrics import FILE as METRICS
from ramify.viewer.listing_rows import (
    EvaluationRow,
    RunRow,
    TrainingRow,
    UnreadableRow,
    row_of_evaluation,
    row_of_line,
    row_of_summary,
)
from ramify.viewer.run_kinds import LocatedRun, kind_of
from ramify.viewer.run_locations import RunLocation, RunLocations, walk

MAX_FILES = 5_000
"""Of one place; what is left out is told."""
_Stamp = tuple[int, int]
_Rows = list[RunRow | EvaluationRow]


class RunLibrary:
    """What is in the places given; without any, in the default store. ``look`` is for one thread at
    a time."""

    def __init__(self, paths: Sequence[str | Path] = ()) -> None:
        """Raises ConfigError for a path that is not there."""
        self._places = RunLocations(paths)
        self._rows: dict[Path, tuple[_Stamp, _Rows]] = {}
        self._problems: list[UnreadableRow] = []

    @property
    def places(self) -> list[str]:
        """What is shown, for the page's head."""
        return [str(place.path) for place in self._places]

    # --- lists
    # ---------------------------------------------------------------------------------------------------

    def look(self) -> tuple[list[RunRow], list[EvaluationRow], list[UnreadableRow]]:
        """Every run and every evaluation, newest first, those with a problem among them; and what
        is neither."""
        self._problems = []
        rows = [row for place in self._places for row in self._rows_in(place)]
        runs = [row for row in rows if isinstance(row, RunRow)]
        evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
        runs.sort(key=lambda row: row.started_at, reverse=True)
        evaluations.sort(key=lambda row: row.name, reverse=True)
        return runs, evaluations, self._problems

    def runs(self) -> list[RunRow]:
        return self.look()[0]

    def trainings(self) -> list[TrainingRow]:
        """Every folder with metrics, in the order of the places."""
        return [
            TrainingRow(place.key(folder), folder.name, str(folder))
            for place in self._places
            for folder in _trainings_in(place)
        ]

    def _rows_in(self, place: RunLocation) -> Iterator[RunRow | EvaluationRow]:
        if place.store is not None:
            for summary in place.store.runs():
                yield row_of_summary(
                    summary, place.key(place.path / "runs" / f"{summary.id}.jsonl")
                )
            files = sorted((place.path / EVALUATIONS).glob("*.jsonl"))
        else:
            files = list(self._files(place))
            if not files and not _trainings_in(place):
                what = "a store, a journal, a file of trajectories, an evaluation's record or a folder of ramify train"
                self._problems.append(UnreadableRow(str(place.path), f"holds no runs: give {what}"))
        for path in files:
            try:
                yield from self._remembered(place, path)
            except OSError as error:
                self._failed(path, error)

    def _files(self, place: RunLocation) -> Iterator[Path]:
        if place.path.is_file():
            yield place.path
            return
        found = walk(
            place.path, lambda name: name.endswith(".jsonl") and name != METRICS, self._failed
        )
        for number, path in enumerate(found):
            if number == MAX_FILES:
                text = f"has more than {MAX_FILES:,} files: name a folder below it"
                self._problems.append(UnreadableRow(str(place.path), text))
                return
            yield path

    def _failed(self, path: Path, error: OSError) -> None:
        self._problems.append(
            UnreadableRow(str(path), f"cannot be read: {error.strerror or error}")
        )

    def _remembered(self, place: RunLocation, path: Path) -> _Rows:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        stamp = (status.st_size, status.st_mtime_ns)
        known, rows = self._rows.get(path, (None, []))
        if known != stamp:
            rows = list(_rows_of(place.key(path), path))
            self._rows[path] = (stamp, rows)
        for row in rows:
            if isinstance(row, RunRow):
                row.alive = row.stop == "" and not row.problem and writer(path) is not None
        return rows

    # --- one of them
    # ---------------------------------------------------------------------------------------------

    def find(self, key: str) -> LocatedRun:
        """The run that ``key`` names. Raises StoreError where there is none."""
        return self._places.run(key)

    def training(self, key: str) -> Path:
        """The folder that ``key`` names. Raises StoreError where there is none."""
        path = self._places.path(key)
        if path is None or not (path / METRICS).is_file():
            raise StoreError(f"there is no training {key!r} here: the list has those that are")
        return path

    def evaluation(self, key: str) -> Path:
        """The record that ``key`` names. Raises StoreError where there is none."""
        path = self._places.path(key)
        if path is None or not path.is_file():
            raise StoreError(f"there is no evaluation {key!r} here: the list has those that are")
        return path

    def key_of(self, path: Path) -> str | None:
        """How ``path`` is addressed, where it lies in a place."""
        return self._places.key(path)

    def key_of_run(self, record: Path, id: str) -> str | None:
        """How run ``id`` is addressed that an evaluation's record in the same store names; None
        where it is not there."""
        path = record.parent.parent / "runs" / f"{id}.jsonl"
        return self.key_of(path) if id and path.is_file() else None


def _rows_of(key: str, path: Path) -> Iterator[RunRow | EvaluationRow]:
    match kind_of(path):
        case "journal":
            row = row_of_summary(summarise(path), key)
            row.source = str(path)
            yield row
        case "trajectory":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield row_of_line(line, f"{key}:{number}", path, number)
        case "evaluation":
            yield row_of_evaluation(path, key)
        case problem:
            yield RunRow(key, path.name, source=str(path), problem=problem)


def _trainings_in(place: RunLocation) -> list[Path]:
    if place.path.is_file():
        return []
    return [path.parent for path in walk(place.path, lambda name: name == METRICS)]
