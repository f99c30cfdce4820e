"""``ramify eval``: its output, its error messages, and resuming an interrupted evaluation."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import msgspec

from ramify.cli.parser import ExitCode
from ramify.evaluate.run_evaluation import EvaluationStore
from ramify.evaluate.statistics import paired_difference, share_with_interval
from tests.cli.helpers import Shell

MINE = """
import random
from ramify.tasks.base import Item, generated
from ramify.tasks.scoring import numeric
from ramify.tasks.base import DatasetTask

def make(rng: random.Random) -> Item:
    words = rng.choices(["teal", "coral", "mint"], k=50)
    return Item("How often does 'teal' occur?", " ".join(words), gold=words.count("teal"), kind=rng.choice("ab"))

def teal(bad: bool = False):
    return DatasetTask("teal", generated("teal", make), (lambda answer, item: 0.5) if bad else numeric)
"""
RIGHT = [{"match": "", "reply": ["FINAL(context.count('teal'))"]}]
WRONG = [{"match": "", "reply": ["FINAL(-1)"]}]
FAST = ("--scaffold", "tiny", "--sandbox", "process", "--allow-weaker", "-q")


def start(shell: Shell, script: list[object], *arguments: str) -> tuple[str, ...]:
    shell.write("my_task.py", MINE)
    return ("eval", "my_task.py:teal", "--model", shell.model(script), *FAST, *arguments)


def test_eval_prints_a_table_of_scores(shell: Shell) -> None:
    done = shell.run(*start(shell, RIGHT, "--items", "12", "--n", "2"))
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    lines = done.out.splitlines()
    assert lines[0] == "my_task.py:teal/test · scripted:script.json · 12 items, 2 attempts each"
    assert lines[1].split() == ["items", "avg@2", "pass@2", "majority@2"]
    assert lines[2].split(maxsplit=2) == [
        "all",
        "12",
        "1.000 [0.74 1.00]   1.000 [0.74 1.00]   1.000 [0.74 1.00]",
    ]
    assert [line.split()[0] for line in lines[3:5]] == ["a", "b"]
    assert "in all " in lines[-1]


AGENT = """
import json, os, sys, urllib.request
with open(sys.argv[1]) as file:
    messages = [{"role": "user", "content": json.load(file)["question"]}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "any", "messages": messages}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_an_agent_is_evaluated_from_the_command_line(shell: Shell) -> None:
    """As docs/agents.md says."""
    shell.write("my_agent.py", AGENT)
    rows = [{"question": f"{number} + {4 - number}?", "answer": "4"} for number in range(4)]
    shell.write("rows.jsonl", "\n".join(map(json.dumps, rows)))
    given = ("command={python} my_agent.py {item_file}", "items=rows.jsonl", "reward=exact")
    model = shell.model([{"match": "", "reply": ["4"] * 4}])
    done = shell.run("eval", "agent", *given, "--split", "train", "--model", model, "-q")
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    assert done.out.startswith("agent/train · scripted:script.json")
    assert "mean correct 1" in done.out


def test_json_output_and_comparison_with_another_evaluation(shell: Shell) -> None:
    first = json.loads(shell.run(*start(shell, WRONG, "--items", "3", "--json")).out)
    second = json.loads(
        shell.run(
            *start(shell, RIGHT, "--items", "4", "--json", "--against", first["evaluation"])
        ).out
    )
    assert second["rows"][0]["average"] == msgspec.to_builtins(share_with_interval(4, 4))
    assert second["against"] == {
        "evaluation": first["evaluation"],
        "items": 3,
        "average": msgspec.to_builtins(paired_difference([1.0] * 3, [0.0] * 3)),
    }
    shown = shell.run(*start(shell, RIGHT, "--items", "2", "--against", first["evaluation"])).out
    assert (
        f"average minus that of {first['evaluation']}: +1.000 [-0.684 +1.000] over 2 items\n"
        "2 of them got better, 0 worse\n"
    ) in shown


