"""Stored runs: listing, showing, replaying, resuming and deleting them."""

from __future__ import annotations

import json
import os
import pty
import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from ramify import Store
from ramify.types.event import RunStarted
from tests.cli.helpers import (
    COMMAND,
    SESSION_SCRIPT,
    Done,
    Shell,
    code,
    kill_at_second_request,
    wait_for_second_request,
)

COLUMNS = ["run", "when", "question", "model", "stop", "calls", "tokens", "cost", "seconds"]
COLUMNS += ["by reference"]


@pytest.fixture
def stored(shell: Shell) -> Shell:
    """Two runs: a session with sub-calls, then a plain question."""
    shell.write("log.txt", "one\ntwo\n")
    sub = shell.model([{"match": "", "reply": "\x1b[31mred"}], "sub.json")
    script = [
        code("replies = llm_query_batched(['a', 'b', 'c', 'd', 'e'])\nprint('[bold]', replies[0])"),
        code("FINAL(2)"),
    ]
    assert shell.ask(script, "--no-direct", "how many?", "log.txt", "--sub-model", sub).code == 0
    assert shell.ask(["31"], "How many days has May?").code == 0
    return shell


def test_runs_lists_the_newest_first(stored: Shell) -> None:
    header, *rows = [line.split("\t") for line in stored.run("runs").out.splitlines()]
    assert header == COLUMNS
    assert [row[2:6] for row in rows] == [
        ["How many days has May?", "scripted:script.json", "final", "1"],
        ["how many?", "scripted:script.json", "final", "6"],
    ]
    (one,) = [
        json.loads(line) for line in stored.run("runs", "--json", "--limit", "1").out.splitlines()
    ]
    assert (one["question"], one["stop"], one["cost"], one["usage"]["calls"]) == (
        "How many days has May?",
        "final",
        0.0,
        1,
    )


def test_configuration_file_says_where_all_commands_find_runs(shell: Shell) -> None:
    shell.write("config/ramify/config.toml", f'[runs]\npath = "{shell.folder}/elsewhere"\n')
    del shell.env["RAMIFY_HOME"]
    assert shell.ask(["31"], "How many days has May?").code == 0
    assert (shell.folder / "elsewhere" / "runs").is_dir()
    assert "How many days has May?" in shell.run("runs").out
    assert "How many days has May?" in shell.run("show", "last").out
    assert shell.run("runs", "check", "--all").out == "1 run checked, 0 damaged\n"


def test_show_prints_call_tree_and_transcript(stored: Shell) -> None:
    run = json.loads(stored.run("runs", "--json").out.splitlines()[1])["run"]
    shown = stored.run("show", run).out.splitlines()
    assert shown[0].startswith(f"run {run}  20")
    assert shown[1].startswith("final · 2 turns, 7 requests · ")
    body = [without_time(line) for line in shown[2:] if "  turn " not in line]
    assert body == [
        "context: str, 8 characters",
        "",
        "0 how many?  → 2  $0.00  TIME",
        "├ 0.0 a  → red  $0.00  TIME",
        "├ 0.1 b  → red  $0.00  TIME",
        "├ 0.2 c  → red  $0.00  TIME",
        "├ 0.3 d  → red  $0.00  TIME",
        "└ 0.4 e  → red  $0.00  TIME",
        "",
        "0 scripted:script.json (rlm): how many?",
        "    | replies = llm_query_batched(['a', 'b', 'c', 'd', 'e'])",
        "    | print('[bold]', replies[0])",
        "    > [bold] red",
        "    0.0 … 0.4: llm_query × 5",
        "    | FINAL(2)",
        "  answer: 2",
        "ended: final, after 2 turns",
    ]
    tree = stored.run("show", run, "--tree").out.splitlines()
    assert [without_time(line) for line in tree[2:]] == [*body[:8], body[-1]]
    turn = stored.run("show", run, "--turn", "2").out.splitlines()
    assert turn[-2:] == ["--- cell 1 ---", "| FINAL(2)"]
    assert "has no turn 3: it has 2 turns" in stored.run("show", run, "--turn", "3").err


def without_time(line: str) -> str:
    return re.sub(r"  [\d.]+ [mµ]?s$", "  TIME", line)


def test_show_prints_one_call_json_or_events(stored: Shell) -> None:
    run = json.loads(stored.run("runs", "--json").out.splitlines()[1])["run"]
    assert stored.run("show", run, "--call", "0.3").out.splitlines() == [
        "0.3 scripted:sub.json (lm)",
        "--- user ---",
        "d",
        "--- assistant ---",
        "red",
        "--- answer: red",
    ]
    trajectory = json.loads(stored.run("show", run, "--json").out)
    assert ([call["id"] for call in trajectory["calls"]], trajectory["answer"]) == (
        ["0", *(f"0.{n}" for n in range(5))],
        2,
    )
    events = [
        json.loads(line)["type"] for line in stored.run("show", run, "--events").out.splitlines()
    ]
    assert (events[0], events[-1], events.count("Replied")) == ("RunStarted", "RunEnded", 7)
    missing = stored.run("show", run, "--call", "0.9")
    assert (missing.code, missing.err.startswith(f"ramify: run {run} has no call 0.9: ")) == (
        2,
        True,
    )


