"""Files of the development tools: pre-commit hooks, the CI workflow and the changelog."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
(LOCAL,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
SUFFIXES = {"python": "*.py", "pyi": "*.pyi", "jupyter": "*.ipynb", "markdown": "*.md"}


def command(hook: dict[str, Any], *files: str) -> subprocess.CompletedProcess[str]:
    """Run a hook as pre-commit does, but with this Python instead of the one in .venv."""
    program, *words = hook["entry"].split()
    assert program == ".venv/bin/python"
    given = files if hook.get("pass_filenames", True) else ()
    return subprocess.run(
        [sys.executable, *words, *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize("hook", LOCAL["hooks"], ids=lambda hook: hook["id"])
def test_hook_accepts_the_repository(hook: dict[str, Any]) -> None:
    patterns = [SUFFIXES[kind] for kind in hook.get("types_or", hook.get("types"))]
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed
    done = command(hook, *(name for name in listed if (ROOT / name).is_file()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("id", ["ruff", "format"])
def test_a_hook_rejects_bad_code(id: str, tmp_path: Path) -> None:
    (hook,) = (hook for hook in LOCAL["hooks"] if hook["id"] == id)
    (tmp_path / "bad.py").write_text("import os\nx = [1,2]\n")
    assert command(hook, str(tmp_path / "bad.py")).returncode == 1


def test_hooks_are_part_of_scripts_check() -> None:
    assert LOCAL["repo"] == "local"
    checked = (ROOT / "scripts/check").read_text("utf-8")
    for hook in LOCAL["hooks"]:
        words = hook["entry"].removesuffix(" --force-exclude")
        assert words in checked.replace(" --quiet", ""), hook["id"]


def test_workflow_runs_only_the_check_and_test_scripts() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert sorted(step["run"] for step in steps if "run" in step) == [
        "scripts/check",
        "scripts/test",
    ]
    used = {step["uses"].partition("@")[0] for step in steps if "uses" in step}
    assert used == {"actions/checkout", "actions/setup-python"}


def test_workflow_tests_every_declared_python_version() -> None:
    named = [
        found[1]
        for each in PROJECT["classifiers"]
        if (found := re.fullmatch(r".*:: (3\.\d+)", each))
    ]
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == named


def test_changelog_is_short_and_starts_with_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## .*", text, re.MULTILINE)[0] == "## Unreleased"
    assert len(text.splitlines()) < 400
    assert "| before | now |" not in text  # docs/renames.md has that table
