"""Maps: one question over rows, with order, equal rows, budgets, errors, and continuing."""

from __future__ import annotations

import csv
import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import ramify
from ramify import testing
from ramify.errors import ConfigError, SourceError
from ramify.maps.map_journal import TableMapStore
from ramify.maps.map_journal_state import MapJournalState
from ramify.progress import subscribe

PRICE = ramify.Price(input=1.0, output=2.0)


def model(reply: Any = None, **more: Any) -> testing.ScriptedClient:
    """A model that answers with the last word of the first line, or by ``reply``."""
    return testing.ScriptedClient(
        reply or (lambda messages: messages[-1].content.splitlines()[0].split()[-1]), **more
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(num: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"the word is w{number}"} for number in range(num)]


def ask(rows: Any, client: Any = None, **options: Any) -> ramify.MapResult:
    options.setdefault("columns", ["text"])
    return ramify.map("Which word?", rows, client or model(), **options)


# --- rows and outputs


def test_rows_keep_their_order_and_columns(tmp_path: Path) -> None:
    result = ask(texts(50))
    assert [row["answer"] for row in result.table] == [f"w{number}" for number in range(50)]
    assert list(result.table[0]) == ["id", "text", "answer", "error"]
    assert (result.num_rows, result.num_answered, result.stop) == (50, 50, "done")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_sqlite(path: Path, rows: list[dict[str, Any]]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE tickets (id INTEGER, text TEXT)")
        database.executemany("INSERT INTO tickets VALUES (:id, :text)", rows)
    database.close()
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.jsonl", write_jsonl),
        ("t.csv", write_csv),
        ("t.parquet", write_parquet),
        ("t.db", write_sqlite),
    ],
)
@pytest.mark.parametrize("out", ["a.jsonl", "a.csv", "a.parquet"])
def test_each_format_is_read_and_written(tmp_path: Path, name: str, write: Any, out: str) -> None:
    source = write(tmp_path / name, texts(3))
    ask(source, out=tmp_path / out)
    if out.endswith("jsonl"):
        found = rows_of(tmp_path / out)
    elif out.endswith("csv"):
        found = list(csv.DictReader((tmp_path / out).read_text().splitlines()))
    else:
        found = pyarrow.parquet.read_table(tmp_path / out).to_pylist()
    assert [row["answer"] for row in found] == ["w0", "w1", "w2"]
    assert [row["text"] for row in found] == [row["text"] for row in texts(3)]
    assert [int(row["id"]) for row in found] == [0, 1, 2]


def test_a_folder_has_a_row_for_each_file(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"the word is {name[0]}")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00\xd8")
    result = ask(tmp_path, columns=())
    assert result.table == [
        {"file": "a.txt", "answer": "a", "error": None},
        {"file": "b.txt", "answer": "b", "error": None},
        {"file": "image.bin", "answer": None, "error": "image.bin is not text in UTF-8"},
    ]


def test_an_arrow_table_gives_an_arrow_table() -> None:
    table = pyarrow.Table.from_pylist(texts(2))
    result = ask(table)
    assert result.table.column("answer").to_pylist() == ["w0", "w1"]


