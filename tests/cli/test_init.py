"""``ramify init task`` writes a task with a passing test that can be used as a recipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ramify.train.recipe import load_recipe
from tests.cli.helpers import Shell


def test_generated_task_passes_its_test_and_loads_as_recipe(shell: Shell) -> None:
    done = shell.run("init", "task", "errors")
    assert (done.code, done.out) == (
        0,
        "wrote errors.py, test_errors.py; next: ramify train errors.py --out runs/errors\n",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_errors.py"]
    tested = subprocess.run(
        command, cwd=shell.folder, env=shell.env, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout
    run = load_recipe(shell.folder / "errors.py")
    assert (run.name, run.task.name) == ("errors", f"{shell.folder / 'errors.py'}:errors")
    again = shell.run("init", "task", "errors")
    assert (again.code, "errors.py exists already" in again.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe", "x"), "ramify init recipe: only 'task' can be written"),
        (("task", "My-Task"), "'My-Task' is not a valid module name"),
        (("task", "class"), "'class' is not a valid module name"),
        (("task", "random"), "'random' is a module of Python, which random.py would hide"),
        (("task", "msgspec"), "'msgspec' is a module of an installed package"),
    ],
)
def test_bad_input_gets_one_line_error(shell: Shell, words: tuple[str, ...], message: str) -> None:
    done = shell.run("init", *words)
    assert (done.code, message in done.err, done.err.count("\n")) == (2, True, 1)
