"""``ramify train`` as a process: a whole small run, overrides, resuming, and its output while it
runs."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from ramify.cli.train import LiveTrainingCurves, draw_sparkline, format_metrics_line
from ramify.train.checkpoint import CheckpointStore
from ramify.train.metrics import StepMetrics, read_metrics
from tests.cli.helpers import Shell

RECIPE = "from tests.train.small import small as run\n"
SHORT = ("warmup=null", "sft.num=20", "rl.steps=1", "threads=1")


@pytest.mark.slow
def test_run_completes_and_can_be_resumed(shell: Shell) -> None:
    recipe = shell.write("small.py", RECIPE)
    done = shell.run("train", recipe, "--out", "out", "seed=4", *SHORT, PYTHONPROFILEIMPORTTIME="1")
    assert (done.code, done.out) == (
        0,
        "trained policy in out/policy: ramify ask --model local:out/policy …\n",
    ), done.err
    out = shell.folder / "out"
    assert (out / "policy/model.safetensors").is_file()
    assert "validation/reward" in done.err
    assert re.search(r"\| +torch\n", done.err)
    assert (
        "transformers.modeling_utils" not in done.err
    )  # nothing here needs it, and it takes seconds
    again = shell.run("train", "--resume", "out", "--quiet")
    assert (again.code, again.err) == (0, "")
    other = shell.run("train", recipe, "--resume", "out", *SHORT)
    assert (other.code, "seed was 4 and is now 0" in other.err) == (2, True)


@pytest.mark.slow
def test_interrupted_run_names_the_resume_command(shell: Shell) -> None:
    recipe = shell.write("small.py", RECIPE)
    running = shell.start(
        "train", recipe, "--out", "out", *SHORT, "rl.steps=100000", "schedule.evaluate_every=1"
    )
    assert running.stderr is not None
    for text in iter(running.stderr.readline, b""):
        if b"validation/reward" in text and b"(rl)" in text:
            break
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=200)
    assert running.returncode == 130, err.decode()
    out = shell.folder / "out"
    latest = CheckpointStore(out).latest()
    assert latest is not None
    step = max(row.step for row in read_metrics(out) if row.stage == "rl")
    assert latest.name == f"step-{step:06d}"
    stopping = "SIGINT: stopping; a step that is being learned from is finished and saved first"
    assert stopping in err.decode()
    assert err.decode().splitlines()[-1] == (
        f"the run was ended by SIGINT; it is saved at step {step}; continue with: "
        "ramify train --resume out"
    )
    assert "Traceback" not in (out / "run.log").read_text()


def test_interrupt_of_the_preparation_is_reported_before_it_takes_effect(shell: Shell) -> None:
    """The demonstrations interrupt the run, and wait for what is printed meanwhile."""
    shell.write("small.py", RECIPE)
    shell.write(
        "slow.py",
        "import os, signal, threading\n"
        "from ramify.train.data.sft_data import DEMOS\n"
        "def demos(*given):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for each in threading.enumerate():\n"
        "        if each.name == 'report of an interrupt':\n"
        "            each.join()\n"
        "    os.write(2, b'still preparing\\n')\n"
        "    return DEMOS.resolve('ledger')(*given)\n",
    )
    done = shell.run("train", "small.py", "sft.demos=slow.py:demos", *SHORT, "--plain")
    assert done.code == 130
    *_, told, preparing = (
        line for line in done.err.splitlines() if line.startswith(("SIGINT", "still"))
    )
    assert told == "SIGINT: stopping when the run is prepared; a second one ends it at once"
    assert preparing == "still preparing"
    assert done.err.splitlines()[-1] == (
        "the run was ended by SIGINT before its first checkpoint, so there is nothing to resume"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one recipe, or --resume DIR"),
        (("a.py", "b.py"), "give one recipe"),
        (("small.py", "rl.steps", "3"), "'rl.steps' has no value: write rl.steps=3"),
        (("rl.steps",), "'rl.steps' has no value: write rl.steps=VALUE"),
        (("small.py", "--rl.steps", "3"), "a field of the run has no dashes: write rl.steps=3 ("),
        (("small.py", "--rl.steps=3"), "a field of the run has no dashes: write rl.steps=3 ("),
        (("small.py", "--seed", "3"), "unknown option --seed: a field of the run has no dashes: w"),
        (("small.py", "--step", "3"), "as in rl.optim.lr=1e-4: did you mean 'rl.steps'"),
        (("small.py", "--ouy", "x"), "unknown option --ouy: did you mean --out?"),
        (("missing.py",), "missing.py is not a recipe"),
        (("small.py", "rl.setps=3"), "no field 'setps': did you mean 'steps'?"),
        (("small.py", "rl.steps=many"), "rl.steps=many: Expected `int`"),
        (("--resume", "nowhere"), "nothing to resume in nowhere"),
    ],
)
def test_wrong_arguments_get_one_line_error(
    shell: Shell, arguments: tuple[str, ...], message: str
) -> None:
    shell.write("small.py", RECIPE)
    done = shell.run("train", *arguments)
    assert done.code in (1, 2)
    assert message in done.err
    assert done.err.count("\n") == 1


def test_step_without_a_metric_to_show_has_no_line(shell: Shell) -> None:
    """All attempts and rollouts fail, so there is nothing but the error to show."""
    shell.write("small.py", RECIPE)
    failing = ("task.name=tests.train.small:failing", *SHORT)
    done = shell.run("train", "small.py", *failing, "--plain")
    assert done.code == 1
    assert "rollouts failed" in done.err
    assert not [line for line in done.err.splitlines() if line.rstrip().endswith("(rl)")]


def test_error_in_user_code_names_its_line(shell: Shell) -> None:
    shell.write("small.py", RECIPE)
    shell.write(
        "mine.py",
        "from ramify.train import GroupAlgorithmOptions\n\n"
        "class Mine(GroupAlgorithmOptions, frozen=True, kw_only=True):\n"
        "    def compare(self, returns, lengths=()):\n"
        "        raise ValueError('no median')\n",
    )
    done = shell.run("train", "small.py", "rl.algorithm=mine.py:Mine", "warmup=null")
    assert done.code == 1
    assert re.search(r"mine.py, line 5, in compare: ValueError: no median; set RAM", done.err)
    assert "internal error" not in done.err


def test_old_backend_name_gets_one_line_warning(shell: Shell) -> None:
    shell.write("small.py", RECIPE)
    done = shell.run("train", "small.py", "compute.backend=fsdp2", "rl.steps=many")
    first, second = done.err.splitlines()
    assert first == "ramify: warning: compute.backend=fsdp2 is called fsdp here"
    assert "rl.steps=many: Expected `int`" in second
    assert (
        shell.run(
            "train", "small.py", "compute.backend=fsdp2", "rl.steps=many", "--quiet"
        ).err.count("\n")
        == 1
    )


def test_help_does_not_import_torch(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("train", "--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.code == 0
    assert "FIELD=VALUE" in done.out
    assert not re.search(r"\| +torch\n", done.err)


def test_terminal_curves_show_history_and_best_values() -> None:
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([0, 0, 7, 7], 2) == "▁█"
    assert (draw_sparkline([3, 3], 5), draw_sparkline([], 5)) == ("▁▁", "")
    curves = LiveTrainingCurves("tiny")
    for step in range(1, 5):
        curves.add(StepMetrics(step, "sft", step, {"loss": 1 / step, "lr": 1}))
    curves.add(StepMetrics(4, "first", 4, {"validation/reward": 0.25, "test/reward": 0.2}))
    for step in (5, 6):
        curves.add(StepMetrics(step, "rl", step, {"reward": 0.1 * step}))
    curves.add(StepMetrics(6, "rl", 7, {"validation/reward": 0.5}))
    curves.add(StepMetrics(6, "last", 8, {"test/reward": 0.45, "test/count": 1}))
    assert curves.rows(70) == [
        "tiny · rl · step 6 · 8 s",
        "reward        ▁█ 0.6",
        "validation    ▁█ 0.5   (best 0.5 at step 6)",
        "first validation/reward: 0.25",
        "first test/reward: 0.2",
        "last test/reward: 0.45",
    ]
    assert all(len(row) <= 30 for row in curves.rows(30))


def test_step_line_has_rewards_and_no_engine_counts() -> None:
    values = {
        "reward": 0.51239,
        "depth1.rlm/reward": 0.25,
        "depth1.rlm/turns": 3.0,
        "batch64.decode/steps": 46.0,
        "cpu/cores": 2.0,
        "groups_with_signal": 3.0,
        "lr": 1e-3,
    }
    assert format_metrics_line(StepMetrics(5, "rl", 61.25, values)) == (
        "    61.2 s  step 5 (rl)  reward 0.5124  depth1.rlm/reward 0.25  groups_with_signal 3"
    )


def test_evaluation_is_one_line() -> None:
    values = {"validation/reward": 0.75, "validation/count": 0.5, "evaluate_s": 2.0}
    assert format_metrics_line(StepMetrics(5, "rl", 61.25, values)) == (
        "    61.2 s  step 5 (rl)  validation/reward 0.75  validation/count 0.5"
    )
