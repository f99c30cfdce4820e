"""``ramify calibrate``: its curve, the plans that use it, refusals, and resuming it after a kill."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ramify.cli.parser import ExitCode
from tests.cli.helpers import Shell

SIZES = ("--sizes", "2k,8k")
WEAK = {"curve": {"points": [[3000, 1.0], [3001, 0.0]]}, "price": {"input": 1, "output": 1}}


def weak_model(shell: Shell, **more: Any) -> str:
    """A model that reads 3,000 tokens rightly, and more of them wrongly."""
    return f"offline:{shell.write('weak.json', json.dumps({**WEAK, **more}))}"


def test_curve_is_stored_and_later_plans_use_it(shell: Shell) -> None:
    model = weak_model(shell)
    asked = shell.run("calibrate", model, *SIZES, "--items", "3")
    assert (asked.code, asked.out) == (ExitCode.ANSWERED, "")
    assert "2,000, 8,000 tokens, 6 questions each, one call for each question, about $" in asked.err
    assert "12 attempts; at most $" in asked.err
    assert "nothing was sent; to begin, add --yes" in asked.err
    done = shell.run("calibrate", model, *SIZES, "--items", "3", "--yes", "--svg", "curve.svg")
    assert done.code == ExitCode.ANSWERED, done.err
    lines = done.out.splitlines()
    assert lines[1].split()[:3] == ["2,000", "6", "1.000"]
    assert lines[1].endswith("  best")
    assert lines[2].split()[:3] == ["8,000", "6", "0.000"]
    assert "8,000 tokens: 0.000 [0.00 0.46]" in (shell.folder / "curve.svg").read_text()
    shell.write("note.txt", "The code is 7.\n" * 900)
    shown = shell.run("plan", "What is the code?", "note.txt", "--model", model)
    first = shown.out.splitlines()[0]
    assert "; parts of 2,000 tokens, calibrated 20" in first
    assert "at most 2,000 tokens" in shown.out
    own = shell.run(
        "plan", "What is the code?", "note.txt", "--model", model, "--part-tokens", "999"
    )
    assert "calibrated" not in own.out
    assert "at most 999 tokens" in own.out


def test_killed_calibration_continues_and_pays_nothing_twice(shell: Shell) -> None:
    model = weak_model(shell, sleep="real", latency={"first_s": 0.1, "input_s": 0, "output_s": 0})
    options = (*SIZES, "--items", "6", "--yes", "--concurrency", "2")
    process = shell.start("calibrate", model, *options)
    give_up = time.monotonic() + 100
    while _num_replies(shell) < 5 and time.monotonic() < give_up:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=100)
    num = _num_replies(shell)
    assert 5 <= num < 24
    assert not (shell.folder / "store/calibrations").exists()
    done = shell.run("calibrate", "--resume", "last", "--json", "--yes")
    assert done.code == ExitCode.ANSWERED, done.err
    found = json.loads(done.out)
    assert [(point["tokens"], point["items"]) for point in found["points"]] == [
        (2000, 12),
        (8000, 12),
    ]
    assert found["part_tokens"] == 2000
    assert _num_replies(shell) == 24


def _num_replies(shell: Shell) -> int:
    journals = Path(shell.env["RAMIFY_HOME"], "runs").glob("*.jsonl")
    return sum(path.read_bytes().count(b'{"type":"Replied"') for path in journals)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "model 'nothing' has no provider: write provider:model"),
        (["opnai:gpt"], "opnai"),
        (
            ["offline:default", "--sizes", "500"],
            "'500' is not a number of tokens of at least 1,334",
        ),
        (["offline:default", "--sizes", "2k,2000"], "give at least one size, and each only once"),
        (["offline:default", "--sizes", "900k"], "does not fit the window of offline:default"),
        (["offline:default", "--items", "0"], "--items 0: give at least 1"),
        (["offline:default", "--tolerance", "1.5"], "--tolerance 1.5"),
        (["offline:default", "--svg", "no/such/c.svg"], "its folder does not exist"),
        (["--resume", "20200101"], "no calibration is called '20200101'"),
        (["offline:default", "--resume", "last"], "remove the model"),
    ],
)
def test_wrong_options_are_refused_before_any_call(
    shell: Shell, options: list[str], message: str
) -> None:
    done = shell.run("calibrate", *options, *(["--yes"] if "--resume" not in options else []))
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert message in done.err
    assert not (shell.folder / "store/evaluations").exists()
