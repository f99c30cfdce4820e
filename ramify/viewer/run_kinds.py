"""What a file holds, told by its first line; and how what was found is named.

journal      a run, event by event            trajectory   a run in each line, as training keeps rollouts
evaluation   a plan, then an outcome a line   else         a sentence that says why it is not shown
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.types.trajectory import SCHEMA_VERSION

Kind = Literal["journal", "trajectory", "evaluation"]
_MAX_FIRST_LINE = 1 << 26
"""Bytes; a trajectory with token ids may be long."""


class LocatedRun(NamedTuple):
    """Where one run is."""

    key: str
    path: Path
    line: int | None
    """Of a file of trajectories, from 1; None for a journal."""


def kind_of(path: Path) -> Kind | str:
    """What a file holds, by its first line; where it is neither, a sentence that says so."""
    with path.open("rb") as file:
        line = file.readline(_MAX_FIRST_LINE).strip()
    if line.startswith(b'{"type":"RunStarted"'):
        return "journal"
    if not line:
        return f"{path} is empty: not a run (yet)"
    if len(line) == _MAX_FIRST_LINE:
        return f"{path} is not a run: its first line is longer than {_MAX_FIRST_LINE >> 20} MiB"
    try:
        first: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return f"{path} is not a run: its first line is not JSON"
    if isinstance(first, dict):
        if first.get("type") == "RunStarted":
            return "journal"
        if "calls" in first and "question" in first:
            return "trajectory"
        if first.get("type") == "plan":
            return "evaluation"
    return f"{path} is not a run: its first line is neither a RunStarted event, nor a trajectory, nor the plan of an evaluation"


def newer(path: Path, number: int, version: int) -> str:
    return (
        f"{path}, line {number} was written by a newer Ramify (schema {version}; this one reads up "
        f"to {SCHEMA_VERSION}): "
        "pip install -U ramify"
    )
