"""Rows of pandas, polars, ``datasets`` and Arrow: what a model reads of them, and the same table with
the answers."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import ramify
from ramify import testing
from ramify.errors import SourceError
from ramify.types.message import Message

SCHEMA = {
    "type": "object",
    "properties": {
        "urgent": {"type": "boolean"},
        "score": {"type": "integer"},
        "share": {"type": "number"},
        "topic": {"type": "string"},
        "words": {"type": "array"},
    },
}


class Reader:
    """A model that keeps what it reads, fails on rows with ``bad``, and answers with columns."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def reply(self, messages: tuple[Message, ...]) -> str:
        asked = [message.content for message in messages if message.role == "user"]
        text = asked[0].partition("\n\nQuestion:")[0]
        if len(asked) == 1:
            self.texts.append(text)
        if "bad" in text:
            return " "
        return json.dumps(
            {"urgent": True, "score": 3, "share": 0.5, "topic": "t", "words": ["a", "b"]}
        )


def ask(rows: Any, reader: Reader | None = None, **options: Any) -> Any:
    options.setdefault("answer_type", SCHEMA)
    limits = ramify.Limits(max_concurrency=1)
    client = testing.ScriptedClient((reader or Reader()).reply)
    return ramify.map("Is it?", rows, client, limits=limits, **options)


def test_a_pandas_frame_keeps_its_types_and_its_index() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "text": ["a", "bad", None],
            "x": [1.5, float("nan"), 3.0],
            "at": pandas.to_datetime(["2026-01-01", None, "2026-01-03"]),
            "kind": pandas.Categorical(["u", "v", "u"]),
            "many": [[1, 2], [], [3]],
            "num": pandas.array([1, None, 3], dtype="Int64"),
        },
        index=["r1", "r2", "r3"],
    )
    reader = Reader()
    table = ask(frame, reader).table
    assert reader.texts[0] == (
        "=== text ===\na\n\n=== x ===\n1.5\n\n=== at ===\n2026-01-01 00:00:00\n\n=== kind ===\nu\n\n"
        "=== many ===\n[1,2]\n\n=== num ===\n1"
    )
    assert "NaT" not in "".join(reader.texts)
    assert "=== num" not in reader.texts[1]
    pandas.testing.assert_frame_equal(table[list(frame.columns)], frame)
    assert {name: str(table.dtypes[name]) for name in ("urgent", "score", "share")} == {
        "urgent": "boolean",
        "score": "Int64",
        "share": "float64",
    }
    assert table["topic"].tolist() == ["t", None, "t"]
    assert table["words"].tolist() == [["a", "b"], None, ["a", "b"]]
    assert table["error"].isna().tolist() == [True, False, True]
    assert list(ask(frame, sample=1).table.index) in [["r1"], ["r2"], ["r3"]]
    assert list(ask(frame.iloc[:0]).table.columns) == list(table.columns)


def test_names_of_pandas_columns_need_not_be_texts() -> None:
    pandas = pytest.importorskip("pandas")
    table = ask(pandas.DataFrame([[1, "a"]]), columns=["1"], answer_type=None).table
    assert list(table.columns) == [0, 1, "answer", "error"]
    for frame, words in (
        (pandas.DataFrame([[1, 2]], columns=["x", "x"]), "two columns named 'x'"),
        (pandas.DataFrame({("a", "b"): [1], ("a", "c"): [2]}), "several levels of column names"),
        (pandas.DataFrame(index=[1, 2]), "has no columns"),
    ):
        with pytest.raises(SourceError, match=words):
            ask(frame)


