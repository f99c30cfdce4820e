"""The model that ships with the package: its accuracy, its size and its model card."""

from __future__ import annotations

import json

import pytest

from ramify.cli.parser import ExitCode
from tests.cli.helpers import Shell
from tests.packaged import TINY

pytest.importorskip("torch", reason="needs ramify[train]")


@pytest.mark.parametrize(
    ("options", "least"),
    [((), 0.7), (("multi=1.0",), 0.5), (('kinds=["latest"]',), 0.7)],
)
def test_tiny_model_answers_ledger_questions(
    shell: Shell, options: tuple[str, ...], least: float
) -> None:
    done = shell.run("eval", "ledger", *options, "--model", "tiny", "--items", "12", "--json", "-q")
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    assert json.loads(done.out)["rows"][0]["average"]["value"] >= least


def test_tiny_model_is_small_and_has_a_model_card() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 1_200_000
    assert "parameters" in (TINY / "README.md").read_text("utf-8")
