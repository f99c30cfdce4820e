"""The real command as a separate process, with scripted models, its own home and its own settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-m", "ramify"]
SESSION_SCRIPT = ["```repl\nprint(len(context))\n```", "```repl\nFINAL(len(context))\n```"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


def code(text: str) -> str:
    return f"```repl\n{text}\n```"


class Shell:
    """One user's machine: a folder with a home for ramify, no keys, no settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "LANG", "TMPDIR", "PYTHONPATH")
        }
        self.env = {
            **kept,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "RAMIFY_HOME": str(folder / "store"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TERM": "xterm-256color",
            "COLUMNS": "100",
            "LINES": "40",
        }

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def model(self, script: list[Any], name: str = "script.json") -> str:
        """Return the name of a model that replies with ``script``."""
        return f"scripted:{self.write(name, json.dumps(script))}"

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        return subprocess.Popen([*COMMAND, *arguments], cwd=self.folder, env=self.env, **options)

    def run(self, *arguments: str, stdin: str | None = None, **env: str) -> Done:
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            timeout=250,
            **({"input": stdin.encode()} if stdin is not None else {"stdin": subprocess.DEVNULL}),
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def ask(self, script: list[Any], *arguments: str, stdin: str | None = None, **env: str) -> Done:
        return self.run("ask", "--model", self.model(script), *arguments, stdin=stdin, **env)


def wait_for_second_request(shell: Shell) -> None:
    for _ in range(10_000):
        journals = list((shell.folder / "store/runs").glob("*.jsonl"))
        if journals and journals[0].read_text().count('"type":"Requested"') == 2:
            break
        time.sleep(0.01)


def kill_at_second_request(shell: Shell, process: subprocess.Popen[bytes]) -> None:
    wait_for_second_request(shell)
    process.kill()
    process.communicate()
