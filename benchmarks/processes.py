"""Processes that the benchmarks start: the scripted server, the task of one side, and whole
commands with their cost.

Every measurement runs in a separate process, so that no library's threads, imports or garbage
affect another's figure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Server(NamedTuple):
    url: str
    """Base URL, ending in ``/v1``."""

    def served(self) -> dict[str, int]:
        """Return the server's counts so far: requests, maximum concurrency, tokens in and out."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/served") as response:
            counts = json.load(response)
        usage = counts["usage"]
        return {
            "answered": counts["answered"],
            "most_in_flight": counts["most_in_flight"],
            "input": usage.get("input_tokens", 0),
            "output": usage.get("output_tokens", 0),
        }


@contextmanager
def scripted_server(latency_s: float = 0.0) -> Iterator[Server]:
    command = [sys.executable, str(HERE / "scenes.py"), "--latency", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(process.stdout.readline().strip())
        finally:
            process.terminate()


def quiet_env(**more: str) -> dict[str, str]:
    """Return an environment for a side without the user's keys and settings, in which bytecode is
    stored: installers compile the other sides, and ours would be compiled at each start."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAMIFY_", "OPENAI_", "DROSTE_", "MODELRELAY_", "ANTHROPIC_"))
        and name != "PYTHONDONTWRITEBYTECODE"
        and name.lower() not in ("http_proxy", "https_proxy", "all_proxy")
    }
    return {
        **env,
        "OPENAI_API_KEY": "none",
        "XDG_CONFIG_HOME": tempfile.gettempdir() + "/ramify-benchmarks",
        **more,
    }


def run_side(
    python: str,
    side: str,
    task: str,
    url: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240,
    **options: Any,
) -> dict[str, Any]:
    """Run ``side_SIDE.py TASK`` in a separate process and return its measurement, or ``{"error":
    …}``."""
    given = json.dumps({"url": url, **options})
    try:
        done = subprocess.run(
            [python, str(HERE / f"side_{side}.py"), task, given],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=quiet_env(OPENAI_BASE_URL=url, **env or {}),
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{side} {task}: not done after {timeout_s:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"{side} {task}: {last}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


class Bill(NamedTuple):
    seconds: float
    peak_mb: float
    """Peak memory of the largest single process of the command."""
    output: str
    code: int


def run_command(command: Sequence[str], **env: str) -> Bill:
    """Run a whole command and return its wall time and peak resident memory."""
    with tempfile.TemporaryFile("w+") as out:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=quiet_env(**env)
        )
        _, status, rusage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Bill(seconds, rusage.ru_maxrss / 1024, out.read(), process.returncode)
