"""OOLONG: all question families, the public files, and the score."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.extras.suites.oolong import LABELS, OolongScorer, oolong
from ramify.tasks.base import Item, items_of
from ramify.tasks.validation import validate


def test_all_question_families_occur_and_golds_follow_from_the_text() -> None:
    task = oolong(tokens=1_000, with_labels=True, users=3)
    assert validate(task, ("train", "validation", "test")) == ""
    kinds = set()
    for item in items_of(task, "train")[:150]:
        lines = [line.split(" || ") for line in item.context.splitlines()[1:]]
        labels = [line[3].removeprefix("Label: ") for line in lines]
        dates = [datetime.datetime.strptime(line[0], "Date: %b %d, %Y") for line in lines]
        kinds.add(item.kind)
        assert dates == sorted(dates)
        if item.kind == "counting number":
            assert item.gold == labels.count(item.question.split("'")[1])
        if item.kind == "counting most":
            most = [each for each in LABELS if labels.count(each) == max(map(labels.count, labels))]
            assert item.gold == (most[0] if len(most) == 1 else sorted(most))
    assert len(kinds) == 6 + 6 + 7
    assert {kind.split()[0] for kind in kinds} == {"counting", "user", "timeline"}


@pytest.mark.parametrize("tokens", [1_000, 128_000])
def test_tokens_sets_the_context_length(tokens: int) -> None:
    item = items_of(oolong(tokens=tokens), "test")[0]
    assert len(item.context) == pytest.approx(4 * tokens, rel=0.05)
    assert "Label:" not in item.context


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        (12, 12, 1.0),
        ("Answer: 12", 14, 0.75**2),
        ("1,012", 1013, 0.75),
        ("many", 3, 0.0),
        ("Label: [spam]", "spam", 1.0),
        ("ham", "spam", 0.0),
        ("The label 'a' is less common than the label 'b'", "less common than", 1.0),
        ("more common than, less common than", "less common than", 0.0),
        ("2024-05-03", "May 03, 2024", 1.0),
        ("b, a", ["a", "b"], 1.0),
        ("a, b, c", ["a", "b"], 0.0),
        (None, "spam", 0.0),
    ],
)
def test_oolong_score(answer: Any, gold: Any, score: float) -> None:
    assert OolongScorer()(answer, Item("?", gold=gold)) == pytest.approx(score)


def test_public_oolong_files_are_loaded(tmp_path: Path) -> None:
    answers = ["['spam']", "[12]", "[datetime.date(2024, 5, 3)]", "['a', 'b']", "Vex, Percy", "84"]
    rows = [
        {"context_window_text": "x", "context_window_text_with_labels": "y"}
        | {"question": f"{number}?", "answer": answer, "task_group": "counting"}
        for number, answer in enumerate(answers)
    ]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = oolong(test=str(path), tokens=1_000)
    items = list(items_of(task, "test"))
    golds = ["spam", 12, "May 03, 2024", ["a", "b"], ["Vex", "Percy"], 84]
    assert [item.gold for item in items] == golds
    assert (items[0].context, items[0].kind) == ("x", "counting")
    assert items_of(oolong(test=str(path), with_labels=True), "test")[0].context == "y"
    validate(task, ("train", "test"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ["users"]}, "unknown family 'users': did you mean 'user'"),
        ({"tokens": 10}, "1,000 to 10,000,000 tokens"),
        ({"labels": 1}, "labels=1 must be from 2"),
    ],
)
def test_invalid_oolong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        oolong(**options)
