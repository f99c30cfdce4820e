"""``ramify show PATH``: files of rollouts and folders of training runs are shown, and for any other
path the error names the command that reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ramify.cli.parser import ExitCode
from tests.cli.helpers import Shell

GOLDEN_RUN = Path(__file__).parents[1] / "data/golden_run"


@pytest.fixture
def rollouts(shell: Shell) -> str:
    """A file with three rollouts, as training saves them, of which the last is damaged."""
    model = shell.model(["```repl\nprint(6 * 7)\n```", "FINAL(42)"])
    shell.write("log.txt", "six times seven")
    assert shell.run("ask", "How many?", "log.txt", "--model", model, "--no-direct").code == 0
    run = json.loads(shell.run("show", "last", "--json").out)
    lines = [json.dumps({**run, "rewards": {"correct": reward}}) for reward in (1.0, 0.0)]
    return shell.write("rollouts.jsonl", "\n".join([*lines, '{"calls": 3']) + "\n")


def test_file_of_rollouts_is_listed_and_each_can_be_shown(shell: Shell, rollouts: str) -> None:
    listed = shell.run("show", "rollouts.jsonl").out.splitlines()
    assert listed[0] == "rollouts.jsonl: 3 rollouts"
    assert listed[1].split()[:3] == ["1", "reward", "1"]
    assert "How many? → 42" in listed[2]
    assert "line 3 is damaged" in listed[3]
    assert "ramify show rollouts.jsonl:1" in listed[4]
    shown = shell.run("show", "rollouts.jsonl:2")
    assert (shown.code, "| print(6 * 7)" in shown.out) == (ExitCode.ANSWERED, True)
    assert json.loads(shell.run("show", "rollouts.jsonl:2", "--json").out)["answer"] == 42
    rows = shell.run("show", "rollouts.jsonl", "--json").out.splitlines()
    assert [json.loads(row).get("reward") for row in rows] == [1.0, 0.0, None]
    for line, why in ((9, "has no line 9: it has 3 lines"), (3, "line 3 is not a rollout")):
        wrong = shell.run("show", f"rollouts.jsonl:{line}")
        assert (wrong.code, why in wrong.err) == (ExitCode.ERROR, True)


def test_training_run_is_summarised(shell: Shell, rollouts: str) -> None:
    run = shell.folder / "mine"
    shutil.copytree(GOLDEN_RUN, run)
    (run / "rollouts").mkdir()
    shutil.copy(shell.folder / "rollouts.jsonl", run / "rollouts/step-000001.jsonl")
    shown = shell.run("show", "mine")
    assert (shown.code, shown.out.splitlines()[0][:32]) == (0, "mine: a training run, 16 lines o")
    assert "\nreward: " in shown.out
    assert "ramify show mine/rollouts/step-000001.jsonl" in shown.out
    assert "ramify view mine" in shown.out


@pytest.mark.parametrize(
    ("path", "advice"),
    {
        "table.csv": "ramify ask QUESTION table.csv",
        "recipe.py": "ramify train recipe.py",
        "empty.jsonl": "empty.jsonl is empty",
        "documents": "ramify ask QUESTION documents",
        "store": "RAMIFY_HOME=store ramify runs",
        "policy": "--model local:policy",
        "several": "ramify show several/rollouts.jsonl",
        "mine/metrics.jsonl": "ramify show mine",
        "trained": "a folder with 1 training run: ramify show trained/mine, or ramify view trained",
        "nothing.jsonl": "does not exist",
    }.items(),
)
def test_path_of_something_else_names_its_command(
    shell: Shell, rollouts: str, path: str, advice: str
) -> None:
    for file in ("table.csv", "recipe.py", "documents/a.txt", "policy/config.json"):
        (shell.folder / file).parent.mkdir(exist_ok=True)
        shell.write(file, "a,b\n1,2\n")
    shell.write("empty.jsonl", "")
    assert (shell.folder / "store/runs").is_dir()
    (shell.folder / "several").mkdir()
    shutil.copy(shell.folder / "rollouts.jsonl", shell.folder / "several")
    for run in ("mine", "trained/mine"):
        shutil.copytree(GOLDEN_RUN, shell.folder / run)
    refused = shell.run("show", path)
    assert (refused.code, refused.err.count("\n")) == (ExitCode.USAGE, 1)
    assert advice in refused.err
    assert "runs rm" not in refused.err  # the advice to delete a damaged run
