"""Table and picture of docs/learning.md from the figures of ``training.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from figures import Figure

DOCS = Path(__file__).parents[1] / "docs"
GROWTH = "growth of a step with "
WIDTH, HEIGHT, PANEL, TOP, BOTTOM = 760, 300, 240, 30, 250


def write(figures: Sequence[Figure]) -> None:
    """Write the table between the page's marks, and the picture beside the page."""
    (DOCS / "training.svg").write_text(
        picture([figure for figure in figures if figure.name.startswith(GROWTH)])
    )
    page = (DOCS / "learning.md").read_text(encoding="utf-8")
    begin, end = "<!-- begin figures -->\n", "<!-- end figures -->"
    head, _, rest = page.partition(begin)
    (DOCS / "learning.md").write_text(
        head + begin + table(figures) + end + rest.partition(end)[2], encoding="utf-8"
    )


def table(figures: Sequence[Figure]) -> str:
    lines = ["| figure | measured | promised | beside it |", "| --- | --- | --- | --- |"]
    for figure in figures:
        bounds = (("≤", figure.floor), ("≥", figure.least))
        promised = ", ".join(f"{sign} {bound:.3g}" for sign, bound in bounds if bound is not None)
        value = "not measured" if figure.value is None else f"{figure.value:.3g} {figure.unit}"
        beside = ", ".join(f"{name}: {short(each)}" for name, each in figure.against.items())
        lines.append(f"| {figure.name} | {value} | {promised} | {beside} |")
    return "\n".join(lines) + "\n"


def short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def picture(growths: Sequence[Figure]) -> str:
    """Return an SVG of the seconds of a step by siblings, turns and length of the prompt, on
    logarithmic scales."""
    curves = {
        figure.name.removeprefix(GROWTH).partition(",")[0]: {
            int(place): float(str(seconds).removesuffix(" s"))
            for place, seconds in figure.against.items()
        }
        for figure in growths
    }
    every = [seconds for curve in curves.values() for seconds in curve.values()]
    low, high = math.log(min(every)) - 0.2, math.log(max(every)) + 0.2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for index, (name, curve) in enumerate(curves.items()):
        left, right = index * PANEL + 50, (index + 1) * PANEL
        first, last = math.log(min(curve)), math.log(max(curve))
        points = []
        for place, seconds in curve.items():
            x = left + (math.log(place) - first) / (last - first) * (right - left)
            y = BOTTOM - (math.log(seconds) - low) / (high - low) * (BOTTOM - TOP)
            points.append((x, y))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#1f77b4"/>')
            parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{place}</text>')
            parts.append(
                f'<text x="{x:.1f}" y="{y - 7:.1f}" text-anchor="middle" fill="#555">{seconds:.2g}</text>'
            )
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>')
        parts.append(
            f'<path d="M{left - 12} {TOP}V{BOTTOM}H{right + 8}" fill="none" stroke="#888"/>'
        )
        parts.append(
            f'<text x="{(left + right) / 2}" y="{BOTTOM + 36}" text-anchor="middle">{name}</text>'
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="16" text-anchor="middle">CPU seconds of a step, one thread</text></svg>'
    )
    return "\n".join(parts) + "\n"