def test_replay_of_deterministic_run_reports_same(stored: Shell) -> None:
    run = json.loads(stored.run("runs", "--json").out.splitlines()[1])["run"]
    (stored.folder / "script.json").unlink()  # replay calls no model
    assert stored.run("replay", run) == (0, "same: 6 calls, 2 cells, and the answer\n", "")


def test_replay_reports_differences(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    clock = code("import time\nFINAL(time.time())")
    shell.ask([clock], "--no-direct", "what time?", "log.txt")
    done = shell.run("replay", "last", "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert found["same"] is False
    assert any(line.startswith("the answer was ") for line in found["differences"])
    assert "different in" in shell.run("replay", "last").out


def test_resume_continues_a_killed_run(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    first = code("n = len(context)\nprint(n)")
    process = shell.start(
        "ask",
        "-v",
        "--no-direct",
        "-m",
        shell.model([first, {"fail": "stalled"}]),
        "how?",
        "log.txt",
    )
    kill_at_second_request(shell, process)
    assert "interrupted" in shell.run("runs").out
    assert "\ninterrupted · 1 turn, " in shell.run("show", "last").out
    shell.model([code("FINAL(n + 1)")])  # recorded replies are not requested again
    done = shell.run("ask", "--resume", "last", "--json")
    answer = json.loads(done.out)
    assert (done.code, answer["answer"], answer["stop"]) == (0, 4, "final")
    assert answer["usage"]["unknown_calls"] == 1  # the request in flight may have been billed
    again = shell.run("ask", "--resume", "last")
    assert (again.code, again.out, "has already ended" in again.err) == (0, "4\n", True)


def test_resume_of_a_run_without_an_answer_says_so(shell: Shell) -> None:
    shell.ask(["none", "still none", "nothing"], "--no-direct", "how?")
    done = shell.run("ask", "--resume", "last")
    assert (done.code, done.out) == (4, "")
    assert "has already ended without an answer" in done.err.splitlines()[0]
    assert "this is its answer" not in done.err


def test_show_states_an_error_that_ended_the_run_without_repeating_it(shell: Shell) -> None:
    shell.ask(["no code"], "--no-direct", "how?")
    lines = shell.run("show", "last").out.splitlines()
    about = [line for line in lines if "all 1 replies are used up (this is request 2): add" in line]
    assert [line.split(": ")[0].strip() for line in about] == ["no answer (error)", "ended"]


def test_running_run_cannot_be_resumed(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    first = code("n = len(context)\nprint(n)")
    process = shell.start(
        "ask",
        "-v",
        "--no-direct",
        "-m",
        shell.model([first, {"fail": "stalled"}]),
        "how?",
        "log.txt",
    )
    wait_for_second_request(shell)
    done = shell.run("ask", "--resume", "last")
    process.kill()
    process.communicate()
    assert (done.code, done.out) == (2, "")
    assert f"is being written by process {process.pid} on " in done.err


def test_resume_reopens_a_database(shell: Shell) -> None:
    database = sqlite3.connect(shell.folder / "shop.db")
    database.executescript("CREATE TABLE sales (n INTEGER); INSERT INTO sales VALUES (4), (5);")
    database.close()
    process = shell.start(
        "ask", "-v", "-m", shell.model([code("x = 1"), {"fail": "stalled"}]), "sum?", "shop.db"
    )
    kill_at_second_request(shell, process)
    shell.model([code("FINAL(sql('SELECT sum(n) AS s FROM sales'))")])
    done = shell.run("ask", "--resume", "last", "-q")
    assert (done.code, "9" in done.out) == (0, True), done


def test_rm_and_prune_delete_runs(stored: Shell) -> None:
    newest, oldest = [line.split("\t")[0] for line in stored.run("runs").out.splitlines()[1:]]
    wrong = stored.run("runs", "rm", newest, "nothing-like-it")
    assert (wrong.code, len(stored.run("runs").out.splitlines())) == (
        2,
        3,
    )  # nothing is deleted unless all are found
    assert stored.run("runs", "rm", oldest).out.startswith(f"deleted {oldest} (")
    assert stored.run("runs", "prune", "--older-than", "1d").out.startswith("0 runs deleted, ")
    for slip in (("--older-than", "0"), ("--max-size", "0"), ("--older-than", "", "--keep", "0")):
        refused = stored.run("runs", "prune", *slip)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert f"{slip[0]} '{slip[1]}'" in refused.err
        assert "write it as" in refused.err
    gone = stored.run("runs", "prune", "--keep", "0").out.splitlines()
    assert (gone[0], gone[1].startswith("1 run deleted, ")) == (f"deleted {newest}", True)
    assert stored.run("runs").out.splitlines() == ["\t".join(COLUMNS)]


def test_run_without_store_is_not_listed(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    shell.ask(SESSION_SCRIPT, "--no-direct", "--no-store", "how long?", "log.txt")
    assert shell.run("runs").out.splitlines() == ["\t".join(COLUMNS)]


def test_read_only_store_is_listed_and_shown(shell: Shell) -> None:
    shell.ask(["seven"], "how many?")
    (shell.folder / "store" / "index.sqlite").unlink(missing_ok=True)
    protect = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'

    def run(*words: str) -> Done:
        command = ["unshare", "-m", "sh", "-c", protect, shell.env["RAMIFY_HOME"], *words]
        try:
            done = subprocess.run(command, env=shell.env, capture_output=True, timeout=60)
        except FileNotFoundError as error:
            pytest.skip(f"A READ-ONLY DISK IS NOT TESTED HERE: {error}")
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    if (probe := run("true")).code:
        pytest.skip(f"A READ-ONLY DISK IS NOT TESTED HERE: {probe.err}")
    assert "how many?" in run(*COMMAND, "runs").out
    assert "seven" in run(*COMMAND, "show", "last").out
    status, _, error = run(*COMMAND, "runs", "review", "last", "--label", "odd")
    assert (status, error.count("\n")) == (1, 1)
    assert ".review.json: Read-only file system" in error
    assert "RAMIFY_DEBUG" not in error


def test_verdicts_of_two_people_are_labels_of_a_run(stored: Shell) -> None:
    def say(verdict: str, person: str) -> None:
        words = ("runs", "review", "last", "--verdict", verdict, "--person", person)
        assert stored.run(*words).code == 0

    say("right", "ana")
    assert json.loads(stored.run("runs", "review", "last").out)["rewards"] == {"correct": 1.0}
    assert len(stored.run("runs", "label:right").out.splitlines()) == 2
    say("wrong", "ben")
    review = json.loads(stored.run("runs", "review", "last").out)
    assert (review["verdicts"], review.get("rewards")) == ({"ana": "right", "ben": "wrong"}, None)
    assert len(stored.run("runs", "label:disputed").out.splitlines()) == 2
    done = stored.run("runs", "review", "last", "--person", "ana")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_runs_are_filtered_sorted_and_grouped(stored: Shell) -> None:
    def questions(*filter: str) -> list[str]:
        found = stored.run("runs", *filter).out.splitlines()[1:]
        return [line.split("\t")[2] for line in found]

    assert questions("calls>1 when:today") == ["how many?"]
    assert questions("when:today -calls>1") == ["How many days has May?"]
    assert questions("sort:calls", "--limit", "1") == ["how many?"]
    grouped = stored.run("runs", "group:stop").out.splitlines()
    assert [line.split("\t")[:2] for line in grouped] == [["stop", "runs"], ["final", "2"]]
    row = json.loads(stored.run("runs", "group:origin", "--json").out)
    assert (row["origin"], row["runs"], row["mean_reward"]) == ("asked", 2, None)
    nothing = stored.run("runs", "when<2020")
    assert nothing.out.splitlines() == ["\t".join(COLUMNS)]
    assert nothing.err == "none of 2 runs matches when<2020\n"
    wrong = stored.run("runs", "stop:fnal", "calls>1")
    assert wrong.err == (
        "none of 2 runs matches stop:fnal calls>1\n"
        "no run has stop:fnal: did you mean 'final'? known: final\n"
    )
    assert stored.run("runs", "stop:final", "calls>999").err.count("\n") == 1
    misspelled = stored.run("runs", "chek", "2026 1")
    assert misspelled.err == (
        "none of 2 runs matches chek 2026 1\ndid you mean: ramify runs check '2026 1'\n"
    )


def test_the_size_of_a_context_of_files_says_that_it_has_their_names(shell: Shell) -> None:
    shell.write("logs/a.txt", "12345678")
    shell.write("logs/b.txt", "1234")
    shell.ask(SESSION_SCRIPT, "--no-direct", "how long?", "logs")
    assert "context: dict, 22 characters, names included\n" in shell.run("show", "last").out


@pytest.mark.parametrize(
    ("filter", "said"),
    [
        ("cots>1", "unknown field cots: use one of cost, tokens"),
        ("when:soon", "when must be today, yesterday, an age such as 7d"),
        ("cost >0.1", "a comparison must not contain spaces; use cost>0.1"),
    ],
)
def test_unreadable_filter_lists_nothing(stored: Shell, filter: str, said: str) -> None:
    done = stored.run("runs", filter)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err


def test_evaluations_are_one_line_on_a_terminal(stored: Shell) -> None:
    store = Store(Path(stored.env["RAMIFY_HOME"]))
    for n in range(3):
        journal = store.create(f"20260301-00000{n}-item")
        journal.append(RunStarted(id=journal.id, question="item", started_at=1.8e9, task="my sums"))
        journal.close()
    ours, theirs = pty.openpty()
    process = stored.start("runs", stdout=theirs)
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 4096):
            written += block
    except OSError:  # the terminal's end
        pass
    finally:
        os.close(ours)
    assert process.wait(100) == 0
    process.communicate()
    lines = written.decode().splitlines()
    assert "How many days" in lines[1]
    assert lines[3:] == ["and 3 runs of the evaluation of my sums: ramify runs 'task=\"my sums\"'"]
    listed = stored.run("runs", 'task="my sums"').out.splitlines()
    assert len(listed) == 4
