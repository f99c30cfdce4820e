"""Patterns that are compiled when they are first used."""

from __future__ import annotations

import re

import pytest

from ramify.lazy_pattern import lazy_pattern


def test_pattern_is_compiled_at_its_first_use() -> None:
    word = lazy_pattern(r"(?P<first>\w)\w*", re.ASCII)
    assert [found["first"] for found in word.finditer("one two")] == ["o", "t"]
    assert word.sub("-", "a b") == "- -"
    assert (word.pattern, word.groups) == (r"(?P<first>\w)\w*", 1)
    wrong = lazy_pattern("(")
    with pytest.raises(re.error):
        wrong.search("")
