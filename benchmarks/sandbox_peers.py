"""Alternatives to a jailed session: code in this process, a bare Python, bubblewrap, an IPython
kernel.

Each is measured from its start to the end of its first cell. A bare loop in a forked process, which
only compiles and runs code from a socket, is the lower bound for a session in another process on
this machine. Decides how they are started; ``sandbox.py`` compares them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
_CODE = "exec(compile('x = 1', '<cell>', 'exec')); print('done')"


def in_process() -> float:
    """Run a cell in this process, without any isolation."""
    began = time.perf_counter()
    namespace = {"__name__": "__main__"}
    exec(compile("x = 1", "<cell>", "exec"), namespace)
    return time.perf_counter() - began


def python() -> str:
    return os.path.realpath(sys.executable)


def bare_subprocess() -> float:
    """Run a cell in a new interpreter without site packages, and without isolation."""
    return _run([python(), "-I", "-S", "-c", _CODE])


def bubblewrap() -> float | None:
    """Run the same interpreter in its own namespaces, with read access to the system only."""
    path = shutil.which("bwrap")
    if path is None:
        return None
    walls = [
        path,
        "--unshare-all",
        "--die-with-parent",
        "--clearenv",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
    ]
    shown = [sys.base_prefix, "/usr", "/lib", "/lib64"]
    for folder in dict.fromkeys(os.path.realpath(each) for each in shown if os.path.exists(each)):
        walls += ["--ro-bind", folder, folder]
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            walls += ["--symlink", os.readlink(link), link]
    return _run([*walls, python(), "-I", "-S", "-c", _CODE])


def _run(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.stdout != "done\n":
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
    return seconds


@contextlib.contextmanager
def bare_loop() -> Iterator[Callable[[bytes], bytes]]:
    """Yield a function that sends code and returns its ``x``: no isolation, framing or event
    loop."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        names: dict[str, Any] = {}
        while code := theirs.recv(1 << 22):
            exec(compile(code, "<cell>", "exec"), names)
            theirs.sendall(names["x"])
        os._exit(0)
    theirs.close()

    def ask(code: bytes) -> bytes:
        ours.sendall(code)
        return ours.recv(1 << 22)

    try:
        yield ask
    finally:
        ours.close()
        os.waitpid(pid, 0)


class Kernel(NamedTuple):
    """Seconds of each start with its first cell, and of each further cell."""

    first_s: list[float]
    cell_s: list[float]


def ipykernel(starts: int, cells: int) -> Kernel | None:
    """Measure an IPython kernel in the peers' environment or in this one; None if it is not
    installed."""
    for candidate in (str(HERE / ".venv/bin/python"), sys.executable):
        if not Path(candidate).exists():
            continue
        check = [candidate, "-c", "import ipykernel, jupyter_client"]
        if subprocess.run(check, capture_output=True, check=False).returncode == 0:
            command = [candidate, str(HERE / "sandbox_ipykernel.py"), str(starts), str(cells)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
            if done.returncode:
                print(f"ipykernel: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return None
            return Kernel(**json.loads(done.stdout.splitlines()[-1]))
    return None
