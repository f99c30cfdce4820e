"""An evaluation's record as its page shows it: figures with their intervals, by kind; attempts as
links to their runs.

The figures are those of ``evaluate/report.py``. They take resampling, so they are kept until the
record grows.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.evaluate.record import read
from ramify.evaluate.report import RIGHT, EvaluationReport, difference, report
from ramify.evaluate.run import AttemptOutcome, Evaluation
from ramify.evaluate.statistics import pass_at_k
from ramify.viewer.run_library import RunLibrary
from ramify.viewer.run_tree import cut

MAX_ATTEMPTS = 20_000
"""Rows of attempts that a page gets."""
MAX_PROBLEMS = 10


class EvaluationLibrary:
    """The records of a library. Safe for several threads."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._known: dict[Path, tuple[tuple[int, int], EvaluationReport | None]] = {}
        self._lock = threading.Lock()

    def shown(self, key: str, other: str = "") -> dict[str, Any]:
        """All that the page of ``key`` shows, beside ``other`` where that is given. Raises
        StoreError for a record that is not there or cannot be read."""
        path = self._library.evaluation(key)
        problems: list[str] = []
        found = read(path, problems)
        place = {
            each.item: index for index, each in reversed(list(enumerate(found.outcomes)))
        }  # where each item came first
        order = sorted(found.outcomes, key=lambda each: (place[each.item], each.attempt))
        attempts = [self._attempt(each, path) for each in order[:MAX_ATTEMPTS]]
        return {
            "key": key,
            "name": path.stem,
            "path": str(path),
            "plan": msgspec.structs.asdict(found.plan),
            "num_made": len(found.outcomes),
            "passes": _passes(found),
            "report": self._report(path, found),
            "attempts": attempts,
            "compared": self._compared(found, other) if other else None,
            "problems": problems[:MAX_PROBLEMS],
        }

    def _report(self, path: Path, found: Evaluation) -> EvaluationReport | None:
        """None where no attempt was made yet."""
        stat = path.stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
        with self._lock:
            known, figures = self._known.get(path, (None, None))
            if known != stamp:
                figures = report(found) if found.outcomes else None
                self._known[path] = (stamp, figures)
        return figures

    def _compared(self, ours: Evaluation, other: str) -> dict[str, Any]:
        theirs = self._library.evaluation(other)
        try:
            figure, items = difference(ours, read(theirs))
        except ConfigError as error:
            return {"name": theirs.stem, "problem": str(error)}
        return {"name": theirs.stem, "difference": figure, "items": items}

    def _attempt(self, outcome: AttemptOutcome, record: Path) -> dict[str, Any]:
        reward = outcome.reward
        return {
            "item": outcome.item,
            "attempt": outcome.attempt,
            "kind": outcome.kind,
            "reward": reward,
            "right": reward is not None and reward >= RIGHT,
            "rewards": outcome.rewards,
            "answer": cut(outcome.answer or ""),
            "stop": outcome.stop,
            "error": cut(outcome.error),
            "turns": outcome.turns,
            "calls": outcome.calls,
            "tokens": outcome.usage.total_tokens,
            "cost": outcome.cost,
            "seconds": outcome.seconds,
            "run": self._library.key_of_run(record, outcome.run),
        }


def _passes(found: Evaluation) -> list[tuple[int, float]]:
    """pass@k for every k up to the attempts that are planned, over the items that have so many
    scored attempts."""
    items: dict[str, list[bool]] = {}
    for each in found.outcomes:
        if each.reward is not None:
            items.setdefault(each.item, []).append(each.reward >= RIGHT)
    passes = []
    for k in range(1, found.plan.attempts + 1):
        enough = [pass_at_k(len(each), sum(each), k) for each in items.values() if len(each) >= k]
        if enough:
            passes.append((k, sum(enough) / len(enough)))
    return passes
