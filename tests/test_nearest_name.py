"""The suggestion for a misspelled name: the fewest edits win, and then the order of the names."""

from __future__ import annotations

import pytest

from ramify.nearest_name import nearest_name


@pytest.mark.parametrize(
    ("given", "known", "suggested"),
    [
        ("modle", ["mode", "model"], "mode"),  # one edit each: the first of them
        ("modle", ["model", "mode"], "model"),
        ("tset", ["reset", "test", "set"], "test"),
        ("splti", ["split", "splits"], "split"),
        ("MODEL", ["mode", "model"], "model"),
        ("max_cots", ["max_tokens", "max_cost"], "max_cost"),
        ("cots", {"cost", "cot"}, "cost"),  # a set is taken in alphabetical order
        ("zebra", ["model", "mode"], None),
        ("anything", [], None),
    ],
)
def test_nearest_name(given: str, known: list[str], suggested: str | None) -> None:
    assert nearest_name(given, known) == suggested


def test_cutoff_of_zero_always_suggests() -> None:
    assert nearest_name("zebra", ["model", "mode"], cutoff=0) is not None
