"""``ramify map`` and what other commands know of maps."""

from __future__ import annotations

import json

from tests.cli.helpers import Shell

ROWS = '{"id": 1, "text": "fire"}\n{"id": 2, "text": "refuse"}\n{"id": 3, "text": "fire"}\n'
SCRIPT = [
    {"match": "refuse", "reply": {"fail": "refused", "text": "too hot"}},
    {"match": ".", "reply": '{"urgent": true}'},
]
SCHEMA = '{"type": "object", "properties": {"urgent": {"type": "boolean"}}}'


def mapped(shell: Shell, *more: str, out: str = "out.jsonl") -> object:
    shell.write("rows.jsonl", ROWS)
    model = shell.model(SCRIPT)
    options = ["--model", model, "--out", out, "--column", "text", *more]
    return shell.run("map", "Is it urgent?", "rows.jsonl", *options)


def test_a_map_is_written_listed_shown_and_deleted(shell: Shell) -> None:
    done = mapped(shell, "--answer-schema", SCHEMA)
    assert (done.code, done.out.strip()) == (4, "out.jsonl")
    assert "3 rows · 2 answered, 1 failed" in done.err
    assert "1 row of 3 failed" in done.err
    rows = [json.loads(line) for line in (shell.folder / "out.jsonl").read_text().splitlines()]
    assert [row["urgent"] for row in rows] == [True, None, True]
    head, line = [line.split("\t") for line in shell.run("runs", "--maps").out.splitlines()]
    found = dict(zip(head, line, strict=True))
    assert (found["question"], found["rows"], found["failed"]) == ("Is it urgent?", "3", "1")
    shown = shell.run("show", found["map"]).out
    assert "3 rows · 1 failed" in shown
    assert 'row 0: fire → {"urgent": true}' in shown
    assert "×2" in shown
    number = next(line.split()[0] for line in shown.splitlines() if "row 0:" in line)
    row = shell.run("show", f"{found['map']}:{number}").out
    assert 'answer: {"urgent": true}' in row
    assert "\nrow 0 of the map: fire\n" in row
    assert shell.run("show", f"{found['map']}:99").code != 0
    assert shell.run("runs", "rm", found["map"]).code == 0
    assert shell.run("runs", "--maps").out.count("\n") == 1


def test_rows_that_cannot_be_asked_are_counted_alike_everywhere(shell: Shell) -> None:
    shell.write("rows.csv", "id,text\n1,fire\n2,\n3,refuse\n4,\n")
    options = ("--model", shell.model(SCRIPT), "--out", "out.jsonl")
    command = ("map", "Is {text} urgent?", "rows.csv", *options)
    done = shell.run(*command)
    why = "3 rows of 4 failed, with the reason in their error column; 2 of them, empty or unreadable, "
    asks = "cannot be asked; the same command with --retry-failed asks the other 1 again"
    assert (done.code, f"{why}{asks}" in done.err) == (4, True), done.err
    again = shell.run(*command, "--retry-failed")
    assert (again.code, f"{why}{asks}" in again.err) == (4, True), again.err
    head, line = [line.split("\t") for line in shell.run("runs", "--maps").out.splitlines()]
    found = dict(zip(head, line, strict=True))
    assert (found["rows"], found["failed"]) == ("4", "3")
    shown = shell.run("show", found["map"]).out
    assert "4 rows · 3 failed" in shown
    assert "not asked: 2 rows, empty or unreadable; see the errors in the output" in shown

    shell.write("rows.csv", "id,text\n1,fire\n2,\n")
    empty = shell.run(*command[:-1], "empty.jsonl")
    assert "column; 1 of them, empty or unreadable, cannot be asked\n" in empty.err
    assert "--retry-failed" not in empty.err


def test_a_sample_of_few_rows_has_no_interval(shell: Shell) -> None:
    shell.write("rows.jsonl", "".join(f'{{"text": "fire {number}"}}\n' for number in range(30)))
    options = ("--model", shell.model(SCRIPT), "--out", "out.jsonl")
    few = shell.run("map", "Is it urgent?", "rows.jsonl", "--try", "3", *options).out
    assert "; from 3 questions, too few for an interval" in few
    assert "about $0.00 · about " in few
    assert " to " not in few
    more = shell.run("map", "Is it urgent?", "rows.jsonl", "--try", "20", *options).out
    assert "$0.00 ($0.00 to $0.00)" in more
    assert "; from 20 questions, 95 %" in more


def test_a_sample_and_then_all_rows_are_counted_once(shell: Shell) -> None:
    shell.write("rows.csv", "id,text\n1,fire\n2,smoke\n3,smoke\n4,fire\n")
    model = shell.model([{"match": ".", "reply": "yes"}])
    command = ("map", "Is it urgent?", "rows.csv", "--model", model, "--out", "out.jsonl")
    assert shell.run(*command, "--try", "2").code == 0
    done = shell.run(*command)
    assert "4 requests, 2 earlier · " in done.err
    assert "nothing was sent" not in done.err
    head, line = [line.split("\t") for line in shell.run("runs", "--maps").out.splitlines()]
    found = dict(zip(head, line, strict=True))
    assert (found["rows"], found["requests"]) == ("4", "4")
    assert "row 1: id: 2 · text: smoke → yes" in shell.run("show", found["map"]).out

    repeated = shell.run(*command)
    assert (repeated.code, repeated.out.strip()) == (0, "out.jsonl")
    said = "nothing was sent, since no row was left to ask · 4 rows · 4 answered · "
    assert f"{said}4 requests, all earlier · " in repeated.err
    assert '"num_earlier_requests":4' in shell.run(*command, "--json").out.replace(" ", "")


def test_a_refused_map_leaves_nothing_behind(shell: Shell) -> None:
    shell.write("damaged.parquet", "no parquet")
    shell.write("rows.jsonl", ROWS)
    model = ("--model", shell.model(SCRIPT))
    for words, why in {
        ("rows.jsonl", "--out", "out.txt"): "the output out.txt has an unknown ending",
        ("rows.jsonl", "--out", "out.jsonl", "--batch"): "batches are not supported",
        ("damaged.parquet", "--out", "out.jsonl"): "is not a Parquet file",
        ("rows.xyz", "--out", "out.jsonl"): "rows.xyz does not exist",
    }.items():
        refused = shell.run("map", "Is it urgent?", *words, *model)
        assert (refused.code, why in refused.err) == (2, True), refused.err
    assert shell.run("runs", "--maps").out.count("\n") <= 1
    assert not [*shell.folder.glob("out.*")]
    assert not [*shell.folder.rglob("maps/*.jsonl")]


def test_wrong_words_are_one_line(shell: Shell) -> None:
    assert mapped(shell, out="out.txt").code == 2
    shell.write("rows.jsonl", ROWS)
    model = shell.model(SCRIPT)
    missing = shell.run("map", "Is it?", "none.jsonl", "--model", model, "--out", "a.csv")
    assert (missing.code, missing.err.count("\n")) == (2, 1)
    assert "none.jsonl does not exist" in missing.err
    for mode, message in (("plans", "--mode plans is unknown"), ("plan", "remove --scaffold")):
        wrong = mapped(shell, "--mode", mode, "--scaffold", "minimal")
        assert (wrong.code, wrong.err.count("\n")) == (2, 1)
        assert message in wrong.err
    no_out = shell.run("map", "Is it?", "rows.jsonl", "--model", "scripted:x")
    assert "give --out FILE" in no_out.err
