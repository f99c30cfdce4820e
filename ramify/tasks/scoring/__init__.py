"""Named functions that score a model's answer by comparing it with the right one.

They are called with the answer and the task item, and return a number from 0 to 1.
"""

from __future__ import annotations

from ramify.plugins import PluginRegistry
from ramify.tasks.scoring.answer_text import (
    IntervalF1Scorer,
    NumericScorer,
    exact,
    f1,
    interval_f1,
    last_number,
    line_f1,
    normalised,
    numeric,
)
from ramify.tasks.scoring.choice import choice
from ramify.tasks.scoring.math_answer import MathScorer, boxed_math, math_answer
from ramify.tasks.scoring.unit_tests import UnitTestScorer, unit_tests

__all__ = [
    "SCORERS",
    "IntervalF1Scorer",
    "MathScorer",
    "NumericScorer",
    "UnitTestScorer",
    "boxed_math",
    "choice",
    "exact",
    "f1",
    "interval_f1",
    "last_number",
    "line_f1",
    "math_answer",
    "normalised",
    "numeric",
    "unit_tests",
]

SCORERS = PluginRegistry(
    "score",
    "ramify.scores",
    {
        "boxed_math": boxed_math,
        "choice": choice,
        "exact": exact,
        "f1": f1,
        "interval_f1": interval_f1,
        "last_number": last_number,
        "line_f1": line_f1,
        "math": math_answer,
        "normalised": normalised,
        "numeric": numeric,
        "unit_tests": unit_tests,
    },
    others="module:name or file.py:name of a function of (answer, item)",
)
"""Maps the name of each score to a function that takes an answer and an item.

Example:
    SCORERS["f1"]("the web host", tasks.Item("?", gold="web host"))    # 1.0
"""
