"""The rows of the page's lists: one run, one folder of training, one evaluation, one file that is
none of these."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.evaluate.record import read
from ramify.store.index import RunSummary
from ramify.types.message import Usage
from ramify.types.trajectory import SCHEMA_VERSION, Stop
from ramify.viewer.run_kinds import newer


class RunRow(msgspec.Struct, omit_defaults=True):
    """One line of the page's list of runs."""

    key: str
    """How its page is addressed."""
    id: str
    question: str = ""
    model: str = ""
    started_at: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    depth: int = 0
    num_calls: int = 0
    """Calls in the tree."""
    requests: int = 0
    """Sent to models."""
    tokens: int = 0
    """In and out."""
    cost: float | None = None
    """Dollars; None where no model had a price."""
    stop: str = ""
    """Empty while it runs, and where it was cut off."""
    reward: float | None = None
    """The first of its rewards, where it has any."""
    rewards: dict[str, float] = {}
    alive: bool = False
    source: str = ""
    """The file of trajectories that it is from; empty for a journal of the default store."""
    task: str = ""
    problem: str | None = None


class TrainingRow(msgspec.Struct, omit_defaults=True):
    """One folder of ``ramify train``."""

    key: str
    name: str
    folder: str


class EvaluationRow(msgspec.Struct, omit_defaults=True):
    """One evaluation's record."""

    key: str
    name: str
    """Of the file, which begins with the time."""
    model: str = ""
    task: str = ""
    split: str = ""
    items: int = 0
    attempts: int = 0
    """At each item."""
    num_made: int = 0
    """Attempts that were made."""
    score: float | None = None
    """Mean reward over the attempts that have one."""
    cost: float | None = None
    problem: str | None = None


class UnreadableRow(msgspec.Struct):
    """A file or folder that was named or found, and why it is not shown."""

    path: str
    text: str


class _Glance(msgspec.Struct):
    """As much of a trajectory as its row needs; the decoder skips token ids and texts."""

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
        found = _glance.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RunRow(
            key,
            f"{path.name}:{number}",
            source=str(path),
            problem=f"{path}, line {number} is damaged: {error}",
        )
    if found.schema_version > SCHEMA_VERSION:
        return RunRow(
            key, found.id, source=str(path), problem=newer(path, number, found.schema_version)
        )
    return RunRow(
        key,
        found.id,
        found.question,
        found.calls[0].model if found.calls else "",
        found.started_at,
        found.seconds,
        max((call.depth for call in found.calls), default=0),
        len(found.calls),
        found.usage.calls,
        found.usage.total_tokens,
        found.cost,
        found.stop or "",
        next(iter(found.rewards.values()), None),
        found.rewards,
        source=str(path),
        task=found.task,
    )


def row_of_evaluation(path: Path, key: str) -> EvaluationRow:
    problems: list[str] = []
    try:
        found = read(path, problems)
    except StoreError as error:
        return EvaluationRow(key, path.stem, problem=str(error))
    rewards = [each.reward for each in found.outcomes if each.reward is not None]
    costs = [each.cost for each in found.outcomes if each.cost is not None]
    plan = found.plan
    return EvaluationRow(
        key,
        path.stem,
        plan.model,
        plan.task,
        plan.split,
        plan.items,
        plan.attempts,
        len(found.outcomes),
        sum(rewards) / len(rewards) if rewards else None,
        sum(costs) if costs else None,
        problem=problems[0] if problems else None,
    )
