"""``examples/demo.py``, which ``scripts/demo`` runs: what it says is right, and it leaves nothing behind."""

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


def test_the_demo_counts_right_and_cleans_up(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    folder.mkdir()
    elsewhere = {  # a user's settings, none of which may change what it shows
        "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home), "TMPDIR": str(folder),
        "RAMIFY_MAX_COST": "1", "OPENAI_API_KEY": "sk-not-to-be-used", "HTTP_PROXY": "http://127.0.0.1:9",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(ROOT / "examples/demo.py")],
        cwd=tmp_path, env={**os.environ, **elsewhere}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = undocumented()
    worst = min(counts, key=lambda name: (-counts[name], name))
    answer = (
        f"{counts.total()} public functions in asyncio have no docstring; "
        f"most of them, {counts[worst]}, in asyncio/{worst}."
    )
    command, said, *shown = done.stdout.splitlines()
    assert command.startswith("$ ramify ask 'How many public functions")
    assert said == answer
    assert f"  answer: {answer}" in shown
    for part in ("final · 3 turns, 9 calls", "0.2.0 lm: Say in one line"):
        assert part in done.stdout
    assert not [*home.iterdir(), *folder.iterdir()]
