"""Compute the report of a matrix, which is a set of evaluations over suites, models and modes.

The report has one row per evaluation (cell), and one row for all families of questions of a suite
together.

    oolong · openai:gpt-5-mini · 20 items, 1 attempt each
    family     length   mode     score               minus direct            cost    calls  tokens …
    all        8k       direct   0.700 [0.57 0.80]                           $0.02      60    490k
    all        8k       free     0.900 [0.80 0.96]   +0.200 [+0.08 +0.33]    $0.31     412    2.1M

Differences are taken from the row with the first model, mode and scaffold, over the items that both
rows have. Columns with the same value in all rows are shown once, in the first line. Cells are
defined in ``evaluation_matrix.py``, and the figures of a single evaluation are computed by
``evaluation_report.py``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ramify.evaluate.evaluation_matrix import AXES, EvalMatrixCell, EvalMatrixPlan, sort_coordinates
from ramify.evaluate.evaluation_report import ALL, RIGHT, align_columns, check_k
from ramify.evaluate.run_evaluation import AttemptOutcome
from ramify.evaluate.statistics import (
    MeanEstimate,
    paired_difference,
    pass_at_k,
    quantile,
    score_with_interval,
)
from ramify.evaluate.systems.attempt import OWN
from ramify.types.trajectory import Stop

_OF_ITEMS = ("suite", "family", "length")
"""Axes that determine which items are asked."""


class SelfReportedUsage(msgspec.Struct, frozen=True):
    """The model requests and tokens that an external system reports, summed over its attempts."""

    attempts: int
    """Attempts with a reported count. A system that fails may report none."""
    calls: int
    """Requests to the model."""
    tokens: int
    """Input and output tokens."""


class EvalMatrixCellScores(msgspec.Struct, frozen=True):
    """The scores and costs of one matrix cell, or of a suite's question families combined."""

    place: dict[str, str]
    """Axis -> value. The family is ``all`` in a row for all families."""
    records: tuple[str, ...]
    """Ids of the evaluations that the row covers."""
    is_kind: bool
    """True if one evaluation asked several families, and the row covers only the items of one
    family."""
    planned: int
    """Number of planned attempts."""
    made: int
    """Number of attempts made."""
    items: int
    """Number of items with an attempt."""
    score: MeanEstimate | None
    """Mean reward over attempts, then over items. None if no attempt was scored."""
    passes: MeanEstimate | None
    """pass@k; None if no item has k scored attempts."""
    difference: MeanEstimate | None
    """Score minus that of the row with the first model, mode and scaffold, over their common items.
    None for that first row itself, or if there are no common items."""
    cost: float | None
    """Dollars of all attempts; None if no attempt has a known cost."""
    calls: int
    """Requests to models, billed or possibly billed."""
    input_tokens: int
    output_tokens: int
    seconds_p50: float
    """Median time of an attempt, from question to answer; 0 without attempts."""
    seconds_p95: float
    reasons: dict[str, int]
    """Reason why an attempt was not right -> number of attempts, most frequent first."""
    own: SelfReportedUsage | None = None
    """Usage reported by the system itself, next to the metered usage; None without metering."""


class EvalMatrixReport(msgspec.Struct, frozen=True):
    """The results of a matrix: the scores and costs in each row of its table.

    A matrix is a set of evaluations that combine suites, models and modes.
    """

    plan: EvalMatrixPlan
    k: int
    baseline: dict[str, str]
    """Model, mode and scaffold of the rows that the others are compared with. Axes with only one
    value are left out."""
    rows: tuple[EvalMatrixCellScores, ...]
    first_error: str
    """Why the first attempt without a reward failed; empty if all have a reward."""


Outcomes = Mapping[str, Sequence[AttemptOutcome]]
"""Id of a cell's evaluation -> its outcomes so far."""


def compute_matrix_report(
    plan: EvalMatrixPlan, outcomes: Outcomes, *, k: int | None = None, seed: int = 0
) -> EvalMatrixReport:
    """Compute the report of an evaluation matrix: the scores and costs of each table row.

    ``k`` is the number of attempts for pass@k, by default all of them. ``seed`` is the bootstrap
    seed.
    """
    k = plan.first_cell_plan.attempts if k is None else k
    check_k(k, plan.first_cell_plan.attempts)
    groups = list(_groups(plan, outcomes))
    axes = [
        axis
        for axis in AXES
        if axis not in _OF_ITEMS and len({group.place.get(axis) for group in groups}) > 1
    ]
    baseline = {axis: groups[0].place[axis] for axis in axes}
    scores: dict[tuple[str, ...], dict[str, float]] = {}
    rows = []
    for group in groups:
        by_item = group.by_item()
        items = tuple(group.place.get(axis, "") for axis in _OF_ITEMS)
        is_baseline = all(group.place[axis] == value for axis, value in baseline.items())
        means = {item: _mean(attempts) for item, attempts in by_item.items()}
        if is_baseline:
            scores[items] = means
        difference = None if is_baseline else _difference(means, scores.get(items, {}), seed)
        rows.append(_row(group, by_item, difference, k, seed))
    failed = (each.error for made in outcomes.values() for each in made if each.reward is None)
    return EvalMatrixReport(plan, k, baseline, tuple(rows), next(failed, ""))


