"""Detects the kind of a file by its first line.

journal       one run, an event per line
trajectory    one run per line, as training saves rollouts
evaluation    a plan, then one outcome per line
other         a sentence that says why the file cannot be shown
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.types.trajectory import SCHEMA_VERSION

Kind = Literal["journal", "trajectory", "evaluation"]
_MAX_FIRST_LINE = 1 << 26
"""Maximum length of the first line in bytes; a trajectory with token ids may be long."""


class LocatedRun(NamedTuple):
    """Location of one run: its address, its file and its line."""

    key: str
    path: Path
    line: int | None
    """Line number in a file of trajectories, from 1; None for a journal."""


def kind_of(path: Path) -> Kind | str:
    """Return the kind of a file by its first line, or a sentence that says why it has none."""
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
    return (
        f"{path} is not a run: its first line is neither a RunStarted event, nor a trajectory, nor "
        "the plan of an evaluation"
    )


def newer(path: Path, number: int, version: int) -> str:
    """Error message for a line with a newer schema version."""
    return (
        f"{path}, line {number} was written by a newer Ramify (schema {version}; this one reads up "
        f"to {SCHEMA_VERSION}): pip install -U ramify"
    )
