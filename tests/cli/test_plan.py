"""``ramify plan``: the plan and its cost first, and the run only if the user agrees."""

from __future__ import annotations

import json
import re

import pytest

from ramify import plans
from tests.cli.helpers import Done, Shell

MAIL = "buy now\nsee you at noon\nbuy again\n"
SCRIPT = [
    {"match": "counted", "reply": "2 are spam"},
    {"match": "Label each", "reply": '["spam", "ham", "spam"]'},
    {"match": ".", "reply": '{"found": true, "answer": "noon", "certainty": 9}'},
]


def planned(shell: Shell, *more: str, question: str = "How many are spam?") -> Done:
    shell.write("mail.txt", MAIL)
    return shell.run("plan", question, "mail.txt", "--model", shell.model(SCRIPT), *more)


def test_the_plan_and_its_cost_are_shown_and_nothing_is_sent(shell: Shell) -> None:
    done = planned(shell, "--labels", "spam, ham")
    assert done.code == 0
    assert done.out.startswith("plan aggregate: the question says 'How many'\ncontext\n")
    assert "calls    exactly 2 (map label 1, ask answer 1)\n" in done.out
    assert "dollars  at most $0.00" in done.out  # a script is free
    assert "time     2 rounds of up to 64 calls: about 4.00 s if a call takes 2 s" in done.out
    assert "retries  at most 4 more calls" in done.out
    assert "nothing was sent; to run the plan, add --yes" in done.err
    assert shell.run("runs").out.count("\n") <= 1


def test_the_cost_of_a_plan_is_unknown_if_the_model_has_no_price(shell: Shell) -> None:
    shell.write("mail.txt", MAIL)
    unlisted = "openai:unlisted@http://127.0.0.1:9/v1"
    done = shell.run("plan", "How many are spam?", "mail.txt", "--model", unlisted)
    assert (done.code, "dollars  unknown: " in done.out) == (0, True)


def test_a_plan_that_asks_nothing_says_why(shell: Shell) -> None:
    shell.write("mail.txt", MAIL * 20)
    why = "reason   no part of the context passes the plan's filter, so the answer would be empty"
    for question, more, asks in (
        ("Find complaint", ("--top", "1"), False),
        ("When is noon?", ("--top", "1"), True),
        ("Find complaint", ("--top", "0"), True),
    ):
        options = ("--plan", "search", "--part-tokens", "16", "--model", shell.model(SCRIPT), *more)
        done = shell.run("plan", question, "mail.txt", *options)
        assert ("calls    exactly 0\n" in done.out, why in done.out) == (not asks, not asks)


def test_the_plan_runs_is_shown_and_can_be_resumed(shell: Shell) -> None:
    done = planned(shell, "--labels", "spam,ham", "--yes")
    assert (done.code, done.out) == (0, "2 are spam\n")
    assert "calls    exactly 2" in done.err
    run = done.err.split()[-1]
    shown = shell.run("show", run).out
    assert "│ map label" in shown
    assert "0.0 leaf: label: lines 1-3 → " in shown
    again = shell.run("ask", "--resume", run)
    assert (again.code, again.out) == (0, "2 are spam\n")
    assert shell.run("replay", run).code == 0


def test_json_has_the_plan_which_can_be_edited_and_run(shell: Shell) -> None:
    done = planned(shell, "--plan", "classify", "--labels", "spam,ham", "--json")
    shown = json.loads(done.out)
    assert (shown["cost"]["calls"], shown["cost"]["is_exact"]) == (1, True)
    assert plans.Plan.from_json(json.dumps(shown["plan"])) == plans.classify(["spam", "ham"])
    shell.write("plan.json", json.dumps(shown["plan"]))
    run = json.loads(planned(shell, "--plan", "plan.json", "--yes", "--json").out)
    assert run["answer"] == ["spam", "ham", "spam"]


def test_failed_leaves_are_counted_beside_the_answer(shell: Shell) -> None:
    shell.write("mail.txt", MAIL * 100)
    script = [
        {"match": "\n1: see you", "reply": "no"},
        {"match": "Label", "reply": json.dumps(["spam", "ham", "spam"] * 34)},
    ]
    done = shell.run(
        *("plan", "Which?", "mail.txt", "--plan", "classify", "--labels", "spam,ham", "--yes"),
        *("--by", "lines", "--model", shell.model(script)),
    )
    assert done.code == 1
    assert "all 3 leaves failed" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan", "sumarise"], "unknown plan 'sumarise': did you mean 'summarise'?"),
        (["--plan", "classify"], "plan classify: .*labels"),
        (["--plan", "classify", "--labels", ""], "the set of labels is empty"),
        (["--plan", "none.json"], "the plan none.json cannot be read: No such file"),
        (["--plan", "bad.json"], "the plan cannot be read: "),
        (
            ["--plan", "ok.json", "--top", "3"],
            "--top applies only to ready plans: set it in ok.json instead",
        ),
        (["--plan", "summarise", "--max-calls", "1"], "may take 3 calls, and the limit is 1 calls"),
        (["--plan", "search", "--top", "0", "--part-tokens", "16"], r"a part .* 48 \(16 tokens\)"),
        (["--by", "words"], r"split: by='words': Invalid enum value 'words': .* lines"),
    ],
)
def test_bad_input_is_one_line(shell: Shell, options: list[str], message: str) -> None:
    shell.write("bad.json", '{"steps": [{"step": "count", "by": 3}]}')
    shell.write("ok.json", plans.summarise().to_json())
    shell.write("mail.txt", (MAIL + "x" * 60 + "\n") * 200)
    more = ["--model", shell.model(SCRIPT), *options]
    done = shell.run("plan", "Which?", "mail.txt", *more, "--yes", "--quiet")
    assert done.code == 2, done.err
    assert done.err.count("\n") == 1
    assert re.search(message, done.err), done.err


def test_ask_has_the_mode_of_a_plan(shell: Shell) -> None:
    shell.write("mail.txt", MAIL)
    script = [{"match": "counted", "reply": "2"}, {"match": ".", "reply": '["buy", "see", "buy"]'}]
    model = shell.model(script)
    done = shell.run("ask", "How many buy?", "mail.txt", "--mode", "plan", "--model", model)
    assert (done.code, done.out) == (0, "2\n")
    shown = shell.run("show", done.err.split()[-1]).out
    assert "\nmode plan: aggregate: the question says 'How many'\n\nplan\n" in shown
    assert "\nended: final, after 2 leaf calls\n" in shown
    assert " (strategy): How many buy?" in shown
    assert "final · 2 requests" in shown
    direct = shell.run("ask", "Who?", "mail.txt", "--mode", "direct", "--model", model)
    assert "1 request" in direct.err
    for more, message in (
        (["--mode", "plans"], "--mode plans is unknown: give auto, free, plan, direct"),
        (["--mode", "plan", "--no-direct"], "--mode and --direct set the same thing"),
        (["--mode", "plan", "--dry-run"], "see a plan with ramify plan"),
        (["--mode", "plan", "--cite"], "--mode plan has no session: remove --cite"),
        (["--mode", "plan", "--scaffold=minimal"], "remove --scaffold, or give --mode free"),
        (["--mode", "direct", "--max-turns", "3"], "--mode direct has no session: remove --max-"),
    ):
        wrong = shell.run("ask", "How many?", "mail.txt", *more, "--model", model, "-q")
        assert (wrong.code, wrong.out) == (2, "")
        assert message in wrong.err
