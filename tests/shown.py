"""The lines that a command would print while the code under test runs: its ``shown`` records."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from logging import WARNING, Handler, LogRecord
from pathlib import Path
from typing import Any

from ramify.log_handlers import RUN_LOG, one_line_message
from ramify.logging import attached_handler
from ramify.train import execute
from ramify.train.checkpoint import CheckpointedProgress
from ramify.train.config import Run

Say = Callable[[str], object]


def _drop(text: str) -> None:
    pass


class ShownLines(Handler):
    """Passes warnings to ``say``, and other shown records to ``inform``."""

    def __init__(self, say: Say, inform: Say) -> None:
        super().__init__()
        self._say = say
        self._inform = inform

    def filter(self, record: LogRecord) -> bool:
        return bool(getattr(record, "shown", False))

    def emit(self, record: LogRecord) -> None:
        (self._say if record.levelno >= WARNING else self._inform)(one_line_message(record))


@contextlib.contextmanager
def heard(say: Say = _drop, inform: Say = _drop) -> Iterator[None]:
    """Pass the lines to ``say`` and ``inform`` while the block runs."""
    with attached_handler(ShownLines(say, inform)):
        yield


def logged(out: Path, event: str) -> list[tuple[str, str]]:
    """(run, process) of each record of ``event`` in the log of a training run."""
    pattern = re.compile(rf"\S+ [A-Z]+ \w+ (\S+) (?:\[([^]]*)\] )?{event}: ")
    lines = (out / RUN_LOG).read_text().splitlines()
    return [(found[1], found[2] or "") for line in lines if (found := pattern.match(line))]


def train(
    run: Run, out: Path, *, say: Say = _drop, inform: Say = _drop, **options: Any
) -> CheckpointedProgress:
    """``execute.train``, with its shown lines passed to ``say`` and ``inform``."""
    with heard(say, inform):
        return execute.train(run, out, **options)
