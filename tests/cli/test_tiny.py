"""The model that ships with the package: its accuracy, its size and its model card."""

from __future__ import annotations

import json
from pathlib import Path

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


LEDGER = "bavo,red,17\nkilu,blue,3\nsani,red,9\n"
DOCUMENTS = "###\nlabel;qty;user\nred;17;bavo\n###\nred|kilu|3\n"


@pytest.mark.parametrize(
    ("question", "context", "is_known"),
    [
        ("count rows of 'red'", LEDGER, True),
        ("count rows of 'red' in all docs", DOCUMENTS, True),
        ("How many rows are red?", LEDGER, False),
        ("count rows of 'red' in all docs", LEDGER, False),
        ("count rows of 'red'", DOCUMENTS, False),
        ("count rows of 'red'", "GET /orders 200\nGET /stock 500\n", False),
        ("count rows of 'red'", "bavo,teal,17\nkilu,plum,3\n", False),
    ],
)
def test_tiny_warns_about_what_it_was_not_trained_for(
    shell: Shell, tmp_path: Path, question: str, context: str, is_known: bool
) -> None:
    (tmp_path / "in.txt").write_text(context)
    asked = shell.run("ask", question, str(tmp_path / "in.txt"), "--model", "tiny")
    warning = "tiny knows only ledgers (rows of user, colour and quantity), with questions such as"
    documents = "\"count rows of 'red' in all docs\" if lines such as ### divide the rows"
    assert (documents in asked.err) is not is_known
    assert ("do not trust the answer" in asked.err, warning in asked.err) == (not is_known,) * 2
    shown = shell.run("show", "last")
    assert (warning in shown.out) is not is_known


def test_tiny_model_is_small_and_has_a_model_card() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 1_200_000
    assert "parameters" in (TINY / "README.md").read_text("utf-8")
