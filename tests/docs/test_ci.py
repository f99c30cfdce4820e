"""The CI workflow runs what developers run, on every Python version that the package declares."""

from __future__ import annotations

import re
import subprocess
import tomllib

import yaml

from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))


def test_setup_explains_itself_and_refuses_what_is_not_an_extra() -> None:
    def run(argument: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "scripts/setup"), argument]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    asked = run("--help")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith("Installs the package: scripts/setup [EXTRA…]")
    assert run("nothing").stderr == ("scripts/setup: 'nothing' is not an extra of pyproject.toml\n")


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
