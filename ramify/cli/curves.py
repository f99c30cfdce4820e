"""Training curves as text: takes step metrics, returns a few rows for the terminal.

    tiny · rl · step 23 · 72 s
    reward        ▁▂▃▃▄▅▅▆▆▆▇▇▇ 0.81
    loss          ▇▆▅▅▄▃▃▂▂▂▁▁▁ 0.118
    validation    ▁▃▆▇ 0.85   (best 0.85 at step 20)

Not here: drawing on the screen (see progress_screen.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from ramify.train.metrics import StepMetrics

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("reward", "child_reward", "loss", "grad_norm", "tokens_per_s")
"""Metrics that are drawn as curves, if the run reports them."""


class TerminalCurves(msgspec.Struct):
    """Curves and scores of a training run, collected from its step metrics."""

    name: str
    stage: str = "starting"
    step: int = 0
    seconds: float = 0.0
    curves: dict[str, list[float]] = {}
    scores: list[tuple[int, float]] = []
    """(step, reward on the validation stream)."""
    final: dict[str, float] = {}
    """Rewards from the end of the run, such as ``last test/reward``."""

    def add(self, measured: StepMetrics) -> None:
        values = measured.values
        self.step = measured.step
        self.seconds = measured.at_s
        if measured.stage in ("first", "last", "best"):
            if measured.stage == "first" and "validation/reward" in values:
                self.scores.append((measured.step, values["validation/reward"]))
            rewards = {name: value for name, value in values.items() if name.endswith("/reward")}
            self.final.update(
                {f"{measured.stage} {name}": value for name, value in rewards.items()}
            )
            return
        if measured.stage != self.stage:
            self.stage, self.curves = measured.stage, {}
        if "validation/reward" in values:
            self.scores.append((measured.step, values["validation/reward"]))
        for name in SHOWN:
            if name in values:
                self.curves.setdefault(name, []).append(values[name])

    def rows(self, width: int = 80) -> list[str]:
        """Rows of the display, each at most ``width`` characters wide."""
        head = f"{self.name} · {self.stage} · step {self.step:,} · {self.seconds:,.0f} s"
        rows = [
            head,
            *(
                f"{name:<13} {self._curve(values, width - 28)} {values[-1]:.4g}"
                for name, values in self.curves.items()
            ),
        ]
        if self.scores:
            step, best = max(self.scores, key=lambda pair: pair[1])
            shown = self._curve([score for _, score in self.scores], width - 60)
            rows.append(
                f"{'validation':<13} {shown} {self.scores[-1][1]:.4g}   (best {best:.4g} at step "
                f"{step})"
            )
        return [
            row[:width]
            for row in [*rows, *(f"{name}: {value:.4g}" for name, value in self.final.items())]
        ]

    @staticmethod
    def _curve(values: Sequence[float], width: int) -> str:
        return curve(values, max(width, 8))


def curve(values: Sequence[float], width: int) -> str:
    """Draw ``values`` as a row of at most ``width`` bars; each bar is the mean of its values.

    >>> curve([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    num = min(width, len(values))
    edges = [index * len(values) // num for index in range(num + 1)] if num else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def line(measured: StepMetrics) -> str:
    """One line for a log from one step's metrics."""
    shown = {
        name: value
        for name, value in measured.values.items()
        if "/" in name or name in SHOWN or name == "silent"
    }
    return f"{measured.at_s:8.1f} s  {measured.stage} {measured.step}  " + "  ".join(
        f"{name} {value:.4g}" for name, value in shown.items()
    )