class _RowGroup(NamedTuple):
    """The attempts that one row of a matrix report summarises."""

    place: dict[str, str]
    records: tuple[str, ...]
    planned: int
    made: list[tuple[str, AttemptOutcome]]
    """(id of the evaluation, outcome) of each attempt."""
    is_kind: bool = False

    def by_item(self) -> dict[str, list[AttemptOutcome]]:
        """Group the scored attempts of this row by task item, keeping their order.

        Items of different evaluations stay separate, because items of several families may have the
        same ids.
        """
        name = {record: number for number, record in enumerate(self.records)}
        attempts: dict[str, list[AttemptOutcome]] = {}
        for record, outcome in self.made:
            if outcome.reward is not None:
                attempts.setdefault(f"{name[record]} {outcome.item}", []).append(outcome)
        return attempts


def _groups(plan: EvalMatrixPlan, outcomes: Outcomes) -> Iterator[_RowGroup]:
    """Yield the attempts for each row of the report, ordered by suite and length.

    If there are several families of questions, a row for all families comes first, followed by a
    row for each. If one cell asks several families, the kind of an item is its family.
    """
    of_items: dict[tuple[str, str], list[EvalMatrixCell]] = {}
    for cell in plan.cells:
        key = cell.place["suite"], cell.place.get("length", "")
        of_items.setdefault(key, []).append(cell)
    for cells in of_items.values():
        is_together = "family" not in cells[0].place
        kinds = {each.kind for cell in cells for each in outcomes.get(cell.record, ())}
        families = sorted(kinds) if is_together else [cell.place["family"] for cell in cells]
        if len({*families}) > 1:
            yield from _all_families(cells, outcomes)
        if not is_together or len(families) < 2:
            for cell in cells:
                made = [(cell.record, each) for each in outcomes.get(cell.record, ())]
                yield _RowGroup(cell.place, (cell.record,), _num_planned([cell]), made)
            continue
        for kind in families:
            for cell in cells:
                made = [
                    (cell.record, each)
                    for each in outcomes.get(cell.record, ())
                    if each.kind == kind
                ]
                place = sort_coordinates({**cell.place, "family": kind or "(no kind)"})
                yield _RowGroup(place, (cell.record,), len(made), made, is_kind=True)


def _all_families(cells: Sequence[EvalMatrixCell], outcomes: Outcomes) -> Iterator[_RowGroup]:
    together: dict[tuple[str, ...], list[EvalMatrixCell]] = {}
    for cell in cells:
        others = tuple(value for axis, value in cell.place.items() if axis != "family")
        together.setdefault(others, []).append(cell)
    for each in together.values():
        place = sort_coordinates({**each[0].place, "family": ALL})
        records = tuple(cell.record for cell in each)
        made = [(record, outcome) for record in records for outcome in outcomes.get(record, ())]
        yield _RowGroup(place, records, _num_planned(each), made)


def _num_planned(cells: Sequence[EvalMatrixCell]) -> int:
    return sum(cell.plan.items * cell.plan.attempts for cell in cells)


def _mean(attempts: Sequence[AttemptOutcome]) -> float:
    return sum(each.reward or 0.0 for each in attempts) / len(attempts)


def _difference(
    ours: Mapping[str, float], theirs: Mapping[str, float], seed: int
) -> MeanEstimate | None:
    both = [item for item in ours if item in theirs]
    if not both:
        return None
    return paired_difference([ours[item] for item in both], [theirs[item] for item in both], seed)


def _row(
    group: _RowGroup,
    by_item: Mapping[str, Sequence[AttemptOutcome]],
    difference: MeanEstimate | None,
    k: int,
    seed: int,
) -> EvalMatrixCellScores:
    outcomes = [outcome for _, outcome in group.made]
    scores = [_mean(attempts) for attempts in by_item.values()]
    passes = [
        pass_at_k(len(attempts), sum(map(is_right, attempts)), k)
        for attempts in by_item.values()
        if len(attempts) >= k
    ]
    seconds = sorted(outcome.seconds for outcome in outcomes)
    costs = [outcome.cost for outcome in outcomes if outcome.cost is not None]
    reasons = Counter(filter(None, map(failure_reason, outcomes)))
    return EvalMatrixCellScores(
        group.place,
        group.records,
        group.is_kind,
        group.planned,
        len(outcomes),
        len({(record, outcome.item) for record, outcome in group.made}),
        score_with_interval(scores, seed) if scores else None,
        score_with_interval(passes, seed) if passes else None,
        difference,
        sum(costs) if costs else None,
        sum(outcome.usage.calls for outcome in outcomes),
        sum(outcome.usage.input_tokens for outcome in outcomes),
        sum(outcome.usage.output_tokens for outcome in outcomes),
        quantile(seconds, 0.5) if seconds else 0.0,
        quantile(seconds, 0.95) if seconds else 0.0,
        dict(reasons.most_common()),
        _own_counts(outcomes),
    )


