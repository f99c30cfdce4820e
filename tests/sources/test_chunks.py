"""``chunks``: no part is larger than asked, nothing is lost, and records and sections stay whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.sources.text_chunks import chunks

RECORDS = "".join(f'{{"id": {number}, "note": "{"x" * (number % 40)}"}}\n' for number in range(900))
SECTIONS = "".join(
    f"# Section {number}\n\n{'One sentence of it. ' * 12}\n\n{'Another one. ' * 9}\n\n"
    for number in range(40)
)


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


@given(
    st.text(alphabet=st.sampled_from("ab \n\r#é机\U0001f600\ud800-"), max_size=2_000),
    st.integers(50, 200),
)
def test_parts_of_a_text_are_that_text_within_the_bound(text: str, tokens: int):
    parts = chunks(tokens, text)
    assert "".join(part["text"] for part in parts) == text
    assert all(0 < size(part["text"]) <= 3 * tokens for part in parts)


@settings(max_examples=40)
@given(
    st.dictionaries(st.text(max_size=80), st.text("ab \né机", max_size=600), max_size=12),
    st.integers(50, 200),
)
def test_parts_of_several_texts_are_within_the_bound(texts: dict[str, str], tokens: int):
    parts = chunks(tokens, texts)
    assert all(size(part["text"]) <= 3 * tokens for part in parts)
    assert sum(part["text"].count("机") for part in parts) >= sum(
        text.count("机") for text in texts.values()
    )


def test_records_stay_whole():
    parts = chunks(300, RECORDS)
    assert len(parts) > 10
    assert all(part["text"].startswith("{") and part["text"].endswith("}\n") for part in parts)
    assert all(size(part["text"]) > 450 for part in parts[:-1])


def test_a_part_ends_before_a_heading():
    parts = chunks(400, SECTIONS)
    assert all(part["text"].startswith("# Section") for part in parts)
    assert all(size(part["text"]) >= 600 for part in parts[:-1])


def test_places_are_lines():
    text = "".join(f"line {number}\n" for number in range(1, 101))
    assert [part["place"] for part in chunks(50, text)][:2] == ["lines 1-19", "lines 20-37"]
    assert chunks(50, text)[1]["text"].startswith("line 20\n")
    assert chunks(50, "one line")[0]["place"] == "lines 1-1"


def test_small_texts_share_a_part_and_begin_with_their_names():
    texts = {f"f{number}.txt": f"content {number}\n" for number in range(10)}
    parts = chunks(60, texts)
    assert parts[0]["place"] == "f0.txt:1-1 to f6.txt:1-1"
    assert parts[0]["text"].startswith("== f0.txt ==\ncontent 0\n\n== f1.txt ==\n")
    assert [part["place"] for part in chunks(50, ["a", "b"])] == ["0:1-1 to 1:1-1"]


def test_nothing_has_no_parts():
    assert chunks(50, "") == chunks(50, {}) == chunks(50, {"a": ""}) == []


@pytest.mark.parametrize(
    ("tokens", "text", "error"),
    [
        (0, "a", "tokens=0: give a whole number, 50 or more"),
        (True, "a", "tokens=True"),
        ("9", "a", "tokens='9'"),
        (50, None, "this session has no context: give text="),
        (50, 7, "chunks cuts texts, and this is a int: make a text of it first"),
        (50, {"a": [1]}, "chunks cuts texts, and 'a' is a list"),
        (50, [b"a"], "chunks cuts texts, and '0' is a bytes"),
    ],
)
def test_wrong_arguments_are_refused(tokens: Any, text: Any, error: str):
    with pytest.raises((TypeError, ValueError)) as raised:
        chunks(tokens, text)
    assert str(raised.value).startswith(error)
