"""Scores of an answer against the gold, by name. Each is called with (answer, item) and gives a number from 0 to 1."""

from __future__ import annotations

from ramify.tasks.scoring.choice import choice
from ramify.tasks.scoring.exact import exact, normalised
from ramify.tasks.scoring.f1 import f1
from ramify.tasks.scoring.numeric import Numeric, last_number, numeric
from ramify.tasks.simple import AnswerReward

__all__ = ["SCORERS", "Numeric", "choice", "exact", "f1", "last_number", "normalised", "numeric"]

SCORERS: dict[str, AnswerReward] = {
    "choice": choice,
    "exact": exact,
    "f1": f1,
    "last_number": last_number,
    "normalised": normalised,
    "numeric": numeric,
}
"""Name -> score."""
