"""Data of an evaluation's page: scores with intervals for each kind of item, and all attempts.

The scores are those of evaluate/evaluation_report.py. They need resampling, so they are cached
until the record grows.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.evaluate.evaluation_report import RIGHT, EvaluationReport, difference, report
from ramify.evaluate.run import AttemptOutcome, Evaluation, read_evaluation
from ramify.evaluate.statistics import pass_at_k
from ramify.types.call_tree import cut
from ramify.viewer.run_library import RunLibrary

MAX_ATTEMPTS = 20_000
"""Maximum number of attempts that a page receives."""
MAX_PROBLEMS = 10


class EvaluationLibrary:
    """Evaluation records of a ``RunLibrary``, with cached reports. Thread-safe."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._known: dict[Path, tuple[tuple[int, int], EvaluationReport | None]] = {}
        self._lock = threading.Lock()

    def shown(self, key: str, other: str = "") -> dict[str, Any]:
        """Data of the page of ``key``, compared with ``other`` if given.

        Raises StoreError for a record that does not exist or cannot be read.
        """
        path = self._library.evaluation(key)
        problems: list[str] = []
        evaluation = read_evaluation(path, problems)
        # Reversed, so that the first outcome of each item decides its position.
        first_index = {
            outcome.item: index for index, outcome in reversed(list(enumerate(evaluation.outcomes)))
        }
        order = sorted(
            evaluation.outcomes,
            key=lambda outcome: (first_index[outcome.item], outcome.attempt),
        )
        attempts = [self._attempt(outcome, path) for outcome in order[:MAX_ATTEMPTS]]
        return {
            "key": key,
            "name": path.stem,
            "path": str(path),
            "plan": msgspec.structs.asdict(evaluation.plan),
            "num_made": len(evaluation.outcomes),
            "passes": _passes(evaluation),
            "report": self._report(path, evaluation),
            "attempts": attempts,
            "compared": self._compared(evaluation, other) if other else None,
            "problems": problems[:MAX_PROBLEMS],
        }

    def _report(self, path: Path, evaluation: Evaluation) -> EvaluationReport | None:
        """Cached report of an evaluation; None before its first attempt."""
        stat = path.stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
        with self._lock:
            known, figures = self._known.get(path, (None, None))
            if known != stamp:
                figures = report(evaluation) if evaluation.outcomes else None
                self._known[path] = (stamp, figures)
        return figures

    def _compared(self, evaluation: Evaluation, other: str) -> dict[str, Any]:
        path = self._library.evaluation(other)
        try:
            figure, items = difference(evaluation, read_evaluation(path))
        except ConfigError as error:
            return {"name": path.stem, "problem": str(error)}
        return {"name": path.stem, "difference": figure, "items": items}

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


def _passes(evaluation: Evaluation) -> list[tuple[int, float]]:
    """pass@k for each k up to the planned attempts, over the items with at least k scores."""
    items: dict[str, list[bool]] = {}
    for outcome in evaluation.outcomes:
        if outcome.reward is not None:
            items.setdefault(outcome.item, []).append(outcome.reward >= RIGHT)
    passes = []
    for k in range(1, evaluation.plan.attempts + 1):
        scores = [
            pass_at_k(len(rights), sum(rights), k) for rights in items.values() if len(rights) >= k
        ]
        if scores:
            passes.append((k, sum(scores) / len(scores)))
    return passes