def _own_counts(outcomes: Sequence[AttemptOutcome]) -> SelfReportedUsage | None:
    counted = [each.metrics for each in outcomes if OWN + "requests" in each.metrics]
    if not counted:
        return None
    tokens = (
        each.get(OWN + "input_tokens", 0) + each.get(OWN + "output_tokens", 0) for each in counted
    )
    calls = sum(each[OWN + "requests"] for each in counted)
    return SelfReportedUsage(len(counted), int(calls), int(sum(tokens)))


def is_right(outcome: AttemptOutcome) -> bool:
    return outcome.reward is not None and outcome.reward >= RIGHT


def failure_reason(outcome: AttemptOutcome) -> str:
    """Return a short reason why an attempt is not correct, or an empty string if it is.

    The word ``failed`` means that the attempt has no reward, because something other than the model
    failed.
    """
    if is_right(outcome):
        return ""
    if outcome.reward is None:
        return "failed"
    if outcome.reason:
        return outcome.reason
    if outcome.stop not in (None, Stop.FINAL):
        return str(outcome.stop)
    if outcome.answer is None:
        return "no answer"
    return "partly right" if outcome.reward > 0 else "wrong"


# --- as text


def matrix_table(report: EvalMatrixReport) -> str:
    """Format a matrix report as a text table, below a line with the values that all rows share."""
    plan, rows = report.plan.first_cell_plan, report.rows
    values = {axis: [row.place.get(axis, "") for row in rows] for axis in AXES}
    varied = [axis for axis in AXES if len({*values[axis]}) > 1]
    common = [values[axis][0] for axis in AXES if axis not in varied and values[axis][0]]
    per = " per family" if "family" in varied else ""
    num = f"{plan.items:,} item{'s' * (plan.items != 1)}{per}"
    num += f", {plan.attempts} attempt{'s' * (plan.attempts != 1)} each"
    columns: list[tuple[str, bool, Callable[[EvalMatrixCellScores], str]]] = [
        (axis, False, functools.partial(_axis_value, axis)) for axis in varied
    ]
    columns.append(("score", False, lambda row: _format_estimate(row.score)))
    if report.k > 1:
        columns.append((f"pass@{report.k}", False, lambda row: _format_estimate(row.passes)))
    if report.baseline:
        name = f"minus {', '.join(report.baseline.values())}"
        columns.append((name, False, lambda row: _format_difference(row.difference)))
    columns += [
        ("cost", True, lambda row: "-" if row.cost is None else f"${row.cost:.3g}"),
        ("calls", True, lambda row: f"{row.calls:,}"),
        ("tokens", True, lambda row: _format_short_number(row.input_tokens + row.output_tokens)),
        *_own_columns(rows),
        ("p50", True, lambda row: _seconds(row.seconds_p50)),
        ("p95", True, lambda row: _seconds(row.seconds_p95)),
        ("not right", False, _reasons),
    ]
    cells = [
        [name for name, _, _ in columns],
        *([text(row) for _, _, text in columns] for row in rows),
    ]
    numbers = [at for at, (_, is_number, _) in enumerate(columns) if is_number]
    head = " · ".join([*common, num])
    lines = [head, *align_columns(cells, numbers)]
    if report.first_error:
        lines.append(
            f"attempts that failed are not counted in scores; the first: {report.first_error}"
        )
    return "\n".join(lines)


def _own_columns(
    rows: Sequence[EvalMatrixCellScores],
) -> list[tuple[str, bool, Callable[[EvalMatrixCellScores], str]]]:
    """Return the table columns for the usage that external systems report.

    Empty if no row has such counts.
    """
    if all(row.own is None for row in rows):
        return []

    def calls(row: EvalMatrixCellScores) -> str:
        if row.own is None:
            return "-"
        part = f" ({row.own.attempts} of {row.made})" if row.own.attempts < row.made else ""
        return f"{row.own.calls:,}{part}"

    return [
        ("own calls", True, calls),
        (
            "own tokens",
            True,
            lambda row: "-" if row.own is None else _format_short_number(row.own.tokens),
        ),
    ]


def _axis_value(axis: str, row: EvalMatrixCellScores) -> str:
    return row.place.get(axis, "")


def _format_estimate(figure: MeanEstimate | None) -> str:
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.2f} {figure.high:.2f}]"


def _format_difference(figure: MeanEstimate | None) -> str:
    return "" if figure is None else f"{figure.value:+.3f} [{figure.low:+.2f} {figure.high:+.2f}]"


def _format_short_number(num: int) -> str:
    """Return a large number in a short form, rounded to three digits.

    For example, 1234567 becomes ``1.23M``.
    """
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if num >= size:
            return f"{num / size:.3g}{unit}"
    return str(num)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:,.0f} s"


def _reasons(row: EvalMatrixCellScores) -> str:
    parts = [f"{num:,} {reason}" for reason, num in row.reasons.items()]
    if row.made < row.planned:
        parts.append(f"{row.planned - row.made:,} not made")
    return ", ".join(parts)
