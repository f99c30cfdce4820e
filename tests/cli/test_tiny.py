"""The model that ships with the package: what it answers, and that its card says so."""

from __future__ import annotations

import json

import pytest

from ramify.cli.parser import ExitCode
from ramify.inference.base import TINY
from tests.cli.helpers import Shell

pytest.importorskip("torch", reason="needs ramify[train]")


@pytest.mark.parametrize(("options", "least"), [((), 0.7), (("multi=1.0",), 0.5)])
def test_it_answers_questions_of_its_own_family(
    shell: Shell, options: tuple[str, ...], least: float
) -> None:
    done = shell.run("eval", "ledger", *options, "--model", "tiny", "--items", "12", "--json", "-q")
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    assert json.loads(done.out)["rows"][0]["average"]["value"] >= least


def test_its_files_are_small_and_its_card_is_there() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 1_200_000
    assert "parameters" in (TINY / "README.md").read_text("utf-8")
