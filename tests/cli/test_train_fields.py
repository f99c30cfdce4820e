"""``ramify train --fields`` lists the fields of a run, and ``docs/fields.md`` has the same list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ramify.cli.list_train_fields import COLUMNS
from ramify.cli.parser import ExitCode
from ramify.train.config import Run
from ramify.train.config_fields import describe_type, fields, public_path
from tests.cli.helpers import Shell
from tests.docs.pages import script

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes/tiny.py")


def rows(out: str) -> dict[str, dict[str, str]]:
    head, *lines = [line.split("\t") for line in out.splitlines()]
    assert tuple(head) == COLUMNS
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_all_fields_have_a_type_and_a_meaning(shell: Shell) -> None:
    done = shell.run("train", "--fields")
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    found = rows(done.out)
    assert {"rl.optim.lr", "policy.device", "limits.max_turns", "sandbox.cell_s"} < set(found)
    assert not [name for name, row in found.items() if not row["type"] or not row["meaning"]]
    assert found["rl.optim.lr"] | {"meaning": ""} == {
        "name": "rl.optim.lr",
        "value": "null",
        "default": "null",
        "type": "number or null",
        "class": "train.OptimizerSpec",
        "meaning": "",
    }
    assert found["policy"]["default"] == ""  # it must be given
    assert not [name for name, row in found.items() if " None" in row["meaning"]]
    assert not [name for name, row in found.items() if re.search(r"\w\.py`", row["meaning"])]


def test_sections_and_values_of_a_recipe_are_listed(shell: Shell) -> None:
    done = shell.run("train", "--fields", TINY, "rl.optim", "guard.then", "rl.optim.eps=1e-6")
    found = rows(done.out)
    assert {name.rpartition(".")[0] for name in found} == {"rl", "rl.optim", "guard"}
    assert (found["rl.optim.eps"]["value"], found["rl.optim.eps"]["default"]) == ("1e-6", "1e-8")
    assert found["rl.optim.lr"]["value"] != "null"


def test_fields_are_those_of_the_class_that_a_recipe_chose(shell: Shell) -> None:
    found = rows(shell.run("train", "--fields", TINY, "rl.loss.policy=cispo", "rl.loss.policy").out)
    assert found["rl.loss.policy"]["class"] == "train.Cispo"
    assert "rl.loss.policy.clip_high" in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rl.optm",), "no field 'rl.optm': did you mean 'optim'?"),
        (("optimizer.lr",), "no field 'optimizer.lr': did you mean 'rl.optim.lr'"),
        (("rl.steps=3",), "--fields takes one recipe"),
        (("gone.py",), "gone.py is not a recipe"),
        ((TINY, "rl.setps=3"), "no field 'setps': did you mean 'steps'?"),
    ],
)
def test_wrong_section_or_recipe_is_named(
    shell: Shell, words: tuple[str, ...], message: str
) -> None:
    done = shell.run("train", "--fields", *words)
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert message in done.err


def test_types_are_described_in_words() -> None:
    assert describe_type(tuple[int, ...]) == "list of whole number"
    assert describe_type(dict[str, float]) == "map from names to: number"
    assert public_path(Run) == "train.Run"


def test_page_is_up_to_date() -> None:
    page = (ROOT / "docs/fields.md").read_text(encoding="utf-8")
    assert script("fields_page").written(page) == page, "run: python scripts/fields_page.py"
    assert all(f"| `{each.name.rpartition('.')[2]}` |" in page for each in fields(Run))
