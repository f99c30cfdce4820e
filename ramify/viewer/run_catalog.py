"""List the runs, training folders and evaluations that the viewer was asked to show.

They are in the places that were given to the viewer. A place is a folder, a file or a store.

A store is a folder with ``runs/``, or another ``RunStore``. A file may be a journal, a file of
trajectories, or the record of an evaluation. A folder may be one of ``ramify train``, or contain
any of these. Every request reads the places again, because files grow. The rows of unchanged files
are cached. An unreadable file has a row with the reason. run_lookup.py resolves addresses, and
watched_run.py and training_and_evaluation_pages.py make the pages.
"""

from __future__ import annotations

import copy
import functools
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.evaluate.evaluation_matrix import read_matrix
from ramify.evaluate.run_evaluation import read_evaluation
from ramify.store.base import RunStore
from ramify.store.durable_files import EVALUATIONS as EVALUATIONS
from ramify.store.durable_files import MATRIX
from ramify.store.folder_store import SETTLED_NS
from ramify.store.journal import FileStoredRun, find_writer_process
from ramify.store.reviews import HumanRunReview, Verdict, read_reviews_for_listing, review_file
from ramify.store.run_summary import MAX_ANSWER, RunSummary, summarise
from ramify.store.textless_events import TrajectoryOutline
from ramify.train.metrics import FILE as METRICS
from ramify.types.end_reason import describe_ending
from ramify.types.trajectory import SCHEMA_VERSION, answer_text, cut
from ramify.viewer.run_lookup import (
    LocatedRun,
    ViewerSource,
    ViewerSources,
    detect_file_kind,
    newer_schema_error,
    walk,
)


class RunListRow(msgspec.Struct, omit_defaults=True):
    """One run in the viewer's list of runs."""

    key: str
    """Address of the run's page."""
    id: str
    question: str = ""
    model: str = ""
    started_at: float = 0.0
    """Unix time in seconds."""
    seconds: float = 0.0
    depth: int = 0
    num_calls: int = 0
    """Number of calls in the tree."""
    requests: int = 0
    """Number of model requests."""
    tokens: int = 0
    """Number of input and output tokens together."""
    cost: float | None = None
    """Cost in dollars. None if no model had a known price."""
    stop: str = ""
    """Why the run stopped. Empty if it is in progress or was interrupted."""
    reward: float | None = None
    """The run's first reward, if any."""
    rewards: dict[str, float] = {}
    alive: bool = False
    source: str = ""
    """Path of the run's file. Empty for a run of a store."""
    task: str = ""
    problem: str | None = None
    answer: str | None = None
    """Beginning of the answer. None if the run has not answered."""
    ending: str = ""
    """One sentence on why the run ended."""
    labels: tuple[str, ...] = ()
    """Labels that reviewers gave to the run, and their verdict."""
    verdicts: dict[str, Verdict] = {}
    note: str = ""
    corrected: dict[str, float] = {}
    """Corrected scores by name. ``reward`` already includes the correction."""

    def apply_review(self, review: HumanRunReview) -> None:
        """Copy the labels, note and corrected scores of a human review into this row of the run
        list."""
        self.labels = review.labels_and_verdict
        self.verdicts, self.note, self.corrected = review.verdicts, review.note, review.rewards
        self.reward = next(iter({**self.rewards, **review.rewards}.values()), None)


class TrainingListRow(msgspec.Struct, omit_defaults=True):
    """One training folder (from ``ramify train``) in the viewer's list of training runs."""

    key: str
    name: str
    folder: str


class EvaluationListRow(msgspec.Struct, omit_defaults=True):
    """One evaluation record in the viewer's list of evaluations."""

    key: str
    name: str
    """Name of the record's file, which begins with the date."""
    model: str = ""
    task: str = ""
    split: str = ""
    items: int = 0
    attempts: int = 0
    """Number of planned attempts per item."""
    num_made: int = 0
    """Number of attempts made so far."""
    score: float | None = None
    """Mean reward of the attempts that have one."""
    cost: float | None = None
    problem: str | None = None


class EvalMatrixListRow(msgspec.Struct, omit_defaults=True):
    """One evaluation matrix (suites, models and modes) in the viewer's list of matrices."""

    key: str
    name: str
    """The matrix's id, which begins with the date. Each of its cells has a record whose name
    begins with this id.
    """
    suites: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    cells: int = 0
    planned: int = 0
    """Number of planned attempts."""
    problem: str | None = None


class UnreadableFileRow(msgspec.Struct):
    """A file or folder that cannot be shown, and the reason why."""

    path: str
    text: str


_trajectories = msgspec.json.Decoder(TrajectoryOutline)


