"""Collect the data for the page of an evaluation matrix (suites, models and modes).

The page can also be written as one file that opens offline.

    ID.matrix, records of its cells ──▶ {"rows": [figures of a cell, …], "attempts": {record: […]}}

evaluate/matrix_report.py computes the figures. training_and_evaluation_pages.py shows the attempts
of one cell on a server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.evaluate.evaluation_matrix import EvalMatrixPlan, read_matrix
from ramify.evaluate.matrix_report import (
    EvalMatrixReport,
    compute_matrix_report,
    failure_reason,
    is_right,
)
from ramify.evaluate.run_evaluation import AttemptOutcome, read_evaluation
from ramify.evaluate.score_budget_curves import matrix_score_by_budget, score_by_budget_tables
from ramify.store.durable_files import MATRIX
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_page

MAX_ATTEMPTS = 20_000
"""Maximum number of attempts in a file that opens offline. Further attempts are omitted."""
RecordedOutcomes = dict[str, tuple[AttemptOutcome, ...]]
"""Outcomes so far of each cell, by the id of the cell's record."""
_MAX_ANSWER = 300
"""Maximum characters of an answer in a file that opens offline."""


def matrix_page_data(library: RunCatalog, key: str) -> dict[str, Any]:
    """Return the data for the page of the evaluation matrix with address ``key``.

    Raises StoreError if the matrix does not exist or cannot be read.
    """
    path = library.find_evaluation_path(key)
    plan = _matrix_in(path)
    problems: list[str] = []
    outcomes = _outcomes_of(plan, path, problems)
    found = _data(compute_matrix_report(plan, outcomes), outcomes, str(path))
    keys = {
        record: library.key_of_path(path.with_name(f"{record}.jsonl"))
        for record, made in outcomes.items()
        if made
    }
    return {**found, "keys": keys, "problems": problems[:10]}


def stored_matrix_page(library: RunCatalog, key: str) -> tuple[str, bytes]:
    """Return the id of the evaluation matrix with address ``key``, and its page as an HTML file.

    Raises StoreError if the matrix does not exist or cannot be read.
    """
    path = library.find_evaluation_path(key)
    plan = _matrix_in(path)
    outcomes = _outcomes_of(plan, path, [])
    return plan.id, matrix_html(compute_matrix_report(plan, outcomes), outcomes)


def matrix_html(report: EvalMatrixReport, outcomes: RecordedOutcomes) -> bytes:
    """Return an HTML file that shows an evaluation matrix and its attempts without a server."""
    left = MAX_ATTEMPTS
    attempts: dict[str, list[dict[str, Any]]] = {}
    for cell in report.plan.cells:
        made = outcomes.get(cell.record, ())[:left]
        left -= len(made)
        attempts[cell.record] = [_attempt(outcome) for outcome in made]
    return offline_page(
        {"matrix": _data(report, outcomes, ""), "attempts": attempts}, ("matrix.js", "share.js")
    )


def _matrix_in(path: Path) -> EvalMatrixPlan:
    if path.suffix != MATRIX:
        raise StoreError(f"{path} is not a matrix: choose one from the list of evaluations")
    return read_matrix(path)


def _outcomes_of(plan: EvalMatrixPlan, path: Path, problems: list[str]) -> RecordedOutcomes:
    """Return the outcomes of all cells of the matrix in ``path``, keyed by record name."""
    return {
        cell.record: _outcomes(path.with_name(f"{cell.record}.jsonl"), problems)
        for cell in plan.cells
    }


def _outcomes(path: Path, problems: list[str]) -> tuple[AttemptOutcome, ...]:
    """Return the outcomes of all attempts so far in one cell (suite, model and mode) of an
    evaluation matrix.

    Empty if the cell has not begun. Errors are added to ``problems``.
    """
    try:
        return read_evaluation(path, problems).outcomes if path.is_file() else ()
    except StoreError as error:
        problems.append(str(error))
        return ()


def _data(report: EvalMatrixReport, outcomes: RecordedOutcomes, path: str) -> dict[str, Any]:
    plan = report.plan
    return {
        "id": plan.id,
        "path": path,
        "k": report.k,
        "items": plan.first_cell_plan.items,
        "attempts": plan.first_cell_plan.attempts,
        "baseline": report.baseline,
        "rows": msgspec.to_builtins(report.rows),
        "first_error": report.first_error,
        "money": msgspec.to_builtins(
            score_by_budget_tables(matrix_score_by_budget(plan, outcomes))
        ),
    }


def _attempt(outcome: AttemptOutcome) -> dict[str, Any]:
    answer = outcome.answer or ""
    return {
        "item": outcome.item,
        "attempt": outcome.attempt,
        "kind": outcome.kind,
        "reward": outcome.reward,
        "right": is_right(outcome),
        "reason": failure_reason(outcome),
        "answer": answer if len(answer) <= _MAX_ANSWER else answer[: _MAX_ANSWER - 1] + "…",
        "error": outcome.error,
        "tokens": outcome.usage.total_tokens,
        "cost": outcome.cost,
        "seconds": outcome.seconds,
        "run": None,
    }
