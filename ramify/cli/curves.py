"""A training run as it is shown: measurements in, a few rows of text out. Draws nothing itself.

tiny · rl · step 23 · 1 min 12 s · 9,120 tokens/s
reward      ▁▂▃▃▄▅▅▆▆▆▇▇▇  0.81     validation 0.85 (best 0.85 at step 20)
loss        ▇▆▅▅▄▃▃▂▂▂▁▁▁  0.118
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from ramify.train.metrics import StepMetrics

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("reward", "child_reward", "loss", "grad_norm", "tokens_per_s")
"""Curves, where they were measured."""


class TerminalCurves(msgspec.Struct):
    """What was measured so far."""

    name: str
    stage: str = "starting"
    step: int = 0
    seconds: float = 0.0
    curves: dict[str, list[float]] = {}
    scores: list[tuple[int, float]] = []
    """(step, reward on the validation stream)"""
    final: dict[str, float] = {}
    """``last test/reward`` and the like, from the end of the run."""

    def add(self, measured: StepMetrics) -> None:
        values = measured.values
        self.step, self.seconds = measured.step, measured.at_s
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
        """The picture, at most ``width`` characters wide."""
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
    """``values`` as one row of at most ``width`` bars, each the mean of its share of them.

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
    """One measurement in a line, for a log."""
    wanted = {
        name: value
        for name, value in measured.values.items()
        if "/" in name or name in SHOWN or name == "silent"
    }
    return f"{measured.at_s:8.1f} s  {measured.stage} {measured.step}  " + "  ".join(
        f"{name} {value:.4g}" for name, value in wanted.items()
    )
