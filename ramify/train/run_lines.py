"""Files of a run's folder that hold one JSON line per record: append, read and cut.

    LINES = RunLines("groups.jsonl", GroupRecord)
    LINES.append(folder, records)     one write: a kill leaves whole lines, except perhaps the last
    LINES.read(folder)                the records in order; skips a line that a kill tore
    LINES.cut(folder, step)           drops the records of later steps; atomic

Each record has the number of its ``step``. Not here: what the records mean (``metrics.py``,
``group_records.py``), and the journals of sessions (``store/``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec


class StepRecord(Protocol):
    """What one line holds."""

    @property
    def step(self) -> int:
        """Optimizer steps of the whole run, including the one that the line is about."""
        ...


R = TypeVar("R", bound=StepRecord)


class RunLines(Generic[R]):
    """One kind of line file, in any run's folder."""

    def __init__(self, name: str, kind: type[R]) -> None:
        self.name = name
        self._kind = kind

    def append(self, folder: Path, records: Sequence[R]) -> None:
        """Append ``records`` with a single write; without any, nothing is written."""
        lines = self._encoded(records)
        if not lines:
            return
        with (folder / self.name).open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn line must not swallow the next one
                    lines = b"\n" + lines
            file.write(lines)

    def read(self, folder: Path) -> Iterator[R]:
        """The records in a run's folder, in order. Yields none if the file is missing."""
        path = folder / self.name
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield msgspec.json.decode(line, type=self._kind)

    def cut(self, folder: Path, step: int) -> None:
        """Drop the records after ``step``."""
        path = folder / self.name
        if path.exists():
            fresh = path.with_suffix(".tmp")
            fresh.write_bytes(
                self._encoded([record for record in self.read(folder) if record.step <= step])
            )
            fresh.replace(path)

    @staticmethod
    def _encoded(records: Sequence[R]) -> bytes:
        return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