def row_of_summary(summary: RunSummary, key: str) -> RunListRow:
    """Return the row of a stored run in the viewer's list of runs."""
    return RunListRow(
        key,
        summary.id,
        summary.question,
        summary.model,
        summary.started_at,
        summary.seconds,
        summary.depth,
        summary.num_calls,
        summary.usage.calls,
        summary.usage.total_tokens,
        summary.cost,
        summary.stop or "",
        next(iter(summary.rewards.values()), None),
        summary.rewards,
        alive=summary.alive,
        task=summary.task,
        problem=summary.problem,
        answer=summary.answer,
        ending=describe_ending(
            summary.stop,
            summary.reason,
            summary.root_turns,
            summary.alive,
            num_below=max(0, summary.num_calls - 1),
        ),
    )


def row_of_trajectory_line(line: bytes, key: str, path: Path, number: int) -> RunListRow:
    """Return the row for one line of a trajectory file in the viewer's list of runs.

    A damaged line gets a row that states the problem.
    """
    try:
        short = _trajectories.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RunListRow(
            key,
            f"{path.name}:{number}",
            source=str(path),
            problem=f"{path}, line {number} is damaged: {error}",
        )
    if short.schema_version > SCHEMA_VERSION:
        return RunListRow(
            key,
            short.id,
            source=str(path),
            problem=newer_schema_error(path, number, short.schema_version),
        )
    return RunListRow(
        key,
        short.id,
        short.question,
        short.calls[0].model if short.calls else "",
        short.started_at,
        short.seconds,
        max((call.depth for call in short.calls), default=0),
        len(short.calls),
        short.usage.calls,
        short.usage.total_tokens,
        short.cost,
        short.stop or "",
        next(iter(short.rewards.values()), None),
        short.rewards,
        source=str(path),
        task=short.task,
        answer=None if short.answer is None else cut(answer_text(short.answer), MAX_ANSWER),
        ending=describe_ending(
            short.stop,
            short.reason,
            len(short.calls[0].turns) if short.calls else 0,
            num_below=max(0, len(short.calls) - 1),
        ),
    )


def row_of_evaluation(path: Path, key: str) -> EvaluationListRow:
    """Return the list row of an evaluation record.

    An unreadable record gets a row that states the problem.
    """
    problems: list[str] = []
    try:
        record = read_evaluation(path, problems)
    except StoreError as error:
        return EvaluationListRow(key, path.stem, problem=str(error))
    rewards = [each.reward for each in record.outcomes if each.reward is not None]
    costs = [each.cost for each in record.outcomes if each.cost is not None]
    plan = record.plan
    return EvaluationListRow(
        key,
        path.stem,
        plan.model,
        plan.task,
        plan.split,
        plan.items,
        plan.attempts,
        len(record.outcomes),
        sum(rewards) / len(rewards) if rewards else None,
        sum(costs) if costs else None,
        problem=problems[0] if problems else None,
    )


@functools.lru_cache(1000)
def _row_of_matrix(path: Path, key: str) -> EvalMatrixListRow:
    """Return the row of an evaluation matrix in the viewer's list of matrices.

    It contains the axes and the planned number of attempts. The row is cached, because a matrix
    file never changes.
    """
    name = path.name.removesuffix(MATRIX)
    try:
        plan = read_matrix(path)
    except StoreError as error:
        return EvalMatrixListRow(key, name, problem=str(error))
    places = [cell.place for cell in plan.cells]
    suites, models, modes = (
        tuple(dict.fromkeys(place[axis] for place in places)) for axis in ("suite", "model", "mode")
    )
    planned = sum(cell.plan.items * cell.plan.attempts for cell in plan.cells)
    return EvalMatrixListRow(key, name, suites, models, modes, len(places), planned)


MAX_MAP_ROWS = 100_000
"""Maximum number of rows in the table of a map. A map asks one question about many rows."""
MAX_FILES = 20_000
"""Maximum number of files listed from one folder given to the viewer. If there are more, the list
says so."""
_Stamp = tuple[int, int]
_Rows = list[RunListRow | EvaluationListRow]


