"""Scores of single answers, worked out by hand, and of hostile answers."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.tasks.base import Item
from ramify.tasks.scoring import SCORERS, NumericScorer, numeric
from ramify.tasks.scoring.choice import find_named_choice


def item(gold: Any, **metadata: Any) -> Item:
    return Item("?", gold=gold, id="t/test/0", metadata=metadata)


@pytest.mark.parametrize(
    ("scorer", "answer", "gold", "expected"),
    [
        ("exact", 7, "7", 1.0),
        ("exact", " 7\n", 7, 1.0),
        ("exact", 7.0, 7, 0.0),
        ("exact", True, 1, 0.0),
        ("exact", "b", ["a", "b"], 1.0),
        ("exact", ["a", "b"], ["a", "b"], 0.0),  # a list of golds lists alternatives
        ("exact", ["a", "b"], [["a", "b"]], 1.0),
        ("exact", {"n": 1}, '{"n":1}', 1.0),
        ("exact", None, "None", 0.0),
        ("exact", "", "", 0.0),
        ("normalised", "The Louvre!", "louvre", 1.0),
        ("normalised", "ﬁne", "fine", 1.0),  # a ligature
        ("normalised", "the", "an", 0.0),  # nothing is left of either
        ("f1", "red blue", "red green", 0.5),
        ("f1", "the cat sat", "cat", 2 / 3),
        ("f1", "a a b", ["x", "a b"], 1.0),
        ("f1", "no", "yes", 0.0),
        ("numeric", "$1,234.50", 1234.5, 1.0),
        ("numeric", "1.234e3", "1234", 1.0),
        ("numeric", "−5", -5, 1.0),
        ("numeric", "it is 3 or 4", 4, 0.0),
        ("numeric", "version 1.2.3", 1.2, 0.0),
        ("numeric", "abc123", 123, 0.0),
        ("numeric", True, 1, 0.0),
        ("numeric", float("nan"), 0, 0.0),
        ("numeric", 100001, 100000, 0.0),  # whole numbers are exact
        ("numeric", 0.1 + 0.2, 0.3, 1.0),
        ("last_number", "3 apples and 4 pears make 7.", 7, 1.0),
    ],
)
def test_scorers_give_the_expected_scores(
    scorer: str, answer: Any, gold: Any, expected: float
) -> None:
    assert SCORERS[scorer](answer, item(gold)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        ("B", 1),
        ("(b)", 1),
        ("b.", 1),
        ("**B**", 1),
        (2, 1),
        ("2)", 1),
        ("The answer is B.", 1),
        ("Answer: (B)", 1),
        ("I think that it is (B), since A rusts", 1),
        ("Lyon", 1),
        ("lyon.", 1),
        ("Paris or Lyon", None),
        ("The answer is A or (B)", None),
        ("E", None),
        (0, None),
        ("", None),
        (None, None),
        ("B" * 5000, None),
    ],
)
def test_choice_is_recognised_in_the_answer(answer: Any, index: int | None) -> None:
    assert find_named_choice(answer, ["Paris", "Lyon", "Nice", "Lille"]) == index


@pytest.mark.parametrize("gold", ["B", 1, "Lyon"])
def test_choice_gold_may_be_letter_index_or_text(gold: Any) -> None:
    asked = item(gold, choices=["Paris", "Lyon"])
    assert [SCORERS["choice"](answer, asked) for answer in ("b", "A", "Lyon")] == [1.0, 0.0, 1.0]


def test_choice_without_options_or_with_unknown_gold_names_the_item() -> None:
    with pytest.raises(ConfigError, match="t/test/0: choice needs 2 to 26 options"):
        SCORERS["choice"]("A", item("A"))
    with pytest.raises(ConfigError, match="t/test/0: its gold 'Rome' is not one of its 2 choices"):
        SCORERS["choice"]("A", item("Rome", choices=["Paris", "Lyon"]))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("scorer", sorted(SCORERS))
@pytest.mark.parametrize(
    "answer",
    [
        10**6000,
        -(10**6000),
        "9" * 10**6,
        "1," * 10**6,
        "1,111" * 20_000 + "a",
        float("inf"),
        nested(5000),
        {(1, 2): object()},
        "\ud800",
        "\x00" * 1000,
        b"7",
        {1, 2},
        "e" * 99_999,
        "(" * 99_999,
        "1e9999",
        "1e-99999",
        {"8": 8},
    ],
    ids=lambda answer: f"{type(answer).__name__}",
)
def test_hostile_answers_score_zero(scorer: str, answer: Any) -> None:
    """Scoring takes bounded time (else the suite's timeout hits), never raises and gives 0."""
    gold = [7.25, 7.5] if scorer in ("interval_f1", "line_f1") else "7"
    assert SCORERS[scorer](answer, item(gold, choices=["7", "8"], tests=["assert False"])) == 0.0


def test_numeric_tolerance() -> None:
    assert NumericScorer(rel_tol=0.1)("95.0", item(100.0)) == 1.0
    assert NumericScorer(abs_tol=2)(98, item(100)) == 1.0
    assert numeric(10**400, item(10**400)) == 1.0
    assert numeric(10**400, item(1.5)) == 0.0
