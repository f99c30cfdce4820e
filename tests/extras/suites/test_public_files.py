"""Files in the form that the authors of a benchmark publish: their rows become items of a suite."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import DatasetTask, Item, items_of, task_of
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
DOCUMENTS = [
    {"docid": str(number), "url": f"https://example.org/{number}", "text": f"Text {number}."}
    for number in (7, 3, 11, 5)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "niah": [
        {"index": 0, "input": RULER_NEEDLE, "outputs": ["9375710"], "length": 88},
        {"index": 1, "input": RULER_WORDS, "outputs": ["tea", "jam"], "length": 61},
        {"index": 2, "input": RULER_DOCUMENTS, "outputs": ["Ada", "Ada Lovelace"], "length": 40},
    ],
    "code_qa": [
        {
            "_id": "66ec",
            "domain": domain,
            "sub_domain": "Code repo QA",
            "difficulty": "easy",
            "length": "short",
            "question": "Which function is called first?",
            "choice_A": "main",
            "choice_B": "run",
            "choice_C": "start",
            "choice_D": "stop",
            "answer": answer,
            "context": "def main(): run()",
        }
        for domain, answer in (
            ("Code Repository Understanding", "A"),
            ("Single-Document QA", "D"),
            ("Code Repository Understanding", "B"),
        )
    ],
    "multihop": [
        {
            "query_id": "769",
            "query": "Which inventor of Lodavi was first a baker?",
            "answer": "Ada Zanomi",
            "gold_docs": [DOCUMENTS[0]],
            "evidence_docs": DOCUMENTS[:2],
            "negative_docs": DOCUMENTS[2:],
        }
    ],
    "mrcr": [
        {
            "prompt": json.dumps(
                [
                    {"role": "user", "content": "Write a poem about tapirs"},
                    {"role": "assistant", "content": "Grey is the tapir."},
                    {"role": "user", "content": "Write a poem about tapirs"},
                    {"role": "assistant", "content": "Tapirs, so quiet."},
                    {"role": "user", "content": "Prepend aYooSG8CQg to the 2nd (1 indexed) poem"},
                ]
            ),
            "answer": "aYooSG8CQgTapirs, so quiet.",
            "random_string_to_prepend": "aYooSG8CQg",
            "n_needles": 2,
            "desired_msg_index": 3,
            "total_messages": 5,
            "n_chars": 200,
        }
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
OPTIONAL = {
    "context_window_text_with_labels",
    "desired_msg_index",
    "n_chars",
    "task_group",
    "total_messages",
}
"""Columns without which a row becomes the same item."""
COLUMNS = [
    (suite, column) for suite, rows in ROWS.items() for column in sorted(rows[0].keys() - OPTIONAL)
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(suite: str, path: str) -> tuple[DatasetTask, list[Item]]:
    task = task_of(suite, test=path)
    assert isinstance(task, DatasetTask)
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


def test_longbench_is_read_as_the_array_that_its_authors_publish(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(ROWS["code_qa"]))
    task, items = loaded("code_qa", str(path))
    assert validate(task, ("test",)) == ""
    assert [item.gold for item in items] == ["A", "D", "B"]
    assert items[0].question.splitlines()[:2] == ["Which function is called first?", "A) main"]
    code = task_of("code_qa", test=str(path), domains="Code Repository Understanding")
    assert [item.id for item in items_of(code, "test")] == ["code_qa/test/0", "code_qa/test/2"]
    with pytest.raises(ConfigError, match=r"unknown domain 'Code': .*known: Code Repository"):
        task_of("code_qa", test=str(path), domains=["Code"])
    with pytest.raises(ConfigError, match="needs a file of LongBench-v2"):
        task_of("code_qa", domains=["Code"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"_id": 1}', "data.json is not a JSON array: Expected `array`, got `object`"),
        ("[1]", "it is a int; each row must be a mapping"),
        ("[]", "it has no rows"),
    ],
)
def test_a_json_file_that_is_no_array_of_rows(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(RamifyError, match=message):
        task_of("code_qa", test=str(path))


def test_browsecomp_documents_are_in_an_order_that_does_not_show_their_columns(
    tmp_path: Path,
) -> None:
    _, (item,) = loaded("multihop", write(tmp_path / "rows.jsonl", ROWS["multihop"]))
    order = re.findall(r"example.org/(\d+)", item.context)
    assert sorted(order, key=int) == ["3", "5", "7", "11"]
    assert order not in (["7", "3", "11", "5"], ["3", "7", "11", "5"])
    assert item.metadata == {"query_id": "769"}
    assert "# https://example.org/7\nText 7." in item.context


def test_mrcr_files(tmp_path: Path) -> None:
    _, (item,) = loaded("mrcr", write(tmp_path / "rows.jsonl", ROWS["mrcr"]))
    assert item.kind == "needles_2"
    assert item.question == "Prepend aYooSG8CQg to the 2nd (1 indexed) poem"
    assert item.context.startswith("User: Write a poem about tapirs\n\nAssistant: Grey is")
    assert item.context.endswith("Assistant: Tapirs, so quiet.")


@pytest.mark.parametrize(
    ("suite", "change", "message"),
    [
        ("code_qa", {"answer": "E"}, "its answer is 'E', not one of A, B, C and D"),
        ("multihop", {"gold_docs": ["7"]}, "its gold_docs is not a list of documents with docid"),
        ("mrcr", {"prompt": "tapirs"}, "its prompt is not a JSON list of messages"),
        ("mrcr", {"prompt": "[]"}, "its prompt is not a JSON list of messages"),
        ("mrcr", {"answer": "Tapirs"}, "does not begin with its random_string_to_prepend"),
        ("niah", {"outputs": "9375710"}, "its outputs are not a list with values"),
    ],
)
def test_values_in_another_form(
    suite: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded(suite, write(tmp_path / "rows.jsonl", [ROWS[suite][0] | change]))
