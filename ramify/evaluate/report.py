"""What an evaluation came to: figures by kind with their intervals, what it cost, and the
difference between two.

    ledger/test · openai:gpt-5-mini · 100 items, 4 attempts each
                 items   avg@4               pass@4              majority@4
    all            100   0.612 [0.54 0.69]   0.840 [0.77 0.91]   0.690 [0.60 0.78]
    count           21   …

``avg`` is the mean reward; ``pass`` and ``majority`` count an attempt as right where its reward is
1. Items whose attempts failed for reasons not the model's own are left out of a figure that they
are too few for, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ramify.errors import ConfigError
from ramify.evaluate.run import AttemptOutcome, Evaluation, EvaluationPlan
from ramify.evaluate.statistics import (
    MeanEstimate,
    majority_at_k,
    mean_with_interval,
    paired_difference,
    pass_at_k,
    quantile,
)

RIGHT = 1 - 1e-9
"""The reward from which on an attempt counts as right."""
ALL = "all"


class ReportRow(msgspec.Struct, frozen=True):
    """The figures of one kind of item."""

    kind: str
    items: int
    average: MeanEstimate | None
    """Mean reward over attempts, then over items. None where no attempt was scored."""
    passes: MeanEstimate | None
    """pass@k; None where no item has k scored attempts."""
    majority: MeanEstimate | None
    """majority@k; the same."""


class AttemptTotals(msgspec.Struct, frozen=True):
    """What the attempts took."""

    input_tokens: int
    output_tokens: int
    requests: int
    """To models, paid or possibly paid."""
    cost: float | None
    """Dollars; None where a model has no price."""
    seconds_mean: float
    """Of an attempt, from question to answer."""
    seconds_p95: float
    turns_mean: float
    """Of the root."""
    calls_mean: float
    """Below the root."""


class EvaluationReport(msgspec.Struct, frozen=True):
    """An evaluation in figures."""

    plan: EvaluationPlan
    k: int
    attempts: int
    """Made."""
    failed: int
    """Of those, how many have no reward."""
    first_error: str
    rows: tuple[ReportRow, ...]
    """All items, then each kind."""
    rewards: dict[str, float]
    """Reward name -> mean over scored attempts."""
    metrics: dict[str, float]
    """Metric name -> mean over the attempts that have it."""
    stops: dict[str, int]
    """How attempts ended -> how many."""
    spent: AttemptTotals


def report(evaluation: Evaluation, *, k: int | None = None, seed: int = 0) -> EvaluationReport:
    """The figures of ``evaluation``. ``k`` is that of pass@k and majority@k, by default all
    attempts; ``seed`` that of the bootstrap. Raises ConfigError for a k that there are not enough
    attempts for, and where there is no outcome."""
    plan, outcomes = evaluation.plan, evaluation.outcomes
    k = plan.attempts if k is None else k
    check_k(k, plan.attempts)
    if not outcomes:
        raise ConfigError(f"there is nothing to report: no attempt at '{plan.task}' was made")
    scored = [each for each in outcomes if each.reward is not None]
    kinds = sorted({each.kind for each in outcomes})
    groups = [
        (ALL, outcomes),
        *((kind, [each for each in outcomes if each.kind == kind]) for kind in kinds),
    ]
    failures = [each.error for each in outcomes if each.reward is None]
    return EvaluationReport(
        plan,
        k,
        len(outcomes),
        len(failures),
        failures[0] if failures else "",
        tuple(
            _row(kind, group, k, seed) for kind, group in (groups if len(kinds) > 1 else groups[:1])
        ),
        _means(each.rewards for each in scored),
        _means(each.metrics for each in scored),
        dict(Counter(str(each.stop) for each in outcomes).most_common()),
        _spent(outcomes),
    )


def check_k(k: int, attempts: int) -> None:
    """Raises ConfigError for a pass@k that so many attempts at each item do not give."""
    if k < 1:
        raise ConfigError(f"pass@{k}: k is at least 1")
    if k > attempts:
        raise ConfigError(
            f"pass@{k} needs at least {k} attempts at each item (n), and there are {attempts}: "
            "raise n or lower k"
        )


def difference(ours: Evaluation, theirs: Evaluation, *, seed: int = 0) -> tuple[MeanEstimate, int]:
    """(mean reward of ``ours`` less that of ``theirs`` over the items that both have, how many
    those are). Raises ConfigError for evaluations of different tasks, and where no scored item is
    in both."""
    check_same_items(ours.plan, theirs.plan)
    a, b = (_by_item(each.outcomes) for each in (ours, theirs))
    both = [item for item in a if item in b]
    if not both:
        raise ConfigError("the two evaluations have no scored item in common")
    first, second = ([_mean_reward(side[item]) for item in both] for side in (a, b))
    return paired_difference(first, second, seed), len(both)


def check_same_items(ours: EvaluationPlan, theirs: EvaluationPlan) -> None:
    """Raises ConfigError, naming what differs, where the items of one evaluation are not those of
    the other."""
    for name in ("task", "options", "split"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise ConfigError(
                f"the evaluations cannot be compared: {name} is {mine!r} here and {other!r} there"
            )


def _by_item(outcomes: Iterable[AttemptOutcome]) -> dict[str, list[AttemptOutcome]]:
    """Item -> its attempts that have a reward, in order."""
    found: dict[str, list[AttemptOutcome]] = {}
    for each in outcomes:
        if each.reward is not None:
            found.setdefault(each.item, []).append(each)
    return found


def _row(kind: str, outcomes: Sequence[AttemptOutcome], k: int, seed: int) -> ReportRow:
    items = _by_item(outcomes)
    enough = [attempts for attempts in items.values() if len(attempts) >= k]

    def figure(
        of: Callable[[list[AttemptOutcome]], float], among: Iterable[list[AttemptOutcome]]
    ) -> MeanEstimate | None:
        values = [of(attempts) for attempts in among]
        return mean_with_interval(values, seed) if values else None

    return ReportRow(
        kind,
        len({each.item for each in outcomes}),
        figure(_mean_reward, items.values()),
        figure(lambda attempts: pass_at_k(len(attempts), sum(map(_is_right, attempts)), k), enough),
        figure(lambda attempts: _majority(attempts, k), enough),
    )


def _mean_reward(attempts: Sequence[AttemptOutcome]) -> float:
    return sum(each.reward or 0.0 for each in attempts) / len(attempts)


def _is_right(attempt: AttemptOutcome) -> bool:
    return attempt.reward is not None and attempt.reward >= RIGHT


def _majority(attempts: Sequence[AttemptOutcome], k: int) -> float:
    return majority_at_k(
        [each.answer for each in attempts], [float(_is_right(each)) for each in attempts], k
    )


def _means(found: Iterable[dict[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for each in found:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


def _spent(outcomes: Sequence[AttemptOutcome]) -> AttemptTotals:
    seconds = sorted(each.seconds for each in outcomes)
    costs = [each.cost for each in outcomes if each.cost is not None]
    num = len(outcomes)
    return AttemptTotals(
        sum(each.usage.input_tokens for each in outcomes),
        sum(each.usage.output_tokens for each in outcomes),
        sum(each.usage.calls for each in outcomes),
        sum(costs) if costs else None,
        sum(seconds) / num,
        quantile(seconds, 0.95),
        sum(each.turns for each in outcomes) / num,
        sum(each.calls for each in outcomes) / num,
    )


# --- as text


def table(found: EvaluationReport) -> str:
    """``found`` for a person, lines below 100 characters."""
    plan = found.plan
    num, each = _many(f"{found.rows[0].items:,}", "item"), _many(str(plan.attempts), "attempt")
    head = f"{plan.task}/{plan.split} · {plan.model} · {num}, {each} each"
    names = (
        "",
        "items",
        f"avg@{plan.attempts}",
        *((f"pass@{found.k}", f"majority@{found.k}") if found.k > 1 else ()),
    )
    rows = [
        (
            row.kind or "(no kind)",
            f"{row.items:,}",
            *map(_shown, (row.average, row.passes, row.majority)),
        )
        for row in found.rows
    ]
    lines = [head, *_aligned([names, *(row[: len(names)] for row in rows)])]
    if len(found.rewards) > 1 or found.metrics:
        named = {**found.rewards, **found.metrics}
        lines.append("mean " + ", ".join(f"{name} {value:.3g}" for name, value in named.items()))
    return "\n".join([*lines, *_closing(found)])


def _closing(found: EvaluationReport) -> list[str]:
    spent = found.spent
    turns, calls = (
        _many(f"{spent.turns_mean:.3g}", "turn"),
        _many(f"{spent.calls_mean:.3g}", "call"),
    )
    each = f"{turns} and {calls} below the root in {spent.seconds_mean:.3g} s"
    dollars = "" if spent.cost is None else f", ${spent.cost:.4g}"
    lines = [
        "ended " + ", ".join(f"{count:,} {stop}" for stop, count in found.stops.items()),
        f"an attempt took {each} (95 % within {spent.seconds_p95:.3g} s)",
        f"in all {spent.input_tokens:,} tokens in, {spent.output_tokens:,} out, {spent.requests:,} "
        f"requests{dollars}",
    ]
    if found.failed:
        lines.append(
            f"{found.failed:,} of {found.attempts:,} attempts failed and are left out; the first: "
            f"{found.first_error}"
        )
    return lines


def _many(number: str, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == "1" else "s")


def _shown(figure: MeanEstimate | None) -> str:
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.2f} {figure.high:.2f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "   ".join(_cell(text, widths, column) for column, text in enumerate(row)).rstrip()
        for row in rows
    ]


def _cell(text: str, widths: Sequence[int], column: int) -> str:
    return text.rjust(widths[column]) if column == 1 else text.ljust(widths[column])