def test_an_object_schema_gives_typed_columns(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string"}, "long": {"type": "boolean"}},
        "required": ["word", "long"],
    }
    client = model(lambda messages: '{"word": "w", "long": false}')
    ask(texts(2), client, answer_type=schema, out=tmp_path / "a.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert str(table.schema.field("long").type) == "bool"
    assert table.select(["word", "long", "error"]).to_pylist()[1] == {
        "word": "w",
        "long": False,
        "error": None,
    }


# --- questions


def test_a_template_puts_columns_into_the_question() -> None:
    asked: list[str] = []

    def reply(messages: Any) -> str:
        asked.append(messages[-1].content)
        return "yes"

    rows = [{"name": "Ann", "age": 3}, {"name": "Bo", "age": None}]
    ramify.map("Is {name} ({age}) {{new}}?", rows, model(reply))
    assert sorted(asked) == ["Is Ann (3) {new}?", "Is Bo () {new}?"]


def test_braces_of_a_question_without_columns() -> None:
    for question, asked in {
        "Does {{ occur?": "Does { occur?",
        "Is {{it}} a name?": "Is {it} a name?",
        'Answer as {"so": {"it": 1}}.': 'Answer as {"so": {"it": 1}}.',
        "Answer as { so }, or {{ text }}.": "Answer as { so }, or {{ text }}.",
    }.items():
        client = model(lambda _: "yes")
        ramify.map(question, texts(1), client, columns=["text"])
        (request,) = client.requests
        assert request.messages[-1].content.endswith(f"Question: {asked}")


def test_equal_rows_are_asked_once(tmp_path: Path) -> None:
    client = model()
    rows = [{"id": n, "text": f"the word is w{n % 3}"} for n in range(30)]
    result = ask(rows, client)
    assert len(client.requests) == result.num_questions == 3
    assert [row["answer"] for row in result.table] == [f"w{n % 3}" for n in range(30)]


def test_a_reply_that_does_not_fit_is_repaired_and_counted() -> None:
    replies = iter(["no number", "7"])
    result = ask([{"text": "a"}], model(lambda messages: next(replies)), answer_type=int)
    assert result.table[0]["answer"] == 7
    assert result.usage.calls == 2


def test_a_large_row_is_answered_by_a_run_of_its_own(tmp_path: Path) -> None:
    """The model answers with code, which only a session runs."""
    store = ramify.Store(tmp_path / "store")

    rows = [{"text": "x" * 40_000}, {"text": "y"}]
    result = ask(
        rows,
        testing.ScriptedClient(lambda messages: "```repl\nFINAL(str(len(context)))\n```"),
        store=store,
        sandbox="inprocess",
    )
    assert result.table[0]["answer"] == "40000"
    (run,) = store.runs()
    assert run.answer == "40000"
    assert result.usage.calls == 2


def test_the_session_of_a_large_row_can_search_its_text() -> None:
    pytest.importorskip("tantivy")
    text = "\n".join(f"line {number} is dull" for number in range(60_000)) + "\nthe needle: w7"
    code = '```repl\nFINAL(search("needle")[0]["text"].split()[-1] + str(chunks is not None))\n```'
    client = testing.ScriptedClient(lambda messages: code)
    (row,) = ask([{"text": text}], client).table
    assert (row["answer"], row["error"]) == ("w7True", None)


def test_cells_of_all_kinds_are_text_for_the_model() -> None:
    asked: list[str] = []

    def reply(messages: Any) -> str:
        asked.append(messages[-1].content)
        return "yes"

    row = {"a": 1.5, "b": None, "c": float("nan"), "d": [1, {"e": "é"}], "f": True}
    ramify.map("Well?", [row], model(reply))
    (text,) = asked
    assert text.startswith('=== a ===\n1.5\n\n=== d ===\n[1,{"e":"é"}]\n\n=== f ===\nTrue')


# --- bad input


@pytest.mark.parametrize(
    ("question", "options", "words"),
    [
        ("Is {txt} so?", {}, "did you mean 'text'"),
        ("Is {text so?", {}, r"a { without its }, at '{text so\?': write {COLUMN}.*or {{ for"),
        ("Is {id} or {text so?", {}, "a { without its }, at '{text so"),
        ("Is text} so?", {}, "a } without its {, at 'Is text}'"),
        ("Is { text } so?", {}, "has '{ text }': write {text} without spaces"),
        ('Answer as {"so": {"it": 1}', {}, 'a { without its }, at \'{"so"'),
        ("Is it so?", {"columns": ["idd"]}, "did you mean 'id'"),
        (" ", {}, "the question is empty"),
        ("Is it so?", {"out": "a.txt"}, "give .jsonl"),
        ("Is it so?", {"out": "none/a.csv"}, "the folder none of the output does not exist"),
        ("Is it so?", {"colums": ["id"]}, "did you mean"),
        ("Is {text} so?", {"columns": ["id"]}, "omit columns"),
        ("Is it so?", {"sample": 0}, "give 1 or more"),
    ],
)
def test_wrong_options_are_one_sentence(question: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ramify.map(question, texts(1), model(), **options)


def test_a_taken_column_name_needs_a_prefix() -> None:
    rows = [{"answer": "x"}]
    with pytest.raises(ConfigError, match=r"column .answer. already.*prefix"):
        ask(rows, columns=["answer"])
    result = ask(rows, columns=["answer"], prefix="new_")
    assert list(result.table[0]) == ["answer", "new_answer", "new_error"]


def test_files_with_different_columns_are_refused(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "text": "a"}])
    second = write_csv(tmp_path / "b.csv", [{"id": 1, "body": "a"}])
    with pytest.raises(SourceError, match=r"b\.csv has other columns than .*body, text"):
        ask([first, second])


