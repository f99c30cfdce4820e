"""Needles: exactly one sentence answers the question, at any depth; distractors do not."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.extras.suites.niah import needle
from ramify.tasks.validation import validate


@pytest.mark.parametrize("chars", [1000, 50_000, 10_000_000])
def test_exactly_one_sentence_answers_the_question(chars: int) -> None:
    task = needle(chars=chars, distractors=5)
    for item in itertools.islice(task.splits["test"], 5 if chars < 10**6 else 1):
        assert len(item.context) == pytest.approx(chars, rel=0.15 if chars == 1000 else 0.01)
        name = item.question.removeprefix("What is the access code of ").rstrip("?")
        assert re.findall(rf"The access code of {name} is (\d+)\.", item.context) == [item.gold]
        assert len(re.findall(r"access code of \w+ (?:is|was) (\d+)\.", item.context)) == 6
        assert len(set(re.findall(r"access code of \w+ (?:is|was) (\d+)\.", item.context))) == 6


def test_needle_task_is_valid_and_covers_all_depths() -> None:
    task = needle(chars=2000)
    validate(task, num=20)
    kinds = {item.kind for item in itertools.islice(task.splits["train"], 200)}
    assert kinds == {f"depth {low}-{low + 10} %" for low in range(0, 100, 10)}


@pytest.mark.parametrize(
    ("depth", "kind"), [(0.0, "depth 0-10 %"), (0.55, "depth 50-60 %"), (1.0, "depth 90-100 %")]
)
def test_depth_sets_the_position_of_the_needle(depth: float, kind: str) -> None:
    items = itertools.islice(needle(chars=20_000, depth=depth, distractors=0).splits["test"], 20)
    assert {item.kind for item in items} == {kind}


@pytest.mark.parametrize(
    "options",
    [{"chars": 10}, {"distractors": -1}, {"chars": 1000, "distractors": 6}, {"depth": 1.5}],
)
def test_invalid_needle_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needle: chars="):
        needle(**options)