class RunCatalog:
    """A catalog of the runs, training folders and evaluations in the places given to the viewer.

    Without any place, the default store is used.

    Only one thread at a time may call ``listing``.
    """

    def __init__(self, places: Sequence[str | Path | RunStore] = ()) -> None:
        """Create a catalog of the given paths and stores.

        Raises ConfigError for a path that does not exist.
        """
        self._places = ViewerSources(places)
        self._rows: dict[Path, tuple[_Stamp, _Rows]] = {}
        self._stored: dict[int, tuple[object, list[RunListRow]]] = {}
        """For each viewer source, by number: the state of its store when it was last read, and the
        rows of its runs in that state."""
        self._trainings: dict[int, tuple[dict[Path, int], list[Path]]] = {}
        """For each viewer source, by number: the modification times of its folders, and the
        training folders found in it."""
        self._problems: list[UnreadableFileRow] = []
        self._reading_maps = threading.Lock()

    @property
    def location_names(self) -> list[str]:
        """The paths or names of the folders, files and stores given to the viewer, shown at the top
        of the page."""
        return [str(place) for place in self._places]

    # --- lists

    def listing(self) -> tuple[list[RunListRow], list[EvaluationListRow], list[UnreadableFileRow]]:
        """Return all runs and all evaluations, newest first, and the unreadable files.

        A run or evaluation with a problem has a normal row whose field ``problem`` describes it.
        Rows are never modified, so an identical object in a later listing means that the row is
        unchanged.
        """
        self._problems = []
        rows = [row for place in self._places for row in self._rows_in(place)]
        runs = [row for row in rows if isinstance(row, RunListRow)]
        evaluations = [row for row in rows if isinstance(row, EvaluationListRow)]
        runs.sort(key=lambda row: row.started_at, reverse=True)
        evaluations.sort(key=lambda row: row.name, reverse=True)
        return runs, evaluations, self._problems

    def runs(self) -> list[RunListRow]:
        return self.listing()[0]

    def trainings(self) -> list[TrainingListRow]:
        """Return a table row for each training folder, in the order of the places given to the
        viewer.

        A training folder is a folder with a metrics file.
        """
        return [
            TrainingListRow(place.key_of_path(folder), folder.name, str(folder))
            for place in self._places
            for folder in self._trainings_in(place)
        ]

    def _trainings_in(self, place: ViewerSource) -> list[Path]:
        """Return the training folders below ``place``, one of the places given to the viewer.

        The result is cached until one of the folders changes.
        """
        if place.path is None or place.path.is_file():
            return []
        times, found = self._trainings.get(place.number, ({}, []))
        if not times or any(_changed_at(folder) != time for folder, time in times.items()):
            folders: list[Path] = []
            begun = time.time_ns()
            paths = walk(place.path, lambda name: name == METRICS, folders=folders)
            found = [path.parent for path in paths]
            times = {folder: _changed_at(folder) for folder in folders}
            # A later change within the same time stamp would not be noticed: do not cache yet.
            if all(begun - at > SETTLED_NS for at in times.values()):
                self._trainings[place.number] = times, found
        return found

    def matrices(self) -> list[EvalMatrixListRow]:
        """Return the rows of all evaluation matrices, newest first."""
        rows = []
        for place in self._places:
            if place.path is None:
                continue
            found = (
                (place.path / EVALUATIONS).glob(f"*{MATRIX}")
                if place.store is not None
                else walk(place.path, lambda name: name.endswith(MATRIX), self._note_unreadable)
            )
            rows += [_row_of_matrix(path, place.key_of_path(path)) for path in found]
        return sorted(rows, key=lambda row: row.name, reverse=True)

    def _rows_in(self, place: ViewerSource) -> Iterator[RunListRow | EvaluationListRow]:
        files: list[Path] = []
        if place.store is not None:
            yield from self._stored_rows(place, place.store)
            if place.path is not None:
                files = sorted((place.path / EVALUATIONS).glob("*.jsonl"))
        elif place.path is not None:
            files = list(self._files(place, place.path))
            if not files and not self._trainings_in(place):
                self._problems.append(
                    UnreadableFileRow(
                        str(place),
                        "contains no runs: give a store, a journal, a file of trajectories, an "
                        "evaluation's record or a folder of ramify train",
                    )
                )
        for path in files:
            try:
                yield from self._cached_rows(place, path)
            except OSError as error:
                self._note_unreadable(path, error)

    def _stored_rows(self, place: ViewerSource, store: RunStore) -> list[RunListRow]:
        state = store.listing_state()  # before the runs: a change in between is seen next time
        known, rows = self._stored.get(place.number, (None, []))
        if state is None or state != known:
            rows = []
            for summary in store.runs():
                row = row_of_summary(summary, place.key_of_run(summary.id))
                if summary.review is not None:
                    row.apply_review(summary.review)
                rows.append(row)
            self._stored[place.number] = state, rows
        return rows

    def _files(self, place: ViewerSource, folder: Path) -> Iterator[Path]:
        if folder.is_file():
            yield folder
            return
        paths = walk(
            folder, lambda name: name.endswith(".jsonl") and name != METRICS, self._note_unreadable
        )
        own: dict[Path, bool] = {}  # folder -> whether its files are those of a training run
        for number, path in enumerate(paths):
            if own.setdefault(path.parent, (path.parent / METRICS).is_file()):
                continue
            if number == MAX_FILES:
                text = f"has more than {MAX_FILES:,} files: give one of its subfolders"
                self._problems.append(UnreadableFileRow(str(place), text))
                return
            yield path

    def _note_unreadable(self, path: Path, error: OSError) -> None:
        self._problems.append(
            UnreadableFileRow(str(path), f"cannot be read: {error.strerror or error}")
        )

    def _cached_rows(self, place: ViewerSource, path: Path) -> _Rows:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        stamp = (status.st_size, status.st_mtime_ns)
        cached_stamp, rows = self._rows.get(path, (None, []))
        if cached_stamp != stamp:
            rows = list(_rows_of(place.key_of_path(path), path))
            self._rows[path] = (stamp, rows)
        reviews = read_reviews_for_listing(path) if review_file(path).exists() else None
        is_written = (
            any(_may_be_alive(row) for row in rows) and find_writer_process(path) is not None
        )
        for index, row in enumerate(rows):
            if isinstance(row, RunListRow):
                # Rows that were returned before must not change.
                now = copy.copy(row)
                if reviews is not None or row.labels or row.note or row.corrected:
                    now.apply_review(reviews[row.id] if reviews is not None else HumanRunReview())
                now.alive = is_written and _may_be_alive(row)
                if now != row:
                    rows[index] = now
        return rows

    def map_summaries(self) -> list[dict[str, Any]]:
        """Return summaries of all stored maps, newest first.

        Each contains the address of the map's page. A map is one question asked about many rows.
        """
        with self._reading_maps:
            rows = [
                {"key": place.key_of_run(table.id), **msgspec.structs.asdict(table.summary())}
                for place, table in self._places.stored_maps()
            ]
        return sorted(rows, key=lambda row: -row["started_at"])

    def map_detail(self, key: str) -> dict[str, Any]:
        """Return the summary and the rows of the map (one question asked about many rows) at
        address ``key``.

        Each row has the address of its run, or an empty string. Raises StoreError if the map does
        not exist.
        """
        with self._reading_maps:
            place, table = self._places.find_map(key)
            rows = [
                {
                    **msgspec.structs.asdict(row),
                    "state": row.state,
                    "key": (
                        place.key_of_run(row.run or f"{table.id}:{row.number}")
                        if table.has_runs
                        else ""
                    ),
                }
                for row in table.question_rows[:MAX_MAP_ROWS]
            ]
            figures = msgspec.structs.asdict(table.summary())
        return {"key": key, **figures, "shown": rows}

    # --- single entries

    def find(self, key: str) -> LocatedRun:
        """Find the run with address ``key``.

        Raises StoreError if it does not exist.
        """
        return self._places.find_run(key)

    def find_training_folder(self, key: str) -> Path:
        """Find the training folder with address ``key``.

        Raises StoreError if it does not exist.
        """
        path = self._places.path(key)
        if path is None or not (path / METRICS).is_file():
            raise StoreError(f"unknown training {key!r}: choose one from the list")
        return path

    def find_evaluation_path(self, key: str) -> Path:
        """Find the evaluation record with address ``key``, and return its path.

        Raises StoreError if it does not exist.
        """
        path = self._places.path(key)
        if path is None or not path.is_file():
            raise StoreError(f"unknown evaluation {key!r}: choose one from the list")
        return path

    def key_of_path(self, path: Path) -> str | None:
        """Return the address of the file or folder ``path``.

        Returns None if it is outside the given places.
        """
        return self._places.key_of_path(path)

    def key_of_stored_run(self, store: RunStore, id: str) -> str | None:
        """Return the address of the run ``id`` in ``store``.

        Returns None if the catalog does not have this store.
        """
        return self._places.key_of_run(store, id)

    def key_of_evaluation_run(self, record: Path, id: str) -> str | None:
        """Return the address of a run that belongs to an evaluation.

        The run is in the same store as ``record``, the evaluation's file. Returns None if the run
        is missing.
        """
        path = record.parent.parent / "runs" / f"{id}.jsonl"
        return self.key_of_path(path) if id and path.is_file() else None


def _rows_of(key: str, path: Path) -> Iterator[RunListRow | EvaluationListRow]:
    match detect_file_kind(path):
        case "journal":
            row = row_of_summary(summarise(FileStoredRun(path)), key)
            row.source = str(path)
            yield row
        case "trajectory":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield row_of_trajectory_line(line, f"{key}:{number}", path, number)
        case "evaluation":
            yield row_of_evaluation(path, key)
        case problem:
            yield RunListRow(key, path.name, source=str(path), problem=problem)


def _may_be_alive(row: RunListRow | EvaluationListRow) -> bool:
    return isinstance(row, RunListRow) and row.stop == "" and not row.problem


def _changed_at(folder: Path) -> int:
    """Return the time in nanoseconds when an entry was last added to or removed from a folder.

    Returns 0 if the folder cannot be read.
    """
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
