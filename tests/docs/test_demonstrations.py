"""``docs/demonstrations.md`` from first to last block: its files are saved, run, and used for a
short training run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_notebooks import environment

FILES = ("errors_task.py", "demonstrate.py", "recipe.py")


@pytest.mark.slow
def test_documented_task_is_demonstrated_and_trained(tmp_path: Path) -> None:
    code = [b.code for b in blocks(ROOT / "docs/demonstrations.md") if b.language == "python"]
    for name, text in zip(
        FILES, code[1:], strict=True
    ):  # the first block is written by `ramify init`
        (tmp_path / name).write_text(text)

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert python("demonstrate.py") == "400 of 400 demonstrations are right\n"
    short = ("sft.epochs=1", "rl.steps=1", "evaluate.num=8", "evaluate.validation=4")
    python("-m", "ramify", "train", "recipe.py", *short, "--out", "run", "--quiet")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [row["values"] for row in map(json.loads, lines) if row["stage"] == "rl"]
    assert sum("groups_with_signal" in row for row in rows) == 1  # one step
    assert any("validation/reward" in row for row in rows)
    assert (tmp_path / "run/policy/config.json").is_file()
