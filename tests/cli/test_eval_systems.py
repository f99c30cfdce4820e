"""``ramify eval … --with``: other systems answer the same items at a meter, with the same budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.helpers import Done, Shell

SUITE = """
from ramify.tasks.base import Item, DatasetTask

def reward(answer, item):
    return float(str(answer) == item.gold)

items = [Item(f"What is {n} plus 0?", "x" * 900, gold=str(n), id=f"sums/{n}") for n in (1, 2, 3)]
suite = DatasetTask("sums", {"test": items}, reward)
"""
SYSTEM = """
import json, os, re, sys, urllib.request

question, context = sys.argv[1], open(sys.argv[2]).read()
number = int(re.search(r"\\d+", question)[0])

def ask(prompt):
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 10**9}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

for _ in range(10 if number == 3 else 2):
    assert ask(context) == "noted"
print(number)
"""


def matrix(shell: Shell, *options: str) -> Done:
    shell.write("sums.py", SUITE)
    shell.write("greedy.py", SYSTEM)
    script: list[Any] = [
        *(
            {"match": f"What is {n} plus 0", "reply": f"```repl\nFINAL({n})\n```"}
            for n in (1, 2, 3)
        ),
        {"match": "", "reply": "noted"},
    ]
    model = shell.model(script)
    prices = {model: {"input": 1.0, "output": 2.0, "window": 100_000}}
    shell.env["RAMIFY_PRICES"] = str(shell.folder / shell.write("prices.json", json.dumps(prices)))
    words = ("eval", "sums.py:suite", "--model", model, "--no-validate", "--json", "--yes", "-q")
    return shell.run(*words, *options)


def test_a_command_and_a_session_answer_the_same_items(shell: Shell) -> None:
    done = matrix(
        shell, "--with", "{python} greedy.py {question} {context_file}", "--max-calls", "5"
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    ours, theirs = (line for line in lines if "score" in line)
    assert (ours["mode"], theirs["mode"]) == ("free", "greedy.py")
    assert (ours["score"]["value"], ours["calls"]) == (1.0, 3)
    # The journal's counts are those of the meter; the command has no count.
    assert ours["own"] == {
        "attempts": 3,
        "calls": 3,
        "tokens": ours["input_tokens"] + ours["output_tokens"],
    }
    assert theirs["own"] is None
    assert theirs["score"]["value"] == pytest.approx(2 / 3)
    assert theirs["reasons"] == {"budget": 1}
    assert theirs["calls"] == 2 + 2 + 5
    assert theirs["output_tokens"] == 2 * 9
    curves = {line["mode"]: line["money"] for line in lines if "money" in line}
    assert curves.keys() == {"free", "greedy.py"}
    assert curves["free"][-1]["score"]["value"] == 1.0
    assert [point["within"] for point in curves["greedy.py"]][-1] == 3
    records = list((shell.folder / "store/meter").glob("*.jsonl"))
    assert len(records) == 1
    assert records[0].read_text().count('"status":402') == 1
    resumed = shell.run("eval", "--resume", "last", "--json", "--yes")
    assert resumed.out == done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--with", "rlms"), "rlms==0.1.3 is not installed in"),
        (("--with", "cat {context_file}"), "has no {question}"),
        (("--with", "drost"), "'drost' is not a system: did you mean 'droste'?"),
        (("--with", "echo {question}", "--sub-model", "scripted:b"), "remove one of them"),
        (("--with", "echo {question}", "--with", "echo {question} x"), "have the same name"),
    ],
)
def test_wrong_systems_are_refused_before_anything_is_asked(
    shell: Shell, options: tuple[str, ...], message: str
) -> None:
    done = matrix(shell, *options)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not list(shell.folder.glob("store/evaluations/*"))
