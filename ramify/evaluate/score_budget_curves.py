"""Compute how well each system would have scored with a smaller budget per attempt.

The result is a curve of score against cost.

    cost of each attempt   $0.01   $0.03   $0.20            score with $0.02 per attempt:  1/3
    its reward              1       1       0               score with $0.05 per attempt:  2/3

An attempt that cost more than a given budget counts as unanswered, with a score of 0, since its
system would have been stopped before it answered. So one evaluation with a large budget yields the
whole curve, and all systems are compared at the same dollars. The curve is a lower bound for a
system that would answer earlier if it knew that its budget is smaller.

    score with a budget of   $0.0021   $0.0044   $0.012
    free                       0.350     0.700    0.900
    rlms                       0.100     0.450    0.850
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ramify.evaluate.evaluation_matrix import EvalMatrixPlan
from ramify.evaluate.evaluation_report import align_columns
from ramify.evaluate.run_evaluation import AttemptOutcome
from ramify.evaluate.statistics import MeanEstimate, score_with_interval

NUM_POINTS = 24
"""Maximum number of budgets in a curve."""
_NUM_COLUMNS = 6
_OF_A_SYSTEM = ("mode", "scaffold")
"""Coordinates of a matrix cell that identify the answering system."""


class ScoreBudgetPoint(msgspec.Struct, frozen=True):
    """One point on a score-against-budget curve: a budget per attempt and the score it yields.

    Example:
        [(point.dollars, point.score.value) for point in curves["rlms"]]
    """

    dollars: float
    """Budget per attempt, in dollars."""
    score: MeanEstimate
    """Mean over attempts, then over items. Attempts over budget count as 0."""
    within: int
    """Number of attempts that cost at most the budget."""


def score_by_budget_curves(
    outcomes: Mapping[str, Sequence[AttemptOutcome]], num_points: int = NUM_POINTS
) -> dict[str, tuple[ScoreBudgetPoint, ...]]:
    """Compute the curve of score against budget for each named system, all at the same budgets.

    A system without a scored attempt of known cost gets no points.

    Example:
        curves = score_by_budget_curves({"free": ours.outcomes, "rlms": theirs.outcomes})
    """
    known = {
        name: [each for each in attempts if each.reward is not None and each.cost is not None]
        for name, attempts in outcomes.items()
    }
    every = itertools.chain.from_iterable(known.values())
    budgets = _budgets((each.cost or 0.0 for each in every), num_points)
    return {
        name: tuple(_point(attempts, budget) for budget in budgets) if attempts else ()
        for name, attempts in known.items()
    }


def _budgets(costs: Iterable[float], num_points: int) -> list[float]:
    """Return the distinct costs of attempts, the only budgets at which a score curve can change.

    If there are more than ``num_points``, return an evenly spread selection.
    """
    different = sorted({*costs})
    last = len(different) - 1
    if last < num_points:
        return different
    return [different[round(last * number / (num_points - 1))] for number in range(num_points)]


def _point(attempts: Sequence[AttemptOutcome], budget: float) -> ScoreBudgetPoint:
    by_item: dict[str, list[float]] = {}
    within = 0
    for each in attempts:
        is_within = (each.cost or 0.0) <= budget * (1 + 1e-9)
        within += is_within
        by_item.setdefault(each.item, []).append((each.reward or 0.0) if is_within else 0.0)
    means = [math.fsum(rewards) / len(rewards) for rewards in by_item.values()]
    return ScoreBudgetPoint(budget, score_with_interval(means), within)


class ScoreBudgetCurve(msgspec.Struct, frozen=True):
    """The score of one system in an evaluation matrix as a function of the budget per attempt."""

    place: dict[str, str]
    """Suite, length, model, mode and scaffold. All families of questions are combined."""
    points: tuple[ScoreBudgetPoint, ...]


def matrix_score_by_budget(
    plan: EvalMatrixPlan,
    outcomes: Mapping[str, Sequence[AttemptOutcome]],
    num_points: int = NUM_POINTS,
) -> list[ScoreBudgetCurve]:
    """Compute how the score of each system in an evaluation matrix depends on the budget per
    attempt.

    Systems that answered the same items with the same model are compared at the same budgets.
    ``outcomes`` maps the id of each cell's evaluation to its attempts.
    """
    together: dict[tuple[tuple[str, str], ...], dict[str, list[AttemptOutcome]]] = {}
    places: dict[tuple[tuple[tuple[str, str], ...], str], dict[str, str]] = {}
    for cell in plan.cells:
        place = {axis: value for axis, value in cell.place.items() if axis != "family"}
        items = tuple((a, value) for a, value in place.items() if a not in _OF_A_SYSTEM)
        system = " ".join(place[axis] for axis in _OF_A_SYSTEM if axis in place)
        places[items, system] = place
        # Items of several families may have the same ids.
        made = (
            msgspec.structs.replace(each, item=f"{cell.place.get('family', '')} {each.item}")
            for each in outcomes.get(cell.record, ())
        )
        together.setdefault(items, {}).setdefault(system, []).extend(made)
    return [
        ScoreBudgetCurve(places[items, system], points)
        for items, by_system in together.items()
        for system, points in score_by_budget_curves(by_system, num_points).items()
    ]


class ScoreByBudgetTable(msgspec.Struct, frozen=True):
    """The scores of several systems on the same task items within a few budgets per attempt."""

    items: str
    """Suite, length and model of the items."""
    budgets: tuple[str, ...]
    """Budget of each column in dollars, as text."""
    systems: dict[str, tuple[ScoreBudgetPoint | None, ...]]
    """System -> one point per budget; None where its cost is unknown."""


def score_by_budget_tables(rows: Sequence[ScoreBudgetCurve]) -> list[ScoreByBudgetTable]:
    """Arrange score-against-budget curves as tables, one per combination of suite, length and
    model.

    Combinations with fewer than two different budgets are omitted.
    """
    groups: dict[str, list[ScoreBudgetCurve]] = {}
    for row in rows:
        values = [value for axis, value in row.place.items() if axis not in _OF_A_SYSTEM]
        groups.setdefault(" \N{MIDDLE DOT} ".join(values), []).append(row)
    tables = []
    for items, group in groups.items():
        budgets = _budgets((point.dollars for row in group for point in row.points), _NUM_COLUMNS)
        # Of budgets that look the same, the largest.
        columns = {f"${dollars:.3g}": dollars for dollars in budgets}
        systems = {_name(row): _points_at(row, list(columns.values())) for row in group}
        if len(columns) > 1:
            tables.append(ScoreByBudgetTable(items, tuple(columns), systems))
    return tables


def format_budget_tables(tables: Sequence[ScoreByBudgetTable]) -> list[str]:
    """Format tables of the systems' scores by budget as lines of text."""
    lines: list[str] = []
    for table in tables:
        lines.append(f"{table.items}: score with a budget per attempt")
        cells = [["", *table.budgets]]
        for system, points in table.systems.items():
            scores = ("-" if point is None else f"{point.score.value:.3f}" for point in points)
            cells.append([system, *scores])
        lines += align_columns(cells, list(range(1, 1 + len(table.budgets))))
    return lines


def _name(row: ScoreBudgetCurve) -> str:
    return " ".join(row.place[axis] for axis in _OF_A_SYSTEM if axis in row.place)


def _points_at(
    row: ScoreBudgetCurve, budgets: Sequence[float]
) -> tuple[ScoreBudgetPoint | None, ...]:
    points = {point.dollars: point for point in row.points}
    return tuple(points.get(dollars) for dollars in budgets)
