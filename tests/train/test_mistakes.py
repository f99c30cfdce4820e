"""Wrong configurations (``benchmarks/bring_your_own_mistakes.py``): ``ramify train`` and ``ramify
eval`` answer each by one line with its cure before they import PyTorch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mistakes() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("bring_your_own_mistakes")
    sys.path.pop(0)


def test_each_mistake_is_answered_by_one_line_before_torch(mistakes: Any, tmp_path: Path) -> None:
    mistakes.prepare(tmp_path)
    answers = mistakes.answers(tmp_path, mistakes.MISTAKES)
    faults = {
        mistake.name: (problem, answer.text)
        for mistake, answer in zip(mistakes.MISTAKES, answers, strict=True)
        if (problem := mistakes.fault(mistake, answer))
    }
    assert not faults
    assert len(answers) >= 25


def test_check_can_fail(mistakes: Any, tmp_path: Path) -> None:
    """The same recipe without a mistake gets as far as the weights, which this folder lacks."""
    mistakes.prepare(tmp_path)
    right = mistakes.Mistake("none", ("train", "mine.py", "--out", "out"), ("the cure",))
    (answer,) = mistakes.answers(tmp_path, [right])
    problem = mistakes.fault(right, answer)
    assert "PyTorch was imported" in problem
    assert "does not say the cure" in problem