def test_rows_that_fail_have_their_error_and_the_others_continue(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    deep = "[" * 5000 + "]" * 5000
    path.write_text(
        '{"text": "the word is a"}\nnot json\n{"text": ""}\n{"text": "b refuse"}\n'
        f'{{"text": {deep}}}\n'
    )

    def reply(messages: Any) -> Any:
        text = messages[-1].content.splitlines()[0]
        return testing.refused("too long") if "refuse" in text else text.split()[-1]

    result = ask(path, model(reply))
    first, second, third, fourth, fifth = result.table
    assert first == {"text": "the word is a", "answer": "a", "error": None}
    assert second["error"].startswith("t.jsonl, line 2 is not JSON")
    assert third["error"] == "the row has no value in text"
    assert "too long" in fourth["error"]
    assert fifth["error"].startswith("t.jsonl, line 5 is not JSON: maximum recursion depth")
    assert (result.num_answered, result.num_failed, result.stop) == (1, 4, "done")
    assert result.num_unaskable == 3


def test_strict_stops_at_the_first_error(tmp_path: Path) -> None:
    result = ask(
        texts(500), model(lambda messages: testing.refused("no")), strict=True, limits=one_at_once()
    )
    assert result.stop == "failed"
    assert "row 0 failed: " in result.reason
    assert result.num_rows < 10


def one_at_once(**more: Any) -> ramify.Limits:
    return ramify.Limits(max_concurrency=1, **more)


def test_a_map_whose_first_rows_all_fail_alike_stops() -> None:
    client = model(lambda messages: testing.refused("no such model"))
    result = ask(texts(1000), client)
    assert result.stop == "failed"
    assert "the first 20 rows failed alike" in result.reason
    assert len(client.requests) == 20


def test_progress_of_a_sample_counts_its_own_rows() -> None:
    for num, sample, total in ((30, 5, 5), (3, 5, 3)):
        states: list[Any] = []
        with subscribe(states.append):
            ask(texts(num), sample=sample)
        totals = {state.total for state in states if state.what == "map"}
        assert totals == {total}


def test_first_rows_that_fail_in_different_ways_do_not_stop_a_map() -> None:
    def reply(messages: Any) -> Any:
        number = int(messages[-1].content.splitlines()[0].split()[-1].removeprefix("w"))
        return testing.refused(f"no {number}") if number < 100 else "yes"

    result = ask(texts(150), model(reply))
    assert (result.stop, result.num_failed, result.num_answered) == ("done", 100, 50)


def test_a_row_larger_than_its_budget_fails_alone() -> None:
    rows = [{"text": "x" * 5000}, {"text": "the word is a"}]
    limits = ramify.Limits(max_tokens=3000, max_reply_tokens=100)
    result = ask(rows, limits=limits)
    assert "its limit is 3,000 tokens" in result.table[0]["error"]
    assert result.table[1]["answer"] == "a"


# --- one budget


def test_no_limit_is_passed_by_one_call() -> None:
    client = model()
    result = ask(texts(40), client, max_calls=7)
    assert len(client.requests) == result.usage.calls == 7
    assert (result.stop, result.num_answered, result.num_missing) == ("limit", 7, 33)
    missing = [row for row in result.table if row["answer"] is None]
    assert {row["error"] for row in missing} == {"not asked: the map's limit of 7 calls is reached"}


def test_dollars_are_reserved_before_each_request() -> None:
    client = model(price=PRICE)
    result = ask(texts(100), client, max_cost=0.002, limits=ramify.Limits(max_reply_tokens=50))
    assert result.stop == "limit"
    assert 0 < result.num_answered < 100
    assert result.cost is not None
    assert result.cost <= 0.002


def test_sessions_and_direct_calls_share_the_budget(tmp_path: Path) -> None:
    store = ramify.Store(tmp_path / "store")
    rows = [{"text": "x" * 40_000 + str(number)} for number in range(6)]
    client = testing.ScriptedClient(lambda messages: "```repl\n1\n```")
    result = ask(rows, client, store=store, sandbox="inprocess", max_calls=5)
    assert result.stop == "limit"
    assert len(client.requests) == 5


# --- continuing


def test_the_same_map_continues_and_pays_nothing_twice(tmp_path: Path) -> None:
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    client = model(price=PRICE)
    first = ask(texts(20), client, store=store, out=out, max_calls=8)
    assert (first.stop, first.num_answered) == ("limit", 8)
    second = ask(texts(25), client, store=store, out=out)
    assert (second.stop, second.num_answered, second.num_known) == ("done", 25, 8)
    assert second.id == first.id
    assert len(client.requests) == 25
    assert second.usage.calls == 25
    third = ask(texts(25), client, store=store, out=out)
    assert len(client.requests) == 25
    assert [row["answer"] for row in rows_of(out)] == [f"w{number}" for number in range(25)]
    assert third.cost == pytest.approx(second.cost)
    results = (first, second, third)
    assert [each.num_earlier_requests for each in results] == [0, 8, 25]


def test_failed_rows_are_asked_again_only_on_request(tmp_path: Path) -> None:
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    fails = True

    def reply(messages: Any) -> Any:
        text = messages[-1].content.splitlines()[0].split()[-1]
        return testing.refused("not now") if fails and text == "w3" else text

    client = model(reply)
    assert (ask(texts(5), client, store=store, out=out)).num_failed == 1
    fails = False
    again = ask(texts(5), client, store=store, out=out)
    assert (again.num_failed, len(client.requests)) == (1, 5)
    retried = ask(texts(5), client, store=store, out=out, retry_failed=True)
    assert (retried.num_failed, len(client.requests)) == (0, 6)
    assert rows_of(out)[3]["answer"] == "w3"


def test_equal_rows_that_fail_are_asked_once_also_if_they_are_asked_again(tmp_path: Path) -> None:
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    client = model(lambda messages: testing.refused("no"))
    rows, limits = [{"text": "same"}] * 5, one_at_once()
    assert ask(rows, client, store=store, out=out, limits=limits).num_failed == 5
    assert len(client.requests) == 1
    again = ask(rows, client, store=store, out=out, limits=limits, retry_failed=True)
    assert (again.num_failed, len(client.requests)) == (5, 2)


def test_a_model_that_cannot_be_reached_suspends_the_map(tmp_path: Path) -> None:
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    is_down = True

    def reply(messages: Any) -> Any:
        return testing.unreachable() if is_down else "yes"

    client = model(reply)
    limits = ramify.Limits(patience_s=0.01)
    first = ask(texts(5), client, store=store, out=out, limits=limits)
    assert first.stop == "suspended"
    assert not out.exists()
    is_down = False
    second = ask(texts(5), client, store=store, out=out, limits=limits)
    assert (second.stop, second.num_answered, second.num_failed) == ("done", 5, 0)


def test_an_output_of_another_question_is_not_overwritten(tmp_path: Path) -> None:
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    ask(texts(2), store=store, out=out)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl has the answers to the question .Which word.."
    ):
        ramify.map("Another?", texts(2), model(), store=store, out=out)
    other = tmp_path / "b.jsonl"
    other.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"b\.jsonl exists, and no map"):
        ask(texts(2), store=store, out=other)
    assert other.read_text() == "mine\n"


