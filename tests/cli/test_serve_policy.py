"""``ramify serve-policy`` as a process, and ``ramify ask`` with the model that it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli.main import load_subcommand
from ramify.cli.parser import UsageError
from ramify.errors import ConfigError
from ramify.models.load import save_policy
from tests.inference.helpers import policy

RAMIFY = [sys.executable, "-m", "ramify"]


def test_served_policy_can_be_asked(tmp_path: Path) -> None:
    save_policy(policy(), tmp_path / "mine")
    (tmp_path / "rows.txt").write_text("red;3\nblue;4\n")
    environ = {
        **os.environ,
        "RAMIFY_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    serving = subprocess.Popen(
        [*RAMIFY, "serve-policy", "mine", "--port", "0"],
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stderr is not None
        line = serving.stderr.readline()
        name, at, url, *_ = line.split()
        environ["VLLM_API_KEY"] = serving.stderr.readline().split()[1]
        assert (name, at) == ("mine", "at")
        options = ["--scaffold", "tiny", "--max-turns", "2", "--model", f"vllm:mine@{url}", "-v"]
        asked = subprocess.run(
            [*RAMIFY, "ask", "count rows of 'red'", "rows.txt", *options],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "turn 1: reply" in asked.stderr, asked.stderr
    finally:
        serving.send_signal(signal.SIGINT)
        assert serving.wait(100) == 0
        serving.stderr.close()


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ([], UsageError, "give FOLDER"),
        (["nowhere"], ConfigError, "no folder 'nowhere'"),
        (["nowhere", "--slots", "0"], UsageError, "--slots 0: give at least 1"),
        (["nowhere", "--dtype", "int8"], UsageError, "--dtype int8: give float32"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        load_subcommand("serve-policy").call(words)
