"""Data of a training page: every metric over the steps, and the saved rollouts.

metrics.jsonl            {"names": {"reward": [[step, …], [value, …]], …}, "stages": […], …}
rollouts/step-N.jsonl    the rollouts of one step, best first, and metrics for each depth
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.train.metrics import FILE, StepMetrics, layers
from ramify.types.call_tree import as_text, cut
from ramify.types.trajectory import SCHEMA_VERSION, Trajectory

FINAL = ("first", "last", "best")
"""Stages of the evaluations before and after training, which are shown apart from the curves."""
_STEP = re.compile(r"step-(\d+)\.jsonl")
_decoder = msgspec.json.Decoder(StepMetrics)
_trajectory = msgspec.json.Decoder(Trajectory)


class TrainingCurves:
    """Metrics of a training run so far; ``refresh`` reads what the file has gained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.offset = 0
        self._inode = 0
        self._unreadable = ""
        """Reason why the file cannot be read now, or empty."""
        self._clear()

    def _clear(self) -> None:
        self.offset = 0
        self.names: dict[str, tuple[list[int], list[float]]] = {}
        self.stages: list[tuple[str, int]] = []
        """(stage, its first step)."""
        self.final: list[dict[str, Any]] = []
        """Evaluations before and after training: {stage, step, values}."""
        self.at_s = 0.0
        self.step = 0
        self.problems: list[str] = []
        self.version = 0

    def size_changed(self) -> bool:
        """Whether the file has changed since it was read. Costs one system call."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        return stat.st_size != self.offset or stat.st_ino != self._inode

    def refresh(self) -> bool:
        """Read new lines; return whether anything changed.

        A file that was truncated or replaced, for example by a resumed run, is read from the start.
        """
        before = self._unreadable
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(
                    file.fileno()
                )  # of this very file: its name may be another's by now
                if stat.st_ino != self._inode or stat.st_size < self.offset:
                    self._clear()
                    self._inode = stat.st_ino
                file.seek(self.offset)
                data = file.read()
            self._unreadable = ""
        except OSError as error:
            self._unreadable = f"cannot read {self.path}: {error.strerror}"
            return self._unreadable != before
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        for line in complete.split(b"\n"):
            if line.strip():
                self._add(line)
        return bool(complete) or self._unreadable != before

    def _add(self, line: bytes) -> None:
        self.version += 1
        try:
            measured = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if len(self.problems) < 10:
                self.problems.append(
                    f"{self.path}, line {self.version} is damaged and was skipped: {error}"
                )
            return
        self.step = measured.step
        self.at_s = measured.at_s
        if measured.stage in FINAL:
            self.final.append(
                {"stage": measured.stage, "step": measured.step, "values": measured.values}
            )
            if measured.stage != "first":
                return
        elif not self.stages or self.stages[-1][0] != measured.stage:
            self.stages.append((measured.stage, measured.step))
        for name, value in measured.values.items():
            steps, values = self.names.setdefault(name, ([], []))
            if steps and steps[-1] == measured.step:
                values[-1] = value
            else:
                steps.append(measured.step)
                values.append(value)

    def data(self) -> dict[str, Any]:
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "step": self.step,
            "at_s": self.at_s,
            "names": self.names,
            "stages": self.stages,
            "final": self.final,
            "kept": sorted(kept(self.folder)),
            "problems": [*filter(None, [self._unreadable]), *self.problems],
        }


def kept(folder: Path) -> dict[int, Path]:
    """Step -> file with its saved rollouts."""
    files = {}
    for path in (folder / "rollouts").glob("step-*.jsonl"):
        if match := _STEP.fullmatch(path.name):
            files[int(match[1])] = path
    return files


def samples(folder: Path, step: int, key: str) -> dict[str, Any]:
    """Rollouts of ``step``, best first; ``key`` is the address of their file.

    Raises StoreError if that step has no saved rollouts.
    """
    path = kept(folder).get(step)
    if path is None:
        raise StoreError(
            f"{folder} has no saved rollouts of step {step}: schedule.save_rollouts_every sets how "
            "often they are saved"
        )
    rows, problems, trajectories = [], [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                tree = _trajectory.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                problems.append(f"{path}, line {number} is damaged and was skipped: {error}")
                continue
            if tree.schema_version > SCHEMA_VERSION:
                problems.append(
                    f"{path}, line {number} was written by a newer Ramify and was skipped"
                )
                continue
            trajectories.append(tree)
            rows.append(_sample(tree, f"{key}:{number}"))
    rows.sort(key=lambda row: -1e9 if row["reward"] is None else -row["reward"])
    return {
        "step": step,
        "path": str(path),
        "rows": rows,
        "problems": problems,
        "depths": layers(trajectories, {}),
    }


def _sample(tree: Trajectory, key: str) -> dict[str, Any]:
    return {
        "key": key,
        "id": tree.id,
        "task": tree.task,
        "question": cut(tree.question),
        "answer": cut(as_text(tree.answer)),
        "stop": tree.stop,
        "reward": next(iter(tree.rewards.values()), None),
        "rewards": tree.rewards,
        "num_calls": len(tree.calls),
        "depth": tree.depth,
        "tokens": tree.usage.total_tokens,
        "error": cut(tree.errors[0]) if tree.errors else "",
    }
