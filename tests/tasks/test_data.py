"""Datasets as tasks: files, lists and Hugging Face datasets, and errors for malformed rows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, SourceError
from ramify.tasks.base import Item, task_of
from ramify.tasks.data import dataset
from ramify.tasks.validation import answer_only_trajectory, validate

ROWS = [
    {"question": f"What is {n}+{n}?", "answer": 2 * n, "level": "easy" if n < 5 else "hard"}
    for n in range(200)
]
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the extra 'datasets' is not installed"
)


def jsonl(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_single_file_is_split_by_hash_of_the_question(tmp_path: Path) -> None:
    task = dataset(jsonl(tmp_path / "sums.jsonl", ROWS), kind="level", reward="numeric")
    validate(task, num=200)
    sizes = {split: len(items) for split, items in task.splits.items()}
    assert sum(sizes.values()) == 200
    assert sizes["train"] == pytest.approx(160, abs=20)
    assert min(sizes.values()) > 8
    item = task.splits["test"][0]
    assert item == Item(item.question, gold=item.gold, kind=item.kind, id=item.id)
    number = int(item.id.removeprefix("sums/test/"))
    assert (item.question, item.gold) == (ROWS[number]["question"], ROWS[number]["answer"])
    longer = dataset(
        jsonl(tmp_path / "more.jsonl", [*ROWS, {"question": "New?", "answer": 1}]), name="sums"
    )
    for split, items in task.splits.items():  # adding rows does not move items between splits
        kept = {each.id for each in longer.splits[split]} - {
            "sums/train/200",
            "sums/validation/200",
            "sums/test/200",
        }
        assert kept == {each.id for each in items}


def test_same_question_is_never_in_two_splits() -> None:
    task = dataset([{"question": "same?", "answer": 1}] * 50 + ROWS)
    where = {
        split for split, items in task.splits.items() for item in items if item.question == "same?"
    }
    assert len(where) == 1


def test_splits_and_columns_can_be_named(tmp_path: Path) -> None:
    rows = [
        {
            "q": "Which?",
            "docs": ["a", "b"],
            "title": "T",
            "gold": ["B", "b)"],
            "choices": ["x", "y"],
        }
    ]
    source = {"train": jsonl(tmp_path / "a.jsonl", rows), "dev": rows}
    task = dataset(
        source,
        question="q",
        gold="gold",
        context=("title", "docs"),
        metadata=("choices",),
        reward="exact",
        name="mine",
    )
    assert list(task.splits) == ["train", "validation", "test"]
    assert task.splits["train"][0] == Item(
        "Which?",
        {"title": "T", "docs": ["a", "b"]},
        ["B", "b)"],
        id="mine/train/0",
        right="B",
        metadata={"choices": ["x", "y"]},
    )
    assert task.splits["train"][-1:] == [task.splits["train"][0]]


def test_custom_item_and_reward_functions() -> None:
    task = dataset(
        {"test": ROWS},
        item=lambda row: Item(row["question"], row["level"], row["answer"]),
        reward=lambda answer, item: float(answer == item.gold),
    )
    validate(task, num=5)
    assert task.splits["test"][7].context == "hard"


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"question": "a?", "answer": 1}\n   \n{"question": "ü?", "answer": 2}')
    items = dataset({"test": path}).splits["test"]
    assert [(item.question, item.gold) for item in items] == [("a?", 1), ("ü?", 2)]


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"question": "a?", "answer": 1}\n{"question": "b?", "answer": 2}'
    )
    assert [item.gold for item in dataset({"test": path}).splits["test"]] == [1, 2]


def test_empty_context_becomes_none() -> None:
    """Only some rows have a context; the others become items without one."""
    rows = [{"question": f"{c}?", "answer": 1, "log": c} for c in ("", "web-3 failed")]
    items = dataset({"test": rows}, context="log").splits["test"]
    assert [item.context for item in items] == [None, "web-3 failed"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"question": "a?", "answer": 1}\n{"question": "b?", "gold": 1}',
            "line 2: it has no column 'answer'; its columns are question, gold; .*x.jsonl, line 1 "
            "has 'answer': complete this row or remove it$",
        ),
        (
            '{"question": "a?"}\n{"question": "b?", "solution": 1}',
            "line 1: it has no column 'answer'.*x.jsonl, line 2 has 'solution': complete this row",
        ),
        (
            '{"question": "a?", "a": 1}\n{"question": "b?"}',
            "line 1: it has no column 'answer'.*; name yours with the options question=… and gold",
        ),
        (
            '{"question": 5, "answer": 1}',
            "x.jsonl, line 1: column 'question' is 5: a question must be a string or a list of messages",
        ),
        ('{"question": "a?", "answer": null}', "x.jsonl, line 1: column 'answer' is empty"),
        ('{"question": "a?"', "x.jsonl, line 1: not JSON"),
        (
            '{"question": "a?",\n "answer": 1}',
            "x.jsonl, line 1: not JSON: the object does not end in this line; every line must be",
        ),
        (
            '[\n  {"question": "a?", "answer": 1}\n]',
            "line 1: not JSON: the list does not end in this line; every line must be an object",
        ),
        ('{"question": ' + "[" * 5000 + "]" * 5000 + "}", "x.jsonl, line 1: not JSON"),
        ("\n[1, 2]", "x.jsonl, line 2: a list; every line must be an object"),
        ("\n \n", "/x.jsonl, split 'test': it has no rows"),
    ],
)
def test_malformed_row_is_named(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(lines)
    with pytest.raises((ConfigError, SourceError), match=message):
        list(dataset({"test": path}).splits["test"])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.jsonl", {}, "file missing.jsonl does not exist"),
        ("rows.csv", {}, "rows are read from .jsonl and .parquet, and from hf:NAME"),
        ({}, {}, "needs a source for at least one split"),
        (5, {}, "a int is not a dataset"),
        (ROWS, {"reward": "exakt"}, "unknown score 'exakt': did you mean 'exact'"),
        (ROWS, {"gold": None}, "gold=None and reward='exact', which compares with a gold answer"),
    ],
)
def test_invalid_sources_are_rejected(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, SourceError), match=message):
        dataset(source, **options)


def test_row_that_is_not_a_mapping_is_named() -> None:
    with pytest.raises(ConfigError, match="dataset/test, row 0: it is a int; each row must be a m"):
        dataset({"test": [5]}).splits["test"][0]


def _number(item: Item) -> int:
    return int(item.id.rpartition("/")[2])


def test_missing_splits_are_parts_of_the_training_split(tmp_path: Path) -> None:
    test = [{"question": "9 + 9?", "answer": 18}]
    splits = dataset({"train": ROWS, "test": test}).splits
    assert [item.question for item in splits["test"]] == ["9 + 9?"]
    train, validation = (
        {_number(item) for item in splits[name]} for name in ("train", "validation")
    )
    assert train | validation == {*range(len(ROWS))}
    assert not train & validation
    assert 0.05 < len(validation) / len(ROWS) < 0.2
    assert list(dataset({"validation": ROWS}).splits) == ["validation"]


@needs_datasets
def test_parquet_in_memory_and_hub_datasets(tmp_path: Path) -> None:
    import datasets

    loaded = datasets.Dataset.from_list(ROWS)
    loaded.to_parquet(str(tmp_path / "sums.parquet"), batch_size=30)
    (tmp_path / "hub").mkdir()
    jsonl(tmp_path / "hub" / "train.jsonl", ROWS)
    parquet = dataset({"test": tmp_path / "sums.parquet"}, reward="numeric").splits["test"]
    in_memory = dataset({"test": loaded}).splits["test"]
    hub = dataset(f"hf:{tmp_path / 'hub'}").splits
    assert list(hub) == ["train", "validation", "test"]
    from_hub = sorted((item for split in hub.values() for item in split), key=_number)
    for items in (parquet, in_memory, from_hub):
        assert [(item.question, item.gold) for item in items] == [
            (row["question"], row["answer"]) for row in ROWS
        ]
    assert parquet[-1].gold == 398
    with pytest.raises(SourceError, match="cannot be loaded"):
        dataset(f"hf:{tmp_path / 'nowhere'}")


@needs_datasets
def test_file_that_is_not_parquet_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(SourceError, match=r"x\.parquet is not Parquet"):
        dataset(tmp_path / "x.parquet")


def test_rows_without_gold_answers_are_scored_by_a_function_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lenr.py"
    path.write_text("def longer(answer, item): return float(len(answer or ''))\n")
    rows = jsonl(tmp_path / "rows.jsonl", [{"q": "Say something."}])
    task = task_of(rows, question="q", gold=None, reward=f"{path}:longer")
    (items,) = task.splits.values()
    item = items[0]
    assert item.gold is None
    assert task.score(item, answer_only_trajectory(item, "hello")).rewards == {"correct": 5.0}


def test_rewards_of_rows_have_weights(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text("def two(answer, item): return {'close': float(answer == 3), 'len': 1.0}\n")
    rows = jsonl(tmp_path / "rows.jsonl", [{"q": "1 + 2?", "a": 3}])
    options = {"question": "q", "gold": "a", "reward": f"{path}:two"}
    task = task_of(rows, **options, weights={"close": 0.75, "len": 0.25})
    assert validate(task) == ""
    refused = r"scores 2 and not 1 \(weight x reward: 1 x close 1 \+ 1 x len 1\); correct"
    with pytest.raises(ConfigError, match=refused):
        validate(task_of(rows, **options))


# --- tasks by name

MINE = """
from ramify.tasks.base import Item, generated
from ramify.tasks.scoring import exact
from ramify.tasks.base import DatasetTask

