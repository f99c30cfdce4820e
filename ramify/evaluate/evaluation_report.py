"""Compute the report of an evaluation: its scores with confidence intervals, and its costs.

Scores are also computed for each kind of item, and two evaluations can be compared.

    ledger/test · openai:gpt-5-mini · 100 items, 4 attempts each
                 items   avg@4               pass@4              majority@4
    all            100   0.612 [0.54 0.69]   0.840 [0.77 0.91]   0.690 [0.60 0.78]
    count           21   …

In the table, ``avg`` is the mean reward; ``pass`` and ``majority`` count an attempt as right if its
reward is 1. Attempts that failed for reasons outside the model are counted separately. Items with
fewer than k scored attempts are left out of pass@k and majority@k. If each item is either right or
wrong, the intervals are those of a proportion instead of a bootstrap (see ``statistics.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from ramify.errors import ConfigError
from ramify.evaluate.run_evaluation import AttemptOutcome, EvaluationPlan, EvaluationResult
from ramify.evaluate.statistics import (
    MeanEstimate,
    majority_at_k,
    paired_difference,
    pass_at_k,
    quantile,
    score_with_interval,
)
from ramify.format_quantities import format_duration, format_plain_number

RIGHT = 1 - 1e-9
"""Minimum reward of an attempt that counts as right, just below 1 to allow rounding errors."""
ALL = "all"


class ItemKindScores(msgspec.Struct, frozen=True):
    """The scores of an evaluation on one kind of task item, or on all items.

    Example:
        evaluate.report(done).rows[0].average.value    # of all items, from 0 to 1
    """

    kind: str
    items: int
    average: MeanEstimate | None
    """Mean reward over attempts, then over items. None if no attempt was scored."""
    passes: MeanEstimate | None
    """pass@k; None if no item has k scored attempts."""
    majority: MeanEstimate | None
    """majority@k; None if no item has k scored attempts."""


class AttemptTotals(msgspec.Struct, frozen=True):
    """The tokens, requests, cost and time that the attempts of an evaluation took."""

    input_tokens: int
    output_tokens: int
    requests: int
    """Requests to models, billed or possibly billed."""
    cost: float | None
    """Total cost in dollars; None if no attempt has a known cost."""
    seconds_mean: float
    """Mean seconds per attempt, from question to answer."""
    seconds_p95: float
    turns_mean: float
    """Mean turns of the root call per attempt."""
    calls_mean: float
    """Mean number of calls below the root per attempt."""


class EvaluationReport(msgspec.Struct, frozen=True):
    """The results of an evaluation, such as its rewards, metrics, failures and costs."""

    plan: EvaluationPlan
    k: int
    attempts: int
    """Number of attempts made."""
    failed: int
    """Number of attempts without a reward."""
    first_error: str
    rows: tuple[ItemKindScores, ...]
    """Scores of all items, then of each kind of item."""
    rewards: dict[str, float]
    """Reward name -> mean over scored attempts."""
    metrics: dict[str, float]
    """Metric name -> mean over the attempts that have it."""
    stops: dict[str, int]
    """Stop reason -> number of attempts that ended with it."""
    spent: AttemptTotals


def report(
    evaluation: EvaluationResult, *, k: int | None = None, seed: int = 0
) -> EvaluationReport:
    """Compute the report of an evaluation: its rewards, metrics, failures and costs.

    ``k`` is the k of pass@k and majority@k, by default the number of attempts per item; ``seed`` is
    the seed of the bootstrap. Raises ConfigError if there are fewer than k attempts per item, or if
    no attempt was made.

    Example:
        print(evaluate.table(evaluate.report(done, k=4)))    # pass@4 and majority@4
    """
    plan, outcomes = evaluation.plan, evaluation.outcomes
    k = plan.attempts if k is None else k
    check_k(k, plan.attempts)
    if not outcomes:
        raise ConfigError(f"there is nothing to report: no attempt at '{plan.task}' was made")
    scored = [outcome for outcome in outcomes if outcome.reward is not None]
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups = [
        (ALL, outcomes),
        *((kind, [outcome for outcome in outcomes if outcome.kind == kind]) for kind in kinds),
    ]
    failures = [outcome.error for outcome in outcomes if outcome.reward is None]
    return EvaluationReport(
        plan,
        k,
        len(outcomes),
        len(failures),
        failures[0] if failures else "",
        tuple(
            _row(kind, group, k, seed) for kind, group in (groups if len(kinds) > 1 else groups[:1])
        ),
        _means(outcome.rewards for outcome in scored),
        _means(outcome.metrics for outcome in scored),
        dict(Counter(str(outcome.stop) for outcome in outcomes).most_common()),
        _attempt_totals(outcomes),
    )


def check_k(k: int, attempts: int) -> None:
    """Raise ConfigError if there are too few attempts at each item to compute pass@k."""
    if k < 1:
        raise ConfigError(f"pass@{k}: k must be at least 1")
    if k > attempts:
        raise ConfigError(
            f"pass@{k} needs at least {k} attempts at each item (n), and there are {attempts}: "
            "raise n or lower k"
        )


def difference(
    ours: EvaluationResult, theirs: EvaluationResult, *, seed: int = 0
) -> tuple[MeanEstimate, int]:
    """Return how much higher the mean reward of ``ours`` is than that of ``theirs``.

    The second value is the number of items compared. These are the items that both evaluations have
    scored. Raises ConfigError if they evaluate different tasks or have no scored item in common.
    """
    check_same_items(ours.plan, theirs.plan)
    a, b = (_by_item(each.outcomes) for each in (ours, theirs))
    both = [item for item in a if item in b]
    if not both:
        raise ConfigError("the two evaluations have no scored item in common")
    first, second = ([_mean_reward(side[item]) for item in both] for side in (a, b))
    return paired_difference(first, second, seed), len(both)


def flipped_items(ours: EvaluationResult, theirs: EvaluationResult) -> dict[str, str]:
    """Return the items that only one of two evaluations answers right.

    ``better`` lists those that only the first answers right, ``worse`` those that only the second
    does. An item is right if at least half of its scored attempts are.
    """
    a, b = (
        {
            item: 2 * sum(map(_is_right, attempts)) >= len(attempts)
            for item, attempts in _by_item(each.outcomes).items()
        }
        for each in (ours, theirs)
    )
    return {
        item: "better" if a[item] else "worse" for item in a if item in b and a[item] != b[item]
    }


def check_same_items(ours: EvaluationPlan, theirs: EvaluationPlan) -> None:
    """Raise ConfigError if two evaluations do not use the same task items.

    The message names the difference, such as another split or other task options.
    """
    for name in ("task", "options", "split"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise ConfigError(
                f"the evaluations cannot be compared: {name} is {mine!r} here and {other!r} there"
            )


def _by_item(outcomes: Iterable[AttemptOutcome]) -> dict[str, list[AttemptOutcome]]:
    """Group the scored attempts of an evaluation by task item, keeping their order."""
    attempts: dict[str, list[AttemptOutcome]] = {}
    for outcome in outcomes:
        if outcome.reward is not None:
            attempts.setdefault(outcome.item, []).append(outcome)
    return attempts


def _row(kind: str, outcomes: Sequence[AttemptOutcome], k: int, seed: int) -> ItemKindScores:
    items = _by_item(outcomes)
    enough = [attempts for attempts in items.values() if len(attempts) >= k]

    def figure(
        of: Callable[[list[AttemptOutcome]], float], among: Iterable[list[AttemptOutcome]]
    ) -> MeanEstimate | None:
        values = [of(attempts) for attempts in among]
        return score_with_interval(values, seed) if values else None

    return ItemKindScores(
        kind,
        len({outcome.item for outcome in outcomes}),
        figure(_mean_reward, items.values()),
        figure(lambda attempts: pass_at_k(len(attempts), sum(map(_is_right, attempts)), k), enough),
        figure(lambda attempts: _majority(attempts, k), enough),
    )


def _mean_reward(attempts: Sequence[AttemptOutcome]) -> float:
    return sum(attempt.reward or 0.0 for attempt in attempts) / len(attempts)


def _is_right(attempt: AttemptOutcome) -> bool:
    return attempt.reward is not None and attempt.reward >= RIGHT


def _majority(attempts: Sequence[AttemptOutcome], k: int) -> float:
    return majority_at_k(
        [attempt.answer for attempt in attempts],
        [float(_is_right(attempt)) for attempt in attempts],
        k,
    )


def _means(metrics: Iterable[dict[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in metrics:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(row) / len(row) for name, row in values.items()}


def _attempt_totals(outcomes: Sequence[AttemptOutcome]) -> AttemptTotals:
    durations = sorted(outcome.seconds for outcome in outcomes)
    costs = [outcome.cost for outcome in outcomes if outcome.cost is not None]
    num = len(outcomes)
    return AttemptTotals(
        sum(outcome.usage.input_tokens for outcome in outcomes),
        sum(outcome.usage.output_tokens for outcome in outcomes),
        sum(outcome.usage.calls for outcome in outcomes),
        sum(costs) if costs else None,
        sum(durations) / num,
        quantile(durations, 0.95),
        sum(outcome.turns for outcome in outcomes) / num,
        sum(outcome.calls for outcome in outcomes) / num,
    )


# --- as text


def table(evaluation_report: EvaluationReport) -> str:
    """Format an evaluation report as a text table, less than 100 characters wide."""
    plan = evaluation_report.plan
    num, attempts = (
        _pluralize_noun(f"{evaluation_report.rows[0].items:,}", "item"),
        _pluralize_noun(str(plan.attempts), "attempt"),
    )
    head = f"{plan.task}/{plan.split} · {plan.model} · {num}, {attempts} each"
    names = (
        "",
        "items",
        f"avg@{plan.attempts}",
        *(
            (f"pass@{evaluation_report.k}", f"majority@{evaluation_report.k}")
            if evaluation_report.k > 1
            else ()
        ),
    )
    rows = [
        (
            row.kind or "(no kind)",
            f"{row.items:,}",
            *map(_format_estimate, (row.average, row.passes, row.majority)),
        )
        for row in evaluation_report.rows
    ]
    lines = [head, *align_columns([names, *(row[: len(names)] for row in rows)])]
    if len(evaluation_report.rewards) > 1 or evaluation_report.metrics:
        named = {**evaluation_report.rewards, **evaluation_report.metrics}
        lines.append("mean " + ", ".join(f"{name} {value:.3g}" for name, value in named.items()))
    return "\n".join([*lines, *_closing_lines(evaluation_report)])


def _closing_lines(evaluation_report: EvaluationReport) -> list[str]:
    spent = evaluation_report.spent
    turns, calls = (
        _pluralize_noun(f"{spent.turns_mean:.3g}", "turn"),
        _pluralize_noun(f"{spent.calls_mean:.3g}", "call"),
    )
    details = f"{turns} and {calls} below the root in {format_duration(spent.seconds_mean)}"
    dollars = ", cost unknown" if spent.cost is None else f", ${format_plain_number(spent.cost, 4)}"
    lines = [
        "ended "
        + ", ".join(f"{count:,} {stop}" for stop, count in evaluation_report.stops.items()),
        f"an attempt took {details} (95 % within {format_duration(spent.seconds_p95)})",
        f"in all {spent.input_tokens:,} tokens in, {spent.output_tokens:,} out, {spent.requests:,} "
        f"requests{dollars}",
    ]
    if evaluation_report.failed:
        lines.append(
            f"{evaluation_report.failed:,} of {evaluation_report.attempts:,} attempts failed and "
            f"are not counted; the first: {evaluation_report.first_error}"
        )
    return lines


def _pluralize_noun(number: str, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == "1" else "s")


def _format_estimate(figure: MeanEstimate | None) -> str:
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.2f} {figure.high:.2f}]"


def align_columns(rows: Sequence[Sequence[str]], numbers: Collection[int] = (1,)) -> list[str]:
    """Format rows of table cells as lines of text in which the columns are aligned.

    Columns whose index is in ``numbers`` are right-aligned.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "   ".join(
            text.rjust(widths[column]) if column in numbers else text.ljust(widths[column])
            for column, text in enumerate(row)
        ).rstrip()
        for row in rows
    ]
