"""What ``scripts/demo`` runs and ``examples/scripted.py``: what they say is right, and they leave nothing behind."""

import ast
import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASYNCIO = Path(asyncio.__file__).parent


def undocumented():
    """Public functions of asyncio without a docstring, by module."""
    counts = Counter()
    for path in ASYNCIO.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            is_public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
            if is_public and not ast.get_docstring(node):
                counts[path.name] += 1
    return counts


def ran(tmp_path, *words, timeout=250):
    """The example's process, once it is over: amid settings of a user's, none of which may change what it shows."""
    home, folder = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    folder.mkdir()
    elsewhere = {
        "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home), "TMPDIR": str(folder),
        "RAMIFY_MAX_COST": "1", "OPENAI_API_KEY": "sk-not-to-be-used", "HTTP_PROXY": "http://127.0.0.1:9",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *words],
        cwd=tmp_path, env={**os.environ, **elsewhere}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [*home.iterdir(), *folder.iterdir()]
    return done.stdout


def test_the_script_counts_right_and_cleans_up(tmp_path):
    said = ran(tmp_path, str(ROOT / "examples/scripted.py"))
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
    for part in ("final · 3 turns, 9 calls", "0.2.0 lm: Say in one line"):
        assert part in said


def test_the_packaged_policy_answers_over_ten_million_characters(tmp_path):
    """It hands three documents to three children; its answer is what the rows say."""
    said = ran(tmp_path, str(ROOT / "examples/demo.py"), "--model", "tiny")
    command, answer, *shown = said.splitlines()
    assert command.startswith("$ ramify ask ")
    assert f"The rows that the ledger was made of say: {answer}" in shown
    assert [line.split()[0] for line in shown if " tiny (rlm): " in line] == ["0", "0.0", "0.1", "0.2"]
    assert any(line.startswith(("context: str, 9,", "context: str, 10,")) for line in shown)
