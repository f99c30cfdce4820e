"""``scripts/demo``, ``examples/logs.py`` and ``examples/scripted.py``: their answers are right, and
they leave no files behind."""

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from ramify.train.metrics import StepMetrics
from tests.packaged import TINY
from tests.train.test_recipes import SHORT

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo.py"
ASYNCIO = Path(asyncio.__file__).parent


def undocumented():
    """Public functions of asyncio without a docstring, by module."""
    counts = Counter()
    for path in ASYNCIO.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            is_public = (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
            )
            if is_public and not ast.get_docstring(node):
                counts[path.name] += 1
    return counts


def run_example(tmp_path, *words, timeout=250):
    """Run an example under user settings that must not affect it, and return its output."""
    done = example_process(tmp_path, *words, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example_process(tmp_path, *words, timeout=250, caches=()):
    """Run an example to its end and check that it leaves no files but ``caches`` of torch, and what
    the walls of the jail were found to be on this machine."""
    home, folder = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    folder.mkdir()
    elsewhere = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "XDG_DATA_HOME": str(home),
        "TMPDIR": str(folder),
        "RAMIFY_MAX_COST": "1",
        "OPENAI_API_KEY": "sk-not-to-be-used",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *words],
        cwd=tmp_path,
        env={**os.environ, **elsewhere},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert [
        each.name
        for each in (*home.iterdir(), *folder.iterdir(), *home.glob(".cache/*/*"))
        if not each.name.startswith((".cache", "walls", *caches))
    ] == []
    return done


def test_scripted_example_counts_correctly_and_cleans_up(tmp_path):
    said = run_example(tmp_path, str(ROOT / "examples/scripted.py"))
    counts = undocumented()
    worst = min(counts, key=lambda name: (-counts[name], name))
    answer = (
        f"{counts.total()} public functions in asyncio have no docstring; "
        f"most of them, {counts[worst]}, in asyncio/{worst}."
    )
    command, first, *shown = said.splitlines()
    assert command.startswith("$ ramify ask 'How many public functions")
    assert first == answer
    assert f"  answer: {answer}" in shown
    for part in ("final · 3 turns, 9 requests", "0.2.0 lm: Say in one line"):
        assert part in said


def test_logs_example_finds_the_host_that_was_made_to_fail(tmp_path):
    said = run_example(tmp_path, str(ROOT / "examples/logs.py"))
    failing = re.search(r"; (\S+) is the host whose disk was filled\.", said)[1]
    command, *shown = said.splitlines()
    assert command.startswith("$ ramify ask 'Which host failed first, and why?' logs/")
    assert (
        f"{failing} failed first, on 2026-03-07T02:13:00: cannot write WAL segment: no space left on "
        "device. The errors of 5 other hosts follow from it." in shown
    )
    for part in ("final · 3 turns, 9 requests", "├ 0.0 ", "└ 0.5 ", "201 errors: its own", " $0."):
        assert part in said


def check_tree(said):
    """Check that the answer agrees with the rows and that three children got a document each."""
    _, asked = said.split("$ ramify ask ")
    _, answer, *shown = asked.splitlines()
    assert f"The rows that the ledger was made of say: {answer}" in shown
    calls = [line.split()[0] for line in shown if " (rlm): " in line]
    assert calls == ["0", "0.0", "0.1", "0.2"]
    assert any(line.startswith(("context: str, 9,", "context: str, 10,")) for line in shown)


