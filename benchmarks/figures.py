"""A figure of a benchmark: its value beside those of others, what is promised, and the table of all."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Figure(NamedTuple):
    name: str
    value: float | None
    """Measured value; None if it could not be measured."""
    unit: str
    against: dict[str, float | str]
    """Figures of other libraries, by name."""
    floor: float | None = None
    """Promised maximum."""
    valid: bool = True
    """False if the figure must not count, whatever its value."""
    least: float | None = None
    """Promised minimum, for figures where more is better."""

    @property
    def holds(self) -> bool | None:
        if self.floor is None and self.least is None:
            return None
        if self.value is None or not self.valid:
            return False
        return (self.floor is None or self.value <= self.floor) and (
            self.least is None or self.value >= self.least
        )

    def as_json(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("name", "value", "unit", "against", "floor", "least", "holds")
        }


def show(figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "figure", "ours", "others (times ours)", "promised", "holds", box=None, header_style="bold"
    )
    for figure in figures:
        others = ", ".join(
            f"{name} {with_ratio(theirs, figure)}" for name, theirs in figure.against.items()
        )
        ours = "not measured" if figure.value is None else f"{figure.value:.3g} {figure.unit}"
        bounds = (("≤", figure.floor), ("≥", figure.least))
        floor = ", ".join(
            f"{sign} {bound:.3g} {figure.unit}" for sign, bound in bounds if bound is not None
        )
        holds = {None: "", True: "[green]yes", False: "[bold red]NO"}[figure.holds]
        table.add_row(figure.name, ours, others, floor, holds)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def with_ratio(theirs: float | str, figure: Figure) -> str:
    if isinstance(theirs, str):
        return theirs
    factor = f" ({theirs / figure.value:.2g}×)" if figure.value and figure.unit != "×" else ""
    return f"{theirs:.3g}{factor}"