def test_a_row_has_at_most_200_bytes_of_journal_beside_its_texts(tmp_path: Path) -> None:
    store = ramify.Store(tmp_path / "store")
    rows = texts(500)
    ask(rows, model(price=PRICE), store=store, out=tmp_path / "a.jsonl")
    ((path, _),) = TableMapStore(store.root).headers()
    own = sum(len(row["text"]) + len(f"w{row['id']}") for row in rows)
    header = len(path.read_bytes().splitlines()[0])
    assert (path.stat().st_size - own - header) / len(rows) <= 200


def test_a_request_in_flight_at_the_end_of_a_journal_counts_as_paid(tmp_path: Path) -> None:
    store, out = ramify.Store(tmp_path / "store"), tmp_path / "a.jsonl"
    client = model(price=PRICE)
    ask(texts(3), client, store=store, out=out, limits=one_at_once())
    ((path, _),) = TableMapStore(store.root).headers()
    before = MapJournalState.read(path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[-1].startswith(b'{"r":')
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:10])  # killed while it wrote the reply
    cut = MapJournalState.read(path)
    assert cut.usage.unknown_calls == 1
    assert cut.cost > before.cost
    again = ask(texts(3), client, store=store, out=out, limits=one_at_once())
    assert len(client.requests) == 4
    assert again.usage.calls == 4
    assert again.usage.unknown_calls == 1
    assert MapJournalState.read(path).usage == again.usage


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"[]", "one JSON object in each line"),
        ("a.jsonl.gz", b"\x1f\x8b", "unpack it"),
        ("a.xlsx", b"PK", "save it as .csv"),
        ("a.jsonl", b"no\n[1]\n", r"has no rows \(a.jsonl, line 1 is not JSON"),
        ("a.csv", b"", "has no header"),
        ("a.csv", b"x,x\n1,2\n", "two columns named 'x'"),
        ("a.parquet", b"PAR1", "is not a Parquet file"),
        ("a.db", b"no database", "cannot be read as SQLite"),
        ("a.pdf", b"%PDF", "is not a table of rows: give a .jsonl"),
    ],
)
def test_files_without_rows_say_what_to_give(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=words):
        ask(tmp_path / name)


def test_standard_input_and_output_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="write them into a file"):
        ask(Path("-"))
    with pytest.raises(ConfigError, match="the output must be a file"):
        ask(texts(1), out=Path("-"))
    with pytest.raises(ConfigError, match="is a folder"):
        ask(texts(1), out=tmp_path)


def test_marks_at_the_beginning_of_files_are_no_text(tmp_path: Path) -> None:
    quoted = '\ufeffid,text\n1,"the ""word"", on\ntwo lines, is w1"\n'
    (tmp_path / "a.csv").write_text(quoted, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"id": 1, "text": "the word is w2"}\n', "utf-8")
    words = testing.ScriptedClient(
        lambda messages: messages[-1].content.split("\n\n")[0].split()[-1]
    )
    for name, word in (("a.csv", "w1"), ("b.jsonl", "w2")):
        (row,) = ask(tmp_path / name, words).table
        assert (str(row["id"]), row["answer"]) == ("1", word)


def test_one_column_may_be_named_alone_and_a_row_may_be_empty() -> None:
    (row,) = ask(texts(1), columns="text").table
    assert row["answer"] == "w0"
    (row,) = ask([{}], columns=()).table
    assert row["error"] == "the row is empty"
