"""``ramify eval --placement ray``, on a cluster of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ramify.cli.parser import ExitCode
from tests.cli.helpers import Shell

pytest.importorskip("ray")

SUITE = """
import os, random, signal
from ramify.tasks.base import Item, DatasetTask, generated
from ramify.tasks.scoring import numeric

def make(rng: random.Random) -> Item:
    words = rng.choices(["teal", "mint"], k=20)
    return Item("How often does 'teal' occur?", " ".join(words), gold=words.count("teal"))

def scored(answer, item):
    # The first score of item 2 ends its worker, after the model was paid.
    if item.id.endswith("/2") and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return numeric(answer, item)

def suite():
    return DatasetTask("suite", generated("suite", make), scored)
"""


@pytest.mark.slow
def test_attempts_of_a_lost_worker_continue_from_their_journals(shell: Shell) -> None:
    shell.write("suite.py", SUITE)
    model = shell.model([{"match": "", "reply": ["FINAL(context.count('teal'))"]}])
    settings = ("--sandbox", "process", "--allow-weaker", "--scaffold", "tiny", "-q")
    words = ("--model", model, "--items", "6", "--placement", "ray", "--workers", "2", *settings)
    done = shell.run("eval", "suite.py:suite", *words, "--no-validate", "--json")
    assert done.code == ExitCode.ANSWERED, done.err
    assert (shell.folder / "killed").exists()
    row = json.loads(done.out)
    assert (row["made"], row["score"]["value"], row["reasons"]) == (6, 1, {})
    # Each item has one run, so nothing was asked twice.
    assert len(list(Path(shell.env["RAMIFY_HOME"]).glob("runs/*.jsonl"))) == 6
    assert row["calls"] == 6


def test_workers_and_placement_are_checked(shell: Shell) -> None:
    model = shell.model([])
    for words, message in (
        (("--placement", "moon"), "--placement moon is unknown: give local or ray"),
        (("--workers", "2"), "--workers needs --placement ray"),
    ):
        done = shell.run("eval", "needle", "--model", model, *words)
        assert done.code == ExitCode.USAGE
        assert message in done.err