def test_a_polars_frame_keeps_its_types() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {
            "text": ["a", "bad", None],
            "day": [datetime.date(2026, 1, 1), None, datetime.date(2026, 1, 3)],
            "price": [decimal.Decimal("1.50")] * 3,
            "parts": [{"p": 1}, None, {"p": 3}],
            "small": polars.Series([1, 2, 3], dtype=polars.Int8),
            "kind": polars.Series(["u", "v", "u"], dtype=polars.Categorical),
        }
    )
    reader = Reader()
    table = ask(frame, reader).table
    assert reader.texts[0] == (
        "=== text ===\na\n\n=== day ===\n2026-01-01\n\n=== price ===\n1.50\n\n"
        '=== parts ===\n{"p":1}\n\n=== small ===\n1\n\n=== kind ===\nu'
    )
    assert table.select(frame.columns).equals(frame)
    assert {
        name: str(dtype) for name, dtype in table.schema.items() if name in SCHEMA["properties"]
    } == {
        "urgent": "Boolean",
        "score": "Int64",
        "share": "Float64",
        "topic": "String",
        "words": "List(String)",
    }
    assert table["urgent"].to_list() == [True, None, True]
    assert table.schema["error"] == polars.String
    assert ask(frame, sample=2).table.height == 2
    assert ask(frame[:0]).table.columns == table.columns
    with pytest.raises(SourceError, match=r"give rows\.collect\(\)"):
        ask(frame.lazy())


def test_a_dataset_keeps_its_features_and_a_model_reads_the_names_of_labels() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "num": datasets.Value("int32"),
            "label": datasets.ClassLabel(names=["neg", "pos"]),
        }
    )
    data = {"text": ["a", "bad", None], "num": [1, 2, 3], "label": [0, 1, -1]}
    rows = datasets.Dataset.from_dict(data, features=features)
    reader = Reader()
    table = ask(rows, reader).table
    assert reader.texts[0] == "=== text ===\na\n\n=== num ===\n1\n\n=== label ===\nneg"
    assert {name: table.features[name] for name in features} == features
    assert table["label"][:] == [0, 1, -1]
    assert table["score"][:] == [3, None, 3]
    assert table.features["score"] == datasets.Value("int64")
    assert ask(rows, sample=2).table.num_rows == 2
    assert ask(rows.select([])).table.column_names == table.column_names
    assert [row["score"] for row in ask(rows.to_iterable_dataset()).table] == [3, None, 3]
    with pytest.raises(SourceError, match=r"such as rows\['train'\]"):
        ask(datasets.DatasetDict({"train": rows}))


def test_an_arrow_table_keeps_its_types() -> None:
    table = pyarrow.table({"num": pyarrow.array([1, 2], pyarrow.int8()), "text": ["a", "bad"]})
    found = ask(table, answer_type=None).table
    assert found.schema.field("num").type == pyarrow.int8()
    assert found.schema.field("error").type == pyarrow.string()
    assert ask(table[:0]).table.num_rows == 0


@pytest.mark.parametrize("kind", ["pandas", "polars", "datasets"])
@pytest.mark.parametrize("out", ["a.jsonl", "a.csv", "a.parquet"])
def test_frames_are_written_to_files(tmp_path: Path, kind: str, out: str) -> None:
    library = pytest.importorskip(kind)
    data = {
        "text": ["a", None],
        "at": [datetime.datetime(2026, 1, 1, 12), None],
        "x": [1.5, None],
        "many": [[1], None],
    }
    rows = library.Dataset.from_dict(data) if kind == "datasets" else library.DataFrame(data)
    ask(rows, out=tmp_path / out, answer_type=None)
    text = (tmp_path / out).read_text() if not out.endswith("parquet") else ""
    if out.endswith("parquet"):
        first, second = pyarrow.parquet.read_table(tmp_path / out).to_pylist()
        assert first["at"].replace(tzinfo=None) == data["at"][0]
    elif out.endswith("jsonl"):
        first, second = map(json.loads, text.splitlines())
        assert first["at"].startswith("2026-01-01")
    else:
        assert "NaT" not in text
        assert "nan" not in text
        return
    assert (first["text"], first["x"], first["many"]) == ("a", 1.5, [1])
    assert {second[name] for name in ("text", "at", "x")} == {None}


def test_texts_and_numbers_of_numpy_are_read() -> None:
    numpy = pytest.importorskip("numpy")
    reader = Reader()
    rows = [*numpy.array(["a", "b"]), {"text": numpy.str_("c"), "x": numpy.float32(0.5)}]
    table = ask(rows, reader, answer_type=None).table
    assert [row["text"] for row in table] == ["a", "b", "c"]
    assert reader.texts[2] == "=== text ===\nc\n\n=== x ===\n0.5"