@pytest.mark.parametrize(
    ("script", "words", "code", "says"),
    [
        ("scripts/demo", ["--train", "--help"], 0, "usage: demo.py"),
        ("scripts/demo", ["--tarin"], 2, "unrecognized arguments: --tarin"),
        ("scripts/demo", ["--out", "x"], 2, "--out need --train"),
        ("scripts/demo", ["--questions=3"], 0, "installing"),
        ("scripts/test", ["--help"], 0, "Runs the tests"),
        ("scripts/check", ["--help"], 0, "Runs all checks"),
        ("scripts/check", ["--fast"], 2, "takes no arguments, and got '--fast'"),
        ("benchmarks/setup", ["--help"], 0, "Installs everything"),
        ("benchmarks/setup", ["x"], 2, "takes no arguments, and got 'x'"),
        ("scripts/setup", ["--help"], 0, "Installs the package"),
    ],
)
def test_scripts_check_their_arguments_before_they_install(tmp_path, script, words, code, says):
    for name in ("scripts/demo", "scripts/test", "scripts/check", "benchmarks/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "examples").mkdir()
    shutil.copy(DEMO, tmp_path / "examples")
    if script == "scripts/setup":
        shutil.copy(ROOT / script, tmp_path / script)
    else:
        (tmp_path / "scripts/setup").write_text("echo installing; exit 0\n")
        python = tmp_path / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / script, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert ("installing" in done.stdout) == (says == "installing")


@pytest.mark.parametrize("name", ["logs", "scripted"])
def test_help_of_an_example_does_not_run_it(tmp_path, name):
    said = run_example(tmp_path, str(ROOT / f"examples/{name}.py"), "--help")
    assert said.startswith(f"usage: {name}.py [-h]")
    assert "$ ramify" not in said


def test_the_packaged_policy_answers_over_ten_million_characters(tmp_path):
    said = run_example(tmp_path, str(DEMO))
    assert said.startswith("$ ramify ask ")
    assert " tiny (rlm): " in said
    check_tree(said)
    assert "view last" not in said


def test_a_kept_demo_can_be_read_later(tmp_path):
    kept = tmp_path / "kept"
    for name in ("first", "second"):  # which replaces the first
        (tmp_path / name).mkdir()
        said = run_example(tmp_path / name, str(DEMO), "--keep", str(kept))
        assert said.endswith(f"  RAMIFY_HOME={kept}/runs .venv/bin/ramify view last\n")
    assert (kept / "ledger.txt").stat().st_size > 9_000_000
    shown = subprocess.run(
        [sys.executable, "-m", "ramify", "runs", "--json"],
        env={**os.environ, "RAMIFY_HOME": f"{kept}/runs"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [json.loads(line)["question"] for line in shown.splitlines()] == [
        "count rows of 'red' in all docs"
    ]


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        ("```repl\nFINAL(1)\n```", 1, "demo: scripted:model.json answered '1', which is wrong\n"),
        (
            "```repl\nFINAL(None)\n```",
            4,
            "demo: scripted:model.json answered 'nothing', which is wrong\n",
        ),
    ],
)
def test_wrong_or_missing_answer_gives_failing_exit_code(tmp_path, reply, code, words):
    (tmp_path / "model.json").write_text(json.dumps([reply]))
    done = example_process(tmp_path, str(DEMO), "--model", f"scripted:{tmp_path}/model.json")
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith(words.replace("scripted:", f"scripted:{tmp_path}/"))
    assert "$ ramify show last" in done.stdout


def test_demo_evaluates_and_asks_the_trained_policy(tmp_path):
    """A finished run is not trained again; here the packaged policy is used as its result."""
    run = tmp_path / "run"
    shutil.copytree(TINY, run / "policy")
    rows = [
        StepMetrics(1, stage, 1.0, {"test/reward": share})
        for stage, share in (("first", 0.04), ("last", 0.91))
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    said = run_example(tmp_path, str(DEMO), "--train", "--out", "run", "--questions", "24")
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert lines[0] == f"{run}/policy was trained before; remove {run} to train again"
    assert "before reinforcement learning, sampled at temperature 1 4.0%" in lines
    assert "after it, the last step, sampled at temperature 1 91.0%" in lines
    (greedy,) = (
        line
        for line in lines
        if line.startswith("the policy that is asked below, at temperature 0 ")
    )
    assert float(greedy.split()[-1].rstrip("%")) >= 90
    check_tree(said)


@pytest.mark.slow
def test_unsuccessful_training_gives_failing_exit_code(tmp_path):
    """After two steps of each stage, fewer than 90 % of the answers are right."""
    done = example_process(
        tmp_path,
        str(DEMO),
        "--train",
        "--out",
        "run",
        "--questions",
        "4",
        *SHORT,
        timeout=280,
        caches=("torchinductor",),
    )
    assert done.returncode == 1
    assert "$ ramify train recipes/tiny_recursive.py " in done.stdout
    assert "before reinforcement learning, sampled at temperature 1" in done.stdout
    assert "right is below 90%: training did not succeed" in done.stderr


def test_recipe_fields_require_the_train_option(tmp_path):
    done = example_process(tmp_path, str(DEMO), "rl.steps=20")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: fields of the recipe and --out need --train\n")
