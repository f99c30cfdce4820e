"""Files in the form that the authors of a benchmark publish: their rows become items of a suite."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.tasks.base import Item, SimpleTask, items_of, task_of
from ramify.tasks.validation import validate

pytest.importorskip("pyarrow")
import pyarrow
import pyarrow.parquet

RULER_NEEDLE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the numbers afterwards.\nA road. One of the special magic numbers for "
    "tall-tea is: 9375710. A river.\nWhat are all the special magic numbers for tall-tea mentioned "
    "in the provided text? The special magic numbers for tall-tea mentioned in the provided text "
    "are"
)
RULER_WORDS = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n1. tea 2. jam 3. tea\nQuestion: What are the 10 "
    "most common words in the above list? Answer: The top 10 words that appear most often in the "
    "list are:"
)
RULER_DOCUMENTS = (
    "Answer the question based on the given documents.\n\nDocument 1:\nIt was Ada.\n\nAnswer the "
    "question based on the given documents.\n\nQuestion: Who was it? Answer:"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "niah": [
        {"index": 0, "input": RULER_NEEDLE, "outputs": ["9375710"], "length": 88},
        {"index": 1, "input": RULER_WORDS, "outputs": ["tea", "jam"], "length": 61},
        {"index": 2, "input": RULER_DOCUMENTS, "outputs": ["Ada", "Ada Lovelace"], "length": 40},
    ],
    "oolong": [
        {
            "question": "Which of the labels is the most common?",
            "answer": "['spam']",
            "context_window_text": "x",
            "context_window_text_with_labels": "y",
            "task_group": "counting",
        }
    ],
}
"""Suite -> rows in the form of its public file."""
COLUMNS = [(suite, column) for suite, rows in ROWS.items() for column in rows[0]]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(suite: str, path: str) -> tuple[SimpleTask, list[Item]]:
    task = task_of(suite, test=path)
    assert isinstance(task, SimpleTask)
    return task, list(items_of(task, "test"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("suite", ROWS)
def test_public_files_become_items_that_prove_themselves(
    suite: str, suffix: str, tmp_path: Path
) -> None:
    task, items = loaded(suite, write(tmp_path / f"rows.{suffix}", ROWS[suite]))
    assert len(items) == len(ROWS[suite])
    assert validate(task, ("train", "test"), num=3) == ""
    assert all(isinstance(item.context, str) and item.question for item in items)


@pytest.mark.parametrize(("suite", "column"), COLUMNS, ids=map("-".join, COLUMNS))
def test_a_missing_column_is_named(suite: str, column: str, tmp_path: Path) -> None:
    if column in ("task_group", "context_window_text_with_labels"):
        pytest.skip("not every public file has this column")
    rows = [{name: value for name, value in row.items() if name != column} for row in ROWS[suite]]
    with pytest.raises(ConfigError, match=f"it lacks the columns {column} of") as error:
        loaded(suite, write(tmp_path / "rows.jsonl", rows))
    assert "rows.jsonl, line 1: " in str(error.value)


def test_a_file_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS["oolong"])
    missing = "it lacks the columns index, input, outputs, length of RULER's files; it has question"
    with pytest.raises(ConfigError, match=re.escape(missing)):
        task_of("niah", test=path)


def test_ruler_files(tmp_path: Path) -> None:
    _, items = loaded("niah", write(tmp_path / "rows.jsonl", ROWS["niah"]))
    assert [item.kind for item in items] == ["niah", "cwe", "qa"]
    assert items[0].question.startswith("What are all the special magic numbers for tall-tea")
    assert items[0].context.endswith("A river.")
    assert items[1].context.endswith("1. tea 2. jam 3. tea")
    assert items[2].question == "Question: Who was it? Answer:"
    assert [item.gold for item in items] == [["9375710"], ["tea", "jam"], ["Ada", "Ada Lovelace"]]
