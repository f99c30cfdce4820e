"""Parts of a context: within their bound, and every character in exactly one of them."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from ramify import ConfigError, plans

TEXTS = st.text(alphabet=st.sampled_from("ab .!?\n\té😀漢"), max_size=400)


@hypothesis.given(
    text=TEXTS,
    by=st.sampled_from(["lines", "records", "sentences", "tokens"]),
    tokens=st.integers(16, 60),
    share=st.integers(0, 4),
    max_records=st.integers(0, 3),
)
@hypothesis.settings(deadline=None)
def test_no_character_of_one_text_is_lost_or_doubled(
    text: str, by: str, tokens: int, share: int, max_records: int
) -> None:
    overlap = tokens // 2 * share // 4
    step = plans.SplitText(by, tokens, overlap, max_records=max_records, cut=True)  # type: ignore[arg-type]
    parts = step.parts(text)
    assert "".join(part.text[part.lead :] for part in parts) == text
    at = 0
    for part in parts:
        (span,) = part.spans
        assert span.start == at < span.end
        assert part.text == text[span.start - part.lead : span.end]
        assert len(part.text.encode()) <= 3 * tokens
        assert len(text[span.start - part.lead : span.start].encode()) <= 3 * overlap
        assert not max_records or len(part.records) <= max_records
        at = span.end
    assert at == len(text)


@hypothesis.given(
    texts=st.dictionaries(st.text(max_size=30), TEXTS, max_size=5), tokens=st.integers(30, 80)
)
@hypothesis.settings(deadline=None)
def test_no_character_of_several_texts_is_lost_or_doubled(
    texts: dict[str, str], tokens: int
) -> None:
    parts = plans.SplitText("lines", tokens, cut=True).parts(texts)
    read: dict[str, int] = dict.fromkeys(texts, 0)
    for part in parts:
        assert len(part.text.encode()) <= 3 * tokens
        for span in part.spans:
            assert span.start == read[span.name]
            assert texts[span.name][span.start : span.end] in part.text
            read[span.name] = span.end
    assert read == {name: len(text) for name, text in texts.items()}


def test_a_part_ends_at_the_last_line_that_fits() -> None:
    parts = plans.SplitText("lines", 16).parts("aaaa aaaa aaaa\n" * 7)
    assert [part.text.count("\n") for part in parts] == [3, 3, 1]
    assert [part.place for part in parts] == ["lines 1-3", "lines 4-6", "line 7"]


def test_records_begin_at_the_separator() -> None:
    text = "From: a\nhello\n\nworld\nFrom: b\nbye\n"
    (part,) = plans.SplitText("records", 100, separator="^From:").parts(text)
    assert part.numbered() == "1: From: a\nhello\n\nworld\n2: From: b\nbye"
    blank = plans.SplitText("records", 100).parts(text)[0]
    assert blank.numbered() == "1: From: a\nhello\n2: world\nFrom: b\nbye"


def test_small_texts_share_a_part() -> None:
    (part,) = plans.SplitText("lines", 100).parts({"a.txt": "one\n", "b.txt": "two"})
    assert part.text == "== a.txt ==\none\n== b.txt ==\ntwo"
    assert part.place == "a.txt:1 to b.txt:1"
    assert part.numbered() == "1: one\n2: two"


def test_rows_of_a_list_are_lines() -> None:
    (part,) = plans.SplitText("lines", 100).parts([{"a": 1}, {"a": 2}])
    assert part.numbered() == '1: {"a":1}\n2: {"a":2}'


def test_pictures_are_refused() -> None:
    keys = ("picture", "name", "kind", "width", "height", "bytes")
    picture = {**dict.fromkeys(keys, 1), "picture": "0" * 64}
    with pytest.raises(ConfigError, match="the context has pictures: leave them out"):
        plans.SplitText().parts({"a.png": picture, "b.txt": "text"})


def test_a_record_that_is_too_large_is_named_with_its_option() -> None:
    text = "short\n" + "word " * 40 + "\n"
    with pytest.raises(ConfigError, match=r"the line at line 2 \('word word.*201 bytes.*--cut"):
        plans.SplitText("lines", 20).parts(text)
    parts = plans.SplitText("lines", 20, cut=True).parts(text)
    assert "".join(part.text for part in parts) == text


def test_an_overlap_repeats_whole_lines() -> None:
    parts = plans.SplitText("lines", 20, overlap=6).parts("aaaa aaaa aaaa\n" * 8)
    assert [(part.lead, part.text.count("\n")) for part in parts] == [(0, 4), (15, 4), (15, 2)]
    assert [len(part.records) for part in parts] == [4, 3, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 3}, "tokens=3: give 16 or more"),
        ({"overlap": 3000}, "more than half of 4000"),
        ({"separator": "^a"}, "separator works only with by='records'"),
        ({"by": "records", "separator": "(a"}, r"pattern '\(a' is not understood"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plans.SplitText(**options)  # type: ignore[arg-type]


def test_tables_keep_the_names_of_their_columns() -> None:
    """Each part has those of one table; the span of the first part has the header, too."""
    tables = {
        "a.csv": "id,text\n1,x\n2,y\n",
        "b.csv": "id,text\n3,z\n",
        "c.csv": "n\n5\n",
        "d": "n\n",
    }
    first, second = plans.SplitText("lines", 32, header=True).parts(tables)
    assert (first.numbered(), first.place) == (
        "id,text\n1: 1,x\n2: 2,y\n3: 3,z",
        "a.csv:2-3 to b.csv:2",
    )
    assert [(span.name, span.start, span.end) for span in (*first.spans, *second.spans)] == [
        ("a.csv", 0, 16), ("b.csv", 0, 12), ("c.csv", 0, 4),
    ]  # fmt: skip
    assert second.text == "== c.csv ==\nn\n5\n"
    for options, message in (
        ({"by": "records"}, "header works only with by='lines' and no overlap"),
        ({"overlap": 4}, "header works only with by='lines' and no overlap"),
    ):
        with pytest.raises(ConfigError, match=message):
            plans.SplitText(**{"by": "lines", "tokens": 16, "header": True, **options})
    with pytest.raises(ConfigError, match="the header line of the table has 60 bytes"):
        plans.SplitText("lines", 16, header=True).parts("x" * 60 + "\n1\n")
