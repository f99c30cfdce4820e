"""Rows of the lists: a run, a training folder, an evaluation, or an unreadable file.

Not here: finding the files (see run_library.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.evaluate.record import read
from ramify.store.store import RunSummary
from ramify.types.message import Usage
from ramify.types.trajectory import SCHEMA_VERSION, Stop
from ramify.viewer.run_kinds import newer


class RunRow(msgspec.Struct, omit_defaults=True):
    """Row of the list of runs."""

    key: str
    """Address of its page."""
    id: str
    question: str = ""
    model: str = ""
    started_at: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    depth: int = 0
    num_calls: int = 0
    """Number of calls in the tree."""
    requests: int = 0
    """Number of model requests."""
    tokens: int = 0
    """Input plus output tokens."""
    cost: float | None = None
    """Dollars; None if no model had a known price."""
    stop: str = ""
    """Stop reason; empty while the run is in progress, and if it was interrupted."""
    reward: float | None = None
    """Its first reward, if it has any."""
    rewards: dict[str, float] = {}
    alive: bool = False
    source: str = ""
    """Path of its file; empty for a run of a store."""
    task: str = ""
    problem: str | None = None


class TrainingRow(msgspec.Struct, omit_defaults=True):
    """Row for a folder of ``ramify train``."""

    key: str
    name: str
    folder: str


class EvaluationRow(msgspec.Struct, omit_defaults=True):
    """Row for the record of an evaluation."""

    key: str
    name: str
    """Name of the file, which begins with the date."""
    model: str = ""
    task: str = ""
    split: str = ""
    items: int = 0
    attempts: int = 0
    """Planned attempts per item."""
    num_made: int = 0
    """Number of attempts made so far."""
    score: float | None = None
    """Mean reward of the attempts that have one."""
    cost: float | None = None
    problem: str | None = None


class UnreadableRow(msgspec.Struct):
    """Row for a file or folder that cannot be shown, with the reason."""

    path: str
    text: str


class _Glance(msgspec.Struct):
    """Fields of a trajectory that its row needs; the decoder skips token ids and texts."""

    id: str
    question: str
    calls: list[_CallGlance]
    schema_version: int = SCHEMA_VERSION
    task: str = ""
    rewards: dict[str, float] = {}
    stop: Stop | None = None
    usage: Usage = Usage()
    cost: float | None = None
    seconds: float = 0.0
    started_at: float = 0.0


class _CallGlance(msgspec.Struct):
    model: str
    depth: int = 0


_glance = msgspec.json.Decoder(_Glance)


def row_of_summary(summary: RunSummary, key: str) -> RunRow:
    return RunRow(
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
        problem=summary.problem,
    )


def row_of_line(line: bytes, key: str, path: Path, number: int) -> RunRow:
    try:
        glance = _glance.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RunRow(
            key,
            f"{path.name}:{number}",
            source=str(path),
            problem=f"{path}, line {number} is damaged: {error}",
        )
    if glance.schema_version > SCHEMA_VERSION:
        return RunRow(
            key, glance.id, source=str(path), problem=newer(path, number, glance.schema_version)
        )
    return RunRow(
        key,
        glance.id,
        glance.question,
        glance.calls[0].model if glance.calls else "",
        glance.started_at,
        glance.seconds,
        max((call.depth for call in glance.calls), default=0),
        len(glance.calls),
        glance.usage.calls,
        glance.usage.total_tokens,
        glance.cost,
        glance.stop or "",
        next(iter(glance.rewards.values()), None),
        glance.rewards,
        source=str(path),
        task=glance.task,
    )


def row_of_evaluation(path: Path, key: str) -> EvaluationRow:
    problems: list[str] = []
    try:
        glance = read(path, problems)
    except StoreError as error:
        return EvaluationRow(key, path.stem, problem=str(error))
    rewards = [each.reward for each in glance.outcomes if each.reward is not None]
    costs = [each.cost for each in glance.outcomes if each.cost is not None]
    plan = glance.plan
    return EvaluationRow(
        key,
        path.stem,
        plan.model,
        plan.task,
        plan.split,
        plan.items,
        plan.attempts,
        len(glance.outcomes),
        sum(rewards) / len(rewards) if rewards else None,
        sum(costs) if costs else None,
        problem=problems[0] if problems else None,
    )
