"""Plan a matrix: one evaluation per combination of suite, length, model, mode and scaffold.

A suite is a benchmark task; each of its families of questions is evaluated separately. A scaffold
is the set of prompts for the model.

    EvalMatrixAxes ── make_matrix_plan ──▶ EvalMatrixPlan: one EvaluationPlan per cell, in one file
        ──▶ each cell is a recorded evaluation ──▶ EvalMatrixCellScores (see matrix_report.py)

A matrix is a list of evaluation plans under one id. This module decides which combinations (cells)
are evaluated and in which files they are recorded. Cells that differ only in model, mode or
scaffold ask the same items. The plan is written before anything is asked, so a matrix that was
killed can be continued with ``resume``. On disk:

    evaluations/ID.matrix          the plan: {"id": …, "cells": [{"place": {"suite": …}, …}]}
    evaluations/ID-000-….jsonl     the record of a cell, in the format of any evaluation

The attempts are made by ``run_evaluation.py``, the modes are defined in ``answer_modes.py``, and
the command is in ``ramify/cli/eval_matrix.py``.
"""

from __future__ import annotations

import inspect
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, StoreError, UnknownRun
from ramify.evaluate.answer_modes import CHARS_PER_TOKEN, PlainCallModelLimits, mode_function
from ramify.evaluate.run_evaluation import (
    EvaluationFileWriter,
    EvaluationPlan,
    EvaluationStore,
    choose_split,
)
from ramify.evaluate.systems.attempt import parse_system
from ramify.store.durable_files import (
    EVALUATIONS,
    FILE_MODE,
    MATRIX,
    make_folder,
    write_all,
)
from ramify.tasks.base import DATA_SUFFIXES, TASKS, Task, task_of