def test_two_scaffolds_are_compared_over_the_same_items(shell: Shell) -> None:
    """The model counts only if its prompt shows the beginning of the context."""
    script = [
        {"match": "It begins|All of it", "reply": ["```repl\nFINAL(context.count('teal'))\n```"]},
        {"match": "", "reply": ["```repl\nFINAL(-1)\n```"]},
    ]
    shell.write(
        "plain.toml", 'name = "plain"\nfirst = "{{question}}"\ndirect-chars = 0\n'.replace("-", "_")
    )
    asked = start(shell, script, "--items", "3")
    asked = tuple("default,plain.toml" if each == "tiny" else each for each in asked)
    done = shell.run(*asked)
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    rows = done.out.splitlines()
    assert any("minus default" in row for row in rows)
    plain = next(row for row in rows if "plain.toml" in row and "all " in row)
    assert "0.000 [0.00 0.71]   -1.000 [-1.00 +0.42]" in plain
    lines = [json.loads(line) for line in shell.run(*asked, "--json").out.splitlines()]
    first, second = (line for line in lines if line["family"] == "all")
    assert (first["scaffold"], first["score"]["value"], first["difference"]) == ("default", 1, None)
    assert (second["scaffold"], second["difference"]["value"]) == ("plain.toml", -1)
    for wrong, problem in (
        ("default,none.toml", "the scaffold none.toml cannot be read"),
        ("default,default", "a value is repeated: give each only once"),
    ):
        again = tuple(wrong if each == "default,plain.toml" else each for each in asked)
        done = shell.run(*again)
        assert (done.code, done.out) == (ExitCode.USAGE, "")
        assert problem in done.err


def test_the_only_split_is_evaluated_and_others_are_named(shell: Shell) -> None:
    model = shell.model([{"match": "", "reply": ["FINAL('x')"]}])
    shell.write(
        "two.py",
        "from ramify.tasks.base import Item, DatasetTask\n"
        "from ramify.tasks.scoring import exact\n"
        "def rows(num: int = 1):\n"
        "    splits = {name: [Item('a?', 'b', 'x', id=name)] for name in ['dev', 'other'][:num]}\n"
        "    return DatasetTask('rows', splits, exact)\n",
    )
    one = shell.run("eval", "two.py:rows", "--model", model, *FAST, "--json")
    assert json.loads(one.out)["plan"]["split"] == "dev"
    told = shell.run("eval", "two.py:rows", "--model", model, "--sandbox", "process").err
    assert "task 'rows' has no split 'test', so its only one, 'dev', is evaluated\n" in told
    two = shell.run("eval", "two.py:rows", "num=2", "--model", model, *FAST)
    assert two.code == ExitCode.USAGE
    assert "has no split 'test'; it has dev, other: choose one with --split" in two.err


def test_eval_refuses_wrong_arguments(shell: Shell) -> None:
    shell.write("rows.jsonl", '{"question": "a?", "answer": 1}\n{"question": "b?", "gold": 1}\n')
    for arguments, code, message in (
        (("legder",), ExitCode.USAGE, "unknown task 'legder': did you mean 'ledger'"),
        (
            ("ledger", "--split", "tset"),
            ExitCode.USAGE,
            "task 'ledger' has no split 'tset': did you mean 'test'",
        ),
        (
            ("ledger", "--n", "2", "--k", "3"),
            ExitCode.USAGE,
            "pass@3 needs at least 3 attempts at each item (n), and there are 2",
        ),
        (("ledger", "--items", "0"), ExitCode.USAGE, "evaluate 0 items"),
        (
            ("ledger", "mutli=1"),
            ExitCode.USAGE,
            "task 'ledger' has no option 'mutli': did you mean 'multi'",
        ),
        (("ledger", "multi"), ExitCode.USAGE, "'multi' is not a task option: write NAME=VALUE"),
        (
            ("my_task.py:teal", "bad=true"),
            ExitCode.USAGE,
            "task 'teal', item teal/test/0: the right answer",
        ),
        (
            ("rows.jsonl",),
            ExitCode.USAGE,
            "rows.jsonl, line 2: it has no column 'answer'; its columns are question, gold",
        ),
        ((), ExitCode.USAGE, "no task: ramify eval"),
        (
            ("ledger", "--resume", "last"),
            ExitCode.USAGE,
            "--resume continues the evaluation with its original settings: remove TASK, --model, --sandbox",
        ),
        (("ledger", "--against", "x"), ExitCode.USAGE, "found no evaluation 'x'"),
        (("ledger", "--against", "x", "--no-store"), ExitCode.USAGE, "remove --no-store"),
    ):
        shell.write("my_task.py", MINE)
        done = shell.run("eval", *arguments, "--model", shell.model(RIGHT), "--sandbox", "process")
        assert (done.code, done.out) == (code, ""), arguments
        assert done.err.startswith("ramify: ")
        assert message in done.err, done.err
    none = shell.run("eval", "ledger")
    assert none.code == ExitCode.USAGE
    assert "no model is set" in none.err
    assert not list(Path(shell.env["RAMIFY_HOME"]).glob("evaluations/*"))