def mine(size: int = 3):
    return DatasetTask("mine", generated("mine", lambda rng: Item("?", gold=rng.random()), size=size), exact)

made = mine()
other = 5
"""


def test_tasks_are_loaded_by_name_path_or_file(tmp_path: Path) -> None:
    path = tmp_path / "my_task.py"
    path.write_text(MINE)
    assert task_of("ledger", multi=1.0).name == "ledger"
    assert len(task_of(f"{path}:mine", size=7).splits["test"]) == 7
    assert len(task_of(f"{path}:made").splits["test"]) == 3
    assert task_of("ramify.tasks.needle:needle").name == "needle"
    assert task_of(jsonl(tmp_path / "rows.jsonl", ROWS), kind="level").name == "rows"
    for name, options, message in (
        ("legder", {}, "unknown task 'legder': did you mean 'ledger'"),
        ("ledger", {"mutli": 1}, "task 'ledger' has no option 'mutli': did you mean 'multi'"),
        ("nowhere:task", {}, "task 'nowhere:task' cannot be loaded: No module named 'nowhere'"),
        (f"{path}:ours", {}, "cannot be loaded: .*my_task.py has no attribute 'ours'"),
        (
            f"{path}:made",
            {"size": 1},
            "is an object, not a function, and takes no options: remove size",
        ),
        (f"{path}:other", {}, "gives a int, not a Task"),
        (f"{tmp_path}/none.py:x", {}, r"file .*none\.py does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            task_of(name, **options)


def test_repeated_questions_are_counted_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"{n}?", "answer": n} for n in range(20)]
    path = tmp_path / "x.jsonl"

    def warnings(more: list[dict[str, Any]]) -> list[str]:
        caplog.clear()
        path.write_text("\n".join(map(json.dumps, [*rows, *more])))
        dataset(path)
        return [record.getMessage() for record in caplog.records]

    other = [{"question": "1?", "answer": 2}, {"question": "3?", "answer": 2}]
    assert warnings([*other, rows[5]]) == [
        f"task 'x' has 1 row equal to an earlier row (first: {path}, line 23, like line 6) and 2 "
        "rows with the question of an earlier row but another gold answer (first: "
        f"{path}, line 21, like line 2)"
    ]
    assert warnings([]) == []
    noted = [{**rows[0], "info": {"seed": n}} for n in range(2)]
    assert warnings(noted) == []