AXES = ("suite", "family", "length", "model", "mode", "scaffold")
"""Names of a cell's coordinates, in the order of report rows."""
_LENGTH = re.compile(r"(\d{1,9})\s*([km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_length(text: str) -> int:
    """Parse a length in tokens, such as ``8k``.

    Raises ConfigError if the text is not a length.

    >>> parse_length("8k")
    8192
    """
    match = _LENGTH.fullmatch(text.strip())
    num = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not num:
        raise ConfigError(f"'{text}' is not a length: write tokens, as in 8k (8,192), 1m or 10000")
    return num


def format_length(num: int) -> str:
    """Format a length in tokens in its short form.

    For example, 8192 tokens are ``8k``.
    """
    for unit in ("m", "k"):
        if num % _UNITS[unit] == 0:
            return f"{num // _UNITS[unit]}{unit}"
    return str(num)


class EvalMatrixAxes(msgspec.Struct, frozen=True, kw_only=True):
    """The values that an evaluation matrix combines, such as suites, lengths, models and modes."""

    suites: tuple[str, ...]
    """Names of the task suites to evaluate."""
    lengths: tuple[int, ...] = ()
    """Context lengths in tokens of four characters; empty: the length that each suite chooses."""
    models: tuple[str, ...]
    modes: tuple[str, ...] = ("free",)
    systems: tuple[str, ...] = ()
    """Other systems that answer the same items: known libraries, or commands (see systems/)."""
    scaffolds: tuple[str, ...] = ()
    """Names or files of scaffolds; empty: the one scaffold named in the settings."""
    split: str | None = None
    """Split to evaluate of each suite; None means ``test``, or the only split."""
    base: EvaluationPlan
    """Evaluation plan shared by all cells, without coordinates. Its ``items`` is the number of
    items per family."""


class EvalMatrixCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of an evaluation matrix: a combination of choices, and the plan of its evaluation.

    The choices are a suite, a length, a model and so on.
    """

    place: dict[str, str]
    """Axis -> value, as in ``{"suite": "niah", "family": "single_1", "length": "8k", …}``."""
    plan: EvaluationPlan
    record: str
    """Id under which the cell's evaluation is recorded."""

    @property
    def context_tokens(self) -> int | None:
        """Length of each context in tokens; None if the suite chooses the length."""
        return parse_length(self.place["length"]) if "length" in self.place else None

    @property
    def mode(self) -> str:
        return self.place["mode"]

    @property
    def system(self) -> str:
        """Name or command of the external system that answers; empty if Ramify itself does."""
        return str(self.plan.settings.get("with") or "")


class EvalMatrixPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan of an evaluation matrix, which has one evaluation per combination of its axes."""

    id: str
    cells: tuple[EvalMatrixCell, ...]

    @property
    def has_systems(self) -> bool:
        """True if external systems answer some cells.

        All requests must then go through a metering proxy, which counts their cost.
        """
        return any(cell.system for cell in self.cells)

    @property
    def first_cell_plan(self) -> EvaluationPlan:
        """The evaluation plan of the matrix's first cell.

        All cells have the same split, number of items and number of attempts.
        """
        return self.cells[0].plan


def make_matrix_plan(axes: EvalMatrixAxes, tasks: EvalMatrixTaskCache) -> EvalMatrixPlan:
    """Plan the evaluations of a matrix, one for each combination of the axes' values.

    Tasks that must be created for this are stored in ``tasks`` for later use. Raises ConfigError
    for a suite, family, length, mode or system that does not exist.
    """
    for name in axes.modes:
        mode_function(name)
    systems = {parse_system(words).name: words for words in axes.systems}
    for axis in ("suites", "lengths", "models", "modes", "systems", "scaffolds"):
        values = getattr(axes, axis)
        if len({*values}) < len(values):
            raise ConfigError(
                f"{axis} {', '.join(map(str, values))}: a value is repeated: give each only once"
            )
    if len(systems) < len(axes.systems) or not systems.keys().isdisjoint(axes.modes):
        raise ConfigError(
            f"two of {', '.join([*axes.modes, *axes.systems])} would have the same name: give each "
            "command a program with its own name"
        )
    id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    places = [
        ({"suite": suite, **family, **length}, options)
        for suite in axes.suites
        for length, sized in _length_options(suite, axes)
        for family, options in _family_options(suite, sized, axes.split or "test", tasks)
    ]
    plans: list[tuple[dict[str, str], EvaluationPlan]] = []
    for place, options in places:
        for model in axes.models:
            for mode in (*axes.modes, *systems):
                for scaffold in (axes.scaffolds or ("",)) if mode not in systems else ("",):
                    named = {"scaffold": scaffold} if scaffold else {}
                    if mode in systems:
                        named["with"] = systems[mode]
                    settings = {**axes.base.settings, "mode": mode, "direct": False, **named}
                    plan = msgspec.structs.replace(
                        axes.base,
                        task=place["suite"],
                        options=options,
                        model=model,
                        settings=settings,
                    )
                    task = tasks.get_or_create(plan)
                    split = choose_split(task, axes.split)
                    num = min(plan.items, len(task.splits[split]))
                    plan = msgspec.structs.replace(plan, items=num, split=split)
                    coordinates = {**place, "model": model, "mode": mode, "scaffold": scaffold}
                    plans.append(({k: v for k, v in coordinates.items() if v}, plan))
    width = len(str(len(plans) - 1))
    return EvalMatrixPlan(
        id,
        tuple(
            EvalMatrixCell(
                sort_coordinates(place), plan, f"{id}-{number:0{width}}-{_file_words(place)}"
            )
            for number, (place, plan) in enumerate(plans)
        ),
    )


def sort_coordinates(place: Mapping[str, str]) -> dict[str, str]:
    """Return the coordinates of a matrix cell, sorted in the order of ``AXES``."""
    return {axis: place[axis] for axis in AXES if axis in place}


def _file_words(place: Mapping[str, str]) -> str:
    words = (place[axis] for axis in ("suite", "family", "length", "mode") if axis in place)
    return re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-.")[:60]


def _length_options(
    suite: str, axes: EvalMatrixAxes
) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Return the cell coordinates and the task options for each requested text length.

    Raises ConfigError if the suite has no option for a length.
    """
    options = dict(axes.base.options)
    if not axes.lengths:
        return [({}, options)]
    split = axes.split or "test"
    if _is_from_a_file(options, split):
        raise ConfigError(
            f"the split '{split}' of {suite} is read from a file, which has its own "
            "lengths: remove --lengths"
        )
    known = _parameters(suite)
    name = next((name for name in ("tokens", "chars") if name in known), None)
    if name is None:
        raise ConfigError(f"{suite} has no lengths (an option 'tokens'): remove --lengths")
    if name in options:
        raise ConfigError(f"{suite}: give --lengths or {name}=…, not both")
    factor = 1 if name == "tokens" else CHARS_PER_TOKEN
    return [
        ({"length": format_length(each)}, {**options, name: factor * each}) for each in axes.lengths
    ]


def _family_options(
    suite: str, options: dict[str, Any], split: str, tasks: EvalMatrixTaskCache
) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Return the cell coordinates and the task options for each question family of a suite.

    Suites without families, or with questions from a file, have a single entry without coordinates.
    """
    plan = EvaluationPlan(model="", task=suite, options=options)
    names: Sequence[str] = getattr(tasks.get_or_create(plan), "families", ())
    if not names or _is_from_a_file(options, split):
        return [({}, options)]
    return [({"family": name}, {**options, "families": [name]}) for name in names]


def _is_from_a_file(options: Mapping[str, Any], split: str) -> bool:
    return options.get(split) is not None


def _parameters(suite: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a task's factory function, or an empty mapping if it has none.

    Raises ConfigError for an unknown task.
    """
    if suite.endswith(DATA_SUFFIXES) or suite.startswith(("hf:", "verifiers:")):
        return {}
    make = TASKS.resolve(suite)
    try:
        return inspect.signature(make).parameters if callable(make) else {}
    except (ValueError, TypeError):  # a function in C
        return {}


class EvalMatrixTaskCache:
    """A cache of the tasks that the cells of an evaluation matrix use.

    Cells that differ only in model, mode or scaffold share one task object.
    """

    def __init__(self) -> None:
        self._made: dict[bytes, Task] = {}

    def get_or_create(self, plan: EvaluationPlan) -> Task:
        """Return the task that a cell evaluates, creating it on first use.

        Raises ConfigError if it cannot be created.
        """
        key = msgspec.json.encode((plan.task, plan.options), order="deterministic")
        if key not in self._made:
            self._made[key] = task_of(plan.task, **plan.options)
        return self._made[key]


class EvalMatrixEstimate(msgspec.Struct, frozen=True):
    """The number of attempts left in an evaluation matrix, and an upper bound on their cost."""

    attempts: int
    """Number of attempts that are left to make."""
    unfit: int
    """Number of remaining attempts that will not call the model, because the item does not fit the
    model's window."""
    max_cost: float | None
    """Upper bound in dollars on the cost of the remaining attempts that call a model; None if a
    model has no known price."""


def estimate_remaining_cost(
    plan: EvalMatrixPlan,
    rooms: Mapping[str, PlainCallModelLimits],
    limit: float | None,
    left: Mapping[str, int],
) -> EvalMatrixEstimate:
    """Estimate how many attempts of a matrix are left, and what they may cost at most.

    ``rooms`` describes the window and price of each model, ``limit`` is the most that one attempt
    may cost in dollars, and ``left`` has the number of remaining attempts for each record.
    """
    unfit, total = 0, 0.0
    is_priced = True
    for cell in plan.cells:
        num, room, tokens = left[cell.record], rooms[cell.plan.model], cell.context_tokens
        is_direct = cell.mode == "direct" and tokens is not None
        if is_direct and not room.fits(tokens or 0):
            unfit += num
            continue
        is_free = room.is_free and not cell.plan.settings.get("sub_model")
        bounds = [
            limit,
            room.max_cost(tokens or 0) if is_direct else None,
            0.0 if is_free else None,
        ]
        known = [bound for bound in bounds if bound is not None]
        is_priced = is_priced and (not num or (room.price is not None and bool(known)))
        total += num * min(known, default=0.0)
    return EvalMatrixEstimate(sum(left.values()), unfit, total if is_priced else None)


class EvaluationMatrixStore:
    """The evaluation matrices that are recorded in a store (a folder of runs and evaluations)."""

    def __init__(self, root: Path) -> None:
        self._folder = root / EVALUATIONS
        self.evaluations = EvaluationStore(root)

    def create(self, plan: EvalMatrixPlan) -> None:
        """Write the plan of a new evaluation matrix to its file, before any attempt begins."""
        make_folder(self._folder)
        path, part = self.path(plan.id), self._folder / f".{plan.id}.part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            write_all(fd, msgspec.json.encode(plan) + b"\n", part)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)

    def has_cell_record(self, cell: EvalMatrixCell) -> bool:
        """Return True if the evaluation of a cell has started, in which case its record exists."""
        return (self._folder / f"{cell.record}.jsonl").exists()

    def open_cell_record(self, cell: EvalMatrixCell) -> EvaluationFileWriter:
        """Open the record file of a cell for writing, and create it if it does not exist yet."""
        path = self._folder / f"{cell.record}.jsonl"
        return EvaluationFileWriter(path, None if self.has_cell_record(cell) else cell.plan)

    def find(self, id: str) -> EvalMatrixPlan | None:
        """Find a recorded evaluation matrix by its id or a unique prefix of it.

        ``last`` finds the matrix that was evaluated last, but only if no other evaluation is newer.
        Returns None if there is no such matrix.
        """
        known = [path.name.removesuffix(MATRIX) for path in self.paths()]
        if id == "last":
            records = self.evaluations.paths()
            newest = max([*(path.stem for path in records), *known], default="")
            matches = [each for each in known if newest.startswith(each)]
        else:
            # An evaluation of a matrix stands for it, since it has the mode of its cell.
            stem = Path(id).name.removesuffix(".jsonl")
            matches = [
                each
                for each in known
                if id and (each.startswith(id) or stem.startswith(f"{each}-"))
            ]
        if len(matches) > 1:
            raise UnknownRun(
                f"{len(matches)} matrix ids begin with {id!r} (the last: {known[-1]}): give more "
                "characters"
            )
        return read_matrix(self.path(matches[0])) if matches else None

    def paths(self) -> list[Path]:
        """Return the files of all recorded evaluation matrices, oldest first."""
        return sorted(self._folder.glob(f"*{MATRIX}"))

    def path(self, id: str) -> Path:
        return self._folder / f"{id}{MATRIX}"


def read_matrix(path: Path) -> EvalMatrixPlan:
    """Read the plan of an evaluation matrix from its file.

    Raises StoreError if the file cannot be read or is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvalMatrixPlan)
    except OSError as error:
        raise StoreError(f"the matrix {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise StoreError(f"the matrix {path} is damaged: {error}") from None