def test_failed_attempts_are_reported_and_not_scored(shell: Shell) -> None:
    """Failed attempts do not count as a score of 0, also in a comparison with another evaluation."""
    before = json.loads(shell.run(*start(shell, RIGHT, "--items", "2", "--json")).out)["evaluation"]
    refused = [{"match": "", "reply": {"fail": "refused", "text": "no such key"}}]
    words = start(shell, refused, "--items", "10", "--against", before, "--progress", "lines")
    done = shell.run(*(word for word in words if word != "-q"))
    assert done.code == ExitCode.ERROR
    assert done.out.splitlines()[2].split() == ["all", "10", "-"]
    assert "10 of 10 attempts failed and are not counted; the first: " in done.out
    assert "no such key" in done.out
    assert "10 of 10 attempts, no average · 10 failed" in done.err
    assert done.err.splitlines()[-1].startswith(
        "ramify: no attempt was scored: all 10 failed, the first with: "
    )


def test_interrupted_evaluation_can_be_resumed(shell: Shell) -> None:
    words = start(shell, RIGHT, "--items", "120", "--concurrency", "2")
    # slow enough to be interrupted before it ends
    slowly = "lambda answer, item: (time.sleep(0.1), numeric(answer, item))[1]"
    shell.write("my_task.py", "import time\n" + MINE.replace("else numeric", f"else ({slowly})"))
    process = shell.start(*(word for word in words if word != "-q"))
    records = EvaluationStore(Path(shell.env["RAMIFY_HOME"]))
    give_up = time.monotonic() + 100
    while not _num_lines(shell) > 3 and time.monotonic() < give_up:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == ExitCode.STOPPED
    begun = records.load("last")
    assert 0 < len(begun.outcomes) < 120
    assert f"continue with: ramify eval --resume {records.path('last').stem}" in err.decode()
    done = shell.run("eval", "--resume", "last", "--json", "--concurrency", "16", "-q")
    assert done.code == ExitCode.ANSWERED, done.err
    found = json.loads(done.out)
    assert (found["attempts"], found["failed"]) == (120, 0)
    again = records.load("last")
    assert {(each.item, each.run) for each in begun.outcomes} <= {
        (each.item, each.run) for each in again.outcomes
    }


def test_resume_command_is_not_wrapped_on_a_terminal(shell: Shell) -> None:
    """A narrow terminal breaks the line only as it is shown, so that it can be copied."""
    slowly = "lambda answer, item: (time.sleep(0.1), numeric(answer, item))[1]"
    words = [
        word for word in start(shell, RIGHT, "--items", "120", "--concurrency", "2") if word != "-q"
    ]
    shell.write("my_task.py", "import time\n" + MINE.replace("else numeric", f"else ({slowly})"))
    shell.env["COLUMNS"] = "70"
    ours, theirs = pty.openpty()
    process = shell.start(*words, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    written, is_stopped = b"", False
    with contextlib.suppress(OSError):  # Linux says so where the other end is closed
        while block := os.read(ours, 1 << 16):
            written += block
            if not is_stopped and re.search(rb"[1-9]\d* of 120", written):
                process.send_signal(signal.SIGINT)
                is_stopped = True
    os.close(ours)
    assert process.wait(100) == ExitCode.STOPPED
    assert re.search(rb"continue with: ramify eval --resume \d{8}-\S+-test\r\n", written)


def _num_lines(shell: Shell) -> int:
    files = list(Path(shell.env["RAMIFY_HOME"]).glob("evaluations/*.jsonl"))
    return files[0].read_bytes().count(b"\n") if files else 0
