"""Commands that are given what a training run left, and need something else, say what it is and
which command reads it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ramify.cli.parser import ExitCode
from ramify.training_run_recognition import training_run_hint
from tests.cli.helpers import Shell

ROLLOUT = '{"id":"step=0/group=0/rollout=0","question":"Hm?","schema_version":2,"calls":[]}\n'


@pytest.fixture
def run(shell: Shell) -> Path:
    """The folder of a training run without weights, which no command gets as far as loading."""
    folder = shell.folder / "out"
    for name in ("checkpoints/step-000002/policy", "rollouts", "policy"):
        (folder / name).mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "checkpoints/step-000002/state.json").write_text("{}")
    (folder / "policy/config.json").write_text("{}")
    (folder / "rollouts/step-000001.jsonl").write_text(ROLLOUT)
    return folder


KINDS = {
    "out": "it is the folder of a training run",
    "out/checkpoints": "it holds the checkpoints of a training run",
    "out/checkpoints/step-000002": "it is a checkpoint of a training run",
    "out/rollouts": "it holds the saved rollouts of a training run",
    "out/rollouts/step-000001.jsonl": "it is a file of rollouts",
    "out/policy": "it is the policy of a training run",
}
WITHOUT_RUNS = ("out/checkpoints", "out/checkpoints/step-000002", "out/policy")


@pytest.mark.parametrize("path", KINDS)
def test_each_command_says_what_it_was_given(shell: Shell, run: Path, path: str) -> None:
    wrong = [("eval", path, "--model", "tiny"), ("train", path)]
    if path != "out/policy":
        wrong += [
            ("eval", "ledger", "--model", f"local:{path}", "--items", "1"),
            ("serve-policy", path, "--port", "0"),
        ]
    if path in WITHOUT_RUNS:
        wrong.append(("view", path, "--port", "0"))
    for words in wrong:
        done = shell.run(*words)
        assert done.code == ExitCode.USAGE, (words, done.err)
        says_policy = f"the policy of this run is {path}/policy" in done.err
        assert KINDS[path] in done.err or says_policy, words


def test_file_of_something_else_is_not_viewed(shell: Shell) -> None:
    shell.write("code.py", "def run(): ...\n")
    done = shell.run("view", "code.py", "--port", "0")
    assert (done.code, done.err) == (
        ExitCode.USAGE,
        "ramify: code.py is not a run: its first line is not JSON\n",
    )


def test_folder_without_runs_is_not_viewed(shell: Shell, run: Path) -> None:
    for name in ("nothing", "llama", "begun"):
        (shell.folder / name).mkdir()
    shell.write("llama/config.json", "{}")
    for name, reason in {
        "nothing": "nothing has no runs: there is no .jsonl file in it; ramify view without a path",
        "llama": "llama has no runs: it is a policy, for --model local:llama",
    }.items():
        done = shell.run("view", name, "--port", "0")
        assert (done.code, done.err.startswith(f"ramify: {reason}")) == (ExitCode.USAGE, True)
    shell.write("begun/run.log", "")  # a training run before its first step
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name in (".", "begun"):
            done = shell.run("view", name, "--port", port)
            assert "cannot listen" in done.err  # the path itself is not refused


def test_resume_of_a_part_of_a_run_names_the_run(shell: Shell, run: Path) -> None:
    for part in ("policy", "rollouts", "rollouts/step-000001.jsonl"):
        done = shell.run("train", "--resume", f"out/{part}")
        assert (done.code, "a checkpoint, such as out" in done.err) == (ExitCode.USAGE, True)


def test_other_paths_have_no_hint(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "question": "Hm?"}\n')
    assert training_run_hint(tmp_path) == training_run_hint(tmp_path / "rows.jsonl") == ""
    assert training_run_hint(tmp_path / "missing") == ""
