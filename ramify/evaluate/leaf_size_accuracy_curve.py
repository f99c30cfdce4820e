"""Compute and draw calibration curves: a model's accuracy in plain calls of different sizes.

The points come from recorded answers, and the curve is drawn as text and SVG.

    tokens   accuracy              $ per 1M tokens
     2,000   1.000 [0.91 1.00]     0.31             ████████████████████
    16,000   0.925 [0.80 0.98]     0.26             ██████████████████▌

Which size is the best is decided by ``plans/part_size_calibration.py``; the attempts are made by
``run_evaluation.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ramify.evaluate.answer_modes import CHARS_PER_TOKEN, PlainCallModelLimits
from ramify.evaluate.evaluation_matrix import EvalMatrixCell, EvalMatrixPlan
from ramify.evaluate.evaluation_report import align_columns
from ramify.evaluate.matrix_report import is_right
from ramify.evaluate.run_evaluation import AttemptOutcome
from ramify.evaluate.statistics import share_with_interval
from ramify.plans.part_size_calibration import PartSizeAccuracy, PartSizeCalibration
from ramify.plans.text_parts import BYTES_PER_TOKEN

QUESTIONS = {"niah": ("multiquery",), "planted": ("grants",)}
"""Maps each suite to the question families that a calibration asks. Each answer needs four values
from the text, or all facts of one kind."""
FIRST_SIZE = 2_000
"""Default for the smallest number of tokens that a calibration gives to one call. A token counts as
three bytes."""
_REPLY_TOKENS = 100
"""Assumed reply tokens in the cost estimate."""
_BAR_CHARS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 300, 52, 44, 28


def calibration_sizes(room: PlainCallModelLimits) -> list[int]:
    """Return the call sizes that a calibration measures by default.

    The smallest size is doubled until the result would no longer fit into the model's window.
    """
    sizes = [FIRST_SIZE]
    while room.fits(to_suite_tokens(2 * sizes[-1])):
        sizes.append(2 * sizes[-1])
    return sizes


def to_suite_tokens(size: int) -> int:
    """Convert the size of a model call to the unit of a task suite's ``tokens`` option.

    Call sizes count a token as three bytes, and the option counts it as four characters.
    """
    return size * BYTES_PER_TOKEN // CHARS_PER_TOKEN


def call_size_of_cell(cell: EvalMatrixCell) -> int:
    """Return the size of the calls in a matrix cell, in tokens of three bytes.

    This is the unit of all call sizes.
    """
    return -(-(cell.context_tokens or 0) * CHARS_PER_TOKEN // BYTES_PER_TOKEN)


def estimate_calibration_cost(plan: EvalMatrixPlan, room: PlainCallModelLimits) -> float | None:
    """Estimate the cost of a calibration in dollars, assuming English texts and short replies.

    Return None if the model has no known price.
    """
    if room.price is None:
        return None
    read = sum(cell.plan.items * (cell.context_tokens or 0) for cell in plan.cells)
    replies = sum(cell.plan.items * _REPLY_TOKENS for cell in plan.cells)
    return (read * room.price.input + replies * room.price.output) / 1e6


def is_calibration(plan: EvalMatrixPlan) -> bool:
    """Return True if the evaluations form a calibration of one model's plain calls.

    A calibration uses the standard calibration questions.
    """
    models = {cell.plan.model for cell in plan.cells}
    return len(models) == 1 and all(
        cell.mode == "direct"
        and cell.context_tokens
        and cell.place.get("family") in QUESTIONS.get(cell.place["suite"], ())
        for cell in plan.cells
    )


def evaluation_date(plan: EvalMatrixPlan) -> str:
    """Return the date on which the evaluations began, read from their common id."""
    return f"{plan.id[:4]}-{plan.id[4:6]}-{plan.id[6:8]}"


def calibration_points(
    plan: EvalMatrixPlan, outcomes: Mapping[str, Sequence[AttemptOutcome]]
) -> tuple[PartSizeAccuracy, ...]:
    """Compute the points of a calibration curve, smallest size first.

    Sizes without a scored question are omitted.
    """
    made: dict[int, list[AttemptOutcome]] = {}
    for cell in plan.cells:
        scored = [each for each in outcomes.get(cell.record, ()) if each.reward is not None]
        made.setdefault(call_size_of_cell(cell), []).extend(scored)
    return tuple(_point(size, made[size]) for size in sorted(made) if made[size])


def _point(size: int, scored: Sequence[AttemptOutcome]) -> PartSizeAccuracy:
    # A leaf that misses a value is wrong, so scores between 0 and 1 count as 0.
    found = share_with_interval(sum(map(is_right, scored)), len(scored))
    costs = [each.cost for each in scored if each.cost is not None]
    dollars = sum(costs) / len(costs) / size * 1e6 if costs and sum(costs) else None
    return PartSizeAccuracy(size, len(scored), found.value, found.low, found.high, dollars)


def curve_lines(calibration: PartSizeCalibration) -> list[str]:
    """Format a calibration curve as lines of text, with a bar for the accuracy at each size."""
    rows = [["tokens", "questions", "accuracy", "$ per 1M tokens", ""]]
    for point in calibration.points:
        price = "-" if point.dollars is None else f"{point.dollars:.3g}"
        mark = "  best" if point.tokens == calibration.part_tokens else ""
        interval = f"{point.accuracy:.3f} [{point.low:.2f} {point.high:.2f}]"
        cells = [f"{point.tokens:,}", f"{point.items:,}", interval, price]
        rows.append([*cells, _bar(point.accuracy) + mark])
    return align_columns(rows, (0, 1, 3))


def _bar(share: float) -> str:
    eighths = round(share * _BAR_CHARS * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def curve_svg(calibration: PartSizeCalibration) -> str:
    """Draw a calibration curve as an SVG image.

    The vertical axis shows accuracy with confidence intervals, and the horizontal axis shows the
    size on a logarithmic scale.
    """
    points = calibration.points
    first, last = points[0].tokens, points[-1].tokens
    span = math.log(last / first) or 1.0

    def x(tokens: int) -> float:
        return round(_LEFT + 16 + math.log(tokens / first) / span * (_WIDTH - _LEFT - 40), 1)

    def y(share: float) -> float:
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 1)

    title = escape(f"{calibration.model}, {calibration.date}: accuracy of a leaf")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{title}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{title}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += [
            f'<path d="M{_LEFT} {y(share)}H{_WIDTH - 12}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y(share) + 4}" text-anchor="end">{share:g}</text>',
        ]
    line = " ".join(f"{x(point.tokens)},{y(point.accuracy)}" for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/>')
    for point in points:
        is_best = point.tokens == calibration.part_tokens
        across, fill = x(point.tokens), "#16a34a" if is_best else "#2563eb"
        tip = f"{point.tokens:,} tokens: {point.accuracy:.3f} [{point.low:.2f} {point.high:.2f}]"
        parts += [
            f'<path d="M{across} {y(point.low)}V{y(point.high)}" stroke="{fill}"/>',
            f'<circle cx="{across}" cy="{y(point.accuracy)}" r="{5 if is_best else 3.5}" '
            f'fill="{fill}"><title>{tip}</title></circle>',
            f'<text x="{across}" y="{_HEIGHT - 26}" text-anchor="middle">{point.tokens:,}</text>',
        ]
    parts.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">tokens of three bytes; bars are 95 % intervals; '
        f"green: the best size by accuracy and cost</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"
