"""``transformers serve`` as a process on a free port of this machine: a server from another
project.

Decides how it is started, waited for (by its health route) and ended (by its process id, whatever
happened), and that it asks nothing of the network: its models are two checkpoints that
``checkpoint.py`` makes. The tests decide which requests it gets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import msgspec

NEEDED = ("transformers", "torch", "fastapi", "uvicorn", "openai")
START_LIMIT_S = 120.0


def missing() -> list[str]:
    """The modules that the server needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


class Serving(msgspec.Struct, frozen=True):
    """A running server."""

    url: str
    """Base URL, with /v1."""
    folder: Path
    """Folder of the checkpoints; the server runs in it, so ``reader`` and ``noise`` are names of
    models."""
    log: Path

    def model(self, name: str) -> str:
        return f"openai:{name}@{self.url}"


@contextlib.contextmanager
def serving(folder: Path, replies: dict[str, str]) -> Iterator[Serving]:
    port = free_port()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "default",
    }
    server = Serving(f"http://127.0.0.1:{port}/v1", folder, folder / "server.log")
    command = [
        sys.executable,
        "-c",
        "from transformers.cli.transformers import main; main()",
        "serve",
    ]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            [*command, *options], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        make = [sys.executable, str(Path(__file__).with_name("checkpoint.py")), str(folder)]
        subprocess.run(
            make,
            input=json.dumps(replies).encode(),
            env=environment,
            check=True,
            timeout=START_LIMIT_S,
        )
        wait_until_healthy(port, process, server.log)
        yield server
    finally:
        end(process)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not is_healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            state = (
                "is not up yet" if process.poll() is None else f"ended with {process.returncode}"
            )
            raise AssertionError(
                f"transformers serve {state}:\n{log.read_text(errors='replace')[-3000:]}"
            )
        time.sleep(0.1)


def is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
