"""Show the file or folder at a path that was passed to ``ramify show``.

The path takes the place of a run's id.

    ramify show runs/mine/rollouts/step-000010.jsonl       one line for each rollout of the file
    ramify show runs/mine/rollouts/step-000010.jsonl:7     rollout 7 of it, as a run
    ramify show runs/mine                                  a training run: its last step, its files

The first line of a file decides what it is, as on the pages of ``ramify view``. A path at which
nothing can be shown gets an error that names the command which reads it. The journal of a run is
left to ``show.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

from ramify.cli.parser import UsageError
from ramify.cli.terminal_text import Line, format_dollars, pluralize, shorten_to_line
from ramify.errors import StoreError
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from ramify.maps.map_table import StoredTableMap
    from ramify.viewer.run_catalog import RunListRow

_SHOWN_METRICS = ("reward", "validation/reward", "loss")


class PathAndLine(NamedTuple):
    """A path given in place of a run id, optionally followed by a line number.

    It exists, and is not the journal of a run.
    """

    path: Path
    line: int | None
    """Line number, counted from 1; None for the whole file or folder."""


def parse_path_and_line(name: str) -> PathAndLine | None:
    """Parse a path that is given in place of a run id, as ``PATH`` or ``PATH:LINE``.

    Returns None if there is no such file or folder, or if it is the journal of a run.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return PathAndLine(path, None)
    if path.is_file():
        from ramify.viewer.run_lookup import detect_file_kind

        return None if detect_file_kind(path) == "journal" else PathAndLine(path, None)
    place, colon, line = name.rpartition(":")
    path = Path(place).expanduser()
    return PathAndLine(path, int(line)) if colon and line.isdecimal() and path.is_file() else None


def trajectory_on_line(given: PathAndLine) -> Trajectory | None:
    """Return the trajectory on the given line of a file, or None if no line is given.

    Raises StoreError if the file has no such line, or if the line has no trajectory.
    """
    if given.line is None:
        return None
    number = 0
    with given.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == given.line:
                try:
                    return msgspec.json.decode(line, type=Trajectory)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise StoreError(
                        f"{given.path}, line {number} is not a rollout: {error}"
                    ) from None
    raise StoreError(f"{given.path} has no line {given.line}: it has {pluralize(number, 'line')}")


def map_at(given: PathAndLine) -> StoredTableMap | None:
    """Return the map whose journal is at the path, or None if the path holds anything else."""
    from ramify.maps.map_journal import read_header

    if given.path.is_dir() or given.path.suffix != ".jsonl" or read_header(given.path) is None:
        return None
    from ramify.maps.stored_maps import open_map_table

    return open_map_table(given.path)


def rollouts_at(given: PathAndLine) -> list[RunListRow]:
    """Return one row per rollout in a file, or an empty list if the file holds no rollouts."""
    from ramify.viewer.run_catalog import row_of_trajectory_line
    from ramify.viewer.run_lookup import detect_file_kind

    path = given.path
    if path.is_dir() or detect_file_kind(path) != "trajectory":
        return []
    with path.open("rb") as file:
        lines = enumerate(file, start=1)
        return [
            row_of_trajectory_line(line, f"{path}:{number}", path, number) for number, line in lines
        ]


def rollout_list_lines(path: Path, rows: list[RunListRow]) -> Iterator[Line]:
    """Yield a line for each rollout in a file, and finally a hint on how to show a single
    rollout."""
    yield f"{path}: {pluralize(len(rows), 'rollout')}"
    for number, row in enumerate(rows, start=1):
        if row.problem:
            yield f"{number:>4}  {shorten_to_line(row.problem, 200)}"
            continue
        reward = "no reward" if row.reward is None else f"reward {row.reward:.3g}"
        answer = "no answer" if row.answer is None else shorten_to_line(row.answer, 40)
        size = (
            f"{pluralize(row.num_calls, 'call')}, {row.tokens:,} tokens, {format_dollars(row.cost)}"
        )
        asked = shorten_to_line(row.question, 60)
        yield f"{number:>4}  {reward}  {row.stop}  {asked} → {answer}  ({size})"
    yield f"one of them: ramify show {path}:1; on a page: ramify view {path}"


def training_run_summary(folder: Path) -> Iterator[Line]:
    """Yield a summary of a training run, and the commands that show its details.

    Yields nothing if it is not the folder of a training run.
    """
    from ramify.train import metrics

    if not (folder / metrics.FILE).is_file():
        return
    rows = list(metrics.read_metrics(folder))
    yield f"{folder}: a training run, {pluralize(len(rows), 'line')} of metrics"
    for name in _SHOWN_METRICS:
        last = next((row for row in reversed(rows) if name in row.values), None)
        if last is not None:
            yield f"{name}: {last.values[name]:.4g} (step {last.step} of the stage {last.stage})"
    saved = sorted((folder / "rollouts").glob("*.jsonl"))
    yield (
        f"rollouts: {pluralize(len(saved), 'file')}, the last one: ramify show {saved[-1]}"
        if saved
        else "rollouts: none were saved; schedule.save_rollouts_every=5 saves them"
    )
    yield f"curves and rollouts on a page: ramify view {folder}"
    if (folder / "policy").is_dir():
        yield f"ask its policy: ramify ask QUESTION PATH --model local:{folder / 'policy'}"


def raise_unshowable_path(given: PathAndLine) -> NoReturn:
    """Raise UsageError with a message that says what is at a path and which command reads it."""
    from ramify.train.metrics import FILE
    from ramify.viewer.run_lookup import detect_file_kind

    path = given.path
    if path.is_dir():
        if (path / "runs").is_dir():
            raise UsageError(
                f"{path} is a store of runs: list them with RAMIFY_HOME={path} ramify runs, or "
                f"ramify view {path}"
            )
        if (path / "config.json").is_file():
            raise UsageError(f"{path} is a policy or checkpoint: ask it with --model local:{path}")
        files = sorted(each for each in path.glob("*.jsonl") if _is_shown(each))
        if files:
            raise UsageError(
                f"{path} is a folder with {pluralize(len(files), 'file')} of runs: ramify show "
                f"{files[0]}, or ramify view {path}"
            )
        trained = sorted(file.parent for file in path.glob(f"*/{FILE}"))
        if trained:
            raise UsageError(
                f"{path} is a folder with {pluralize(len(trained), 'training run')}: ramify show "
                f"{trained[0]}, or ramify view {path}"
            )
        raise UsageError(
            f"{path} is a folder without runs; to ask about its files: ramify ask QUESTION {path}"
        )
    kind = detect_file_kind(path)
    if kind == "evaluation":
        raise UsageError(f"{path} is the record of an evaluation: ramify view {path}")
    if (path.parent / FILE).is_file():
        raise UsageError(f"{path} is a part of a training run: ramify show {path.parent or '.'}")
    if path.suffix == ".py":
        raise UsageError(f"{path} is a Python file: if it is a recipe, ramify train {path}")
    raise UsageError(
        f"{kind if kind.startswith(str(path)) else f'{path} is not a run'}; to ask about a file: "
        f"ramify ask QUESTION {path}"
    )


def _is_shown(path: Path) -> bool:
    from ramify.viewer.run_lookup import detect_file_kind

    return os.path.isfile(path) and detect_file_kind(path) in (
        "journal",
        "trajectory",
        "evaluation",
    )
