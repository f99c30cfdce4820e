"""Scores against money: how well each system would have scored with a smaller budget per attempt.

    cost of each attempt   $0.01   $0.03   $0.20            score with $0.02 per attempt:  1/3
    its reward              1       1       0               score with $0.05 per attempt:  2/3

An attempt that cost more than a budget counts as unanswered, with a score of 0: its system would
have been ended before it answered. So one evaluation with a large budget gives the whole curve, and
all systems are compared at the same dollars. It is a lower bound for a system that would answer
earlier if it knew the smaller budget. Not here: how a curve is drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ramify.evaluate.run import AttemptOutcome
from ramify.evaluate.statistics import MeanEstimate, score_with_interval

NUM_POINTS = 24
"""Maximum number of budgets of a curve."""


class MoneyPoint(msgspec.Struct, frozen=True):
    """What a system scores with one budget.

    Example:
        [(point.dollars, point.score.value) for point in curves["rlms"]]
    """

    dollars: float
    """Budget of one attempt."""
    score: MeanEstimate
    """Mean over attempts, then over items. Attempts beyond the budget count as 0."""
    within: int
    """Attempts that cost no more than the budget."""


def money_curves(
    outcomes: Mapping[str, Sequence[AttemptOutcome]], num_points: int = NUM_POINTS
) -> dict[str, tuple[MoneyPoint, ...]]:
    """The curve of each system, by its name, over the same budgets. A system without a scored
    attempt of known cost has no points.

    Example:
        curves = money_curves({"free": ours.outcomes, "rlms": theirs.outcomes})
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
    """Budgets at which a curve changes: the different costs, or some of them, spread evenly."""
    different = sorted({*costs})
    last = len(different) - 1
    if last < num_points:
        return different
    return [different[round(last * number / (num_points - 1))] for number in range(num_points)]


def _point(attempts: Sequence[AttemptOutcome], budget: float) -> MoneyPoint:
    by_item: dict[str, list[float]] = {}
    within = 0
    for each in attempts:
        is_within = (each.cost or 0.0) <= budget * (1 + 1e-9)
        within += is_within
        by_item.setdefault(each.item, []).append((each.reward or 0.0) if is_within else 0.0)
    means = [math.fsum(rewards) / len(rewards) for rewards in by_item.values()]
    return MoneyPoint(budget, score_with_interval(means), within)
