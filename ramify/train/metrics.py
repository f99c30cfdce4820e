"""What a training run measures, step by step, in one file of its folder: ``metrics.jsonl``.

    {"step": 12, "stage": "rl", "at_s": 41.2, "values": {"reward": 0.46, "sampled_tokens": 8123, …}}

One line is written with one ``write``, so a killed run leaves whole lines but perhaps the last, which a reader skips.
Whoever wants to watch listens; the page and the terminal's view read the same lines. On resume what a step wrote after
the checkpoint is dropped, since it will be measured again.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

FILE = "metrics.jsonl"


class Measured(msgspec.Struct, frozen=True):
    """What was measured at one step."""

    step: int
    """Optimizer steps of the whole run before this one was over: 1 is the first."""
    stage: str
    """``sft``, ``rl``, … of the run; evaluations carry the stage that they followed."""
    at_s: float
    """Seconds of training since the run began, over all its resumptions."""
    values: dict[str, float]
    """Name -> finite number (JSON has no other); ``validation/reward`` and ``test/reward`` are of those streams."""


class Metrics:
    """The run's file, open for appending."""

    def __init__(self, folder: Path, listener: Callable[[Measured], None] | None = None) -> None:
        self.path = folder / FILE
        self._listener = listener
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.lseek(self._file, 0, os.SEEK_END)
        if not _ends_a_line(self.path):
            os.write(self._file, b"\n")  # what was cut off by a kill must not swallow the next line

    def write(self, step: int, stage: str, at_s: float, values: Mapping[str, float]) -> Measured:
        finite = {name: _rounded(value) for name, value in values.items() if math.isfinite(value)}
        measured = Measured(step, stage, round(at_s, 3), finite)
        os.write(self._file, msgspec.json.encode(measured) + b"\n")
        if self._listener is not None:
            self._listener(measured)
        return measured

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(folder: Path) -> Iterator[Measured]:
    """The lines of a run's folder, in order; a torn one is skipped, and there may be none."""
    path = folder / FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=Measured)


def cut(folder: Path, step: int) -> None:
    """Drop what was measured after ``step``; atomic."""
    kept = b"".join(msgspec.json.encode(each) + b"\n" for each in read(folder) if each.step <= step)
    path = folder / FILE
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(kept)
    fresh.replace(path)


def _rounded(value: float) -> float:
    """Seven digits are what a 32-bit float has."""
    return float(f"{value:.7g}")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
