"""What sits on a seat: it starts the processes of the seat, says how they are, and takes them with it when it ends.

One per seat, in a process of its own that a cluster's software starts. Needs nothing of it, and nothing heavy: it is the
standard library around ``subprocess``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from ramify.inference.http.following import following

_QUOTED = 600
"""Characters of a log that are told."""
_END_S = 5.0


class Keeper:
    """Belongs to one thread, which lasts: with it end the processes that it started."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}

    def about(self) -> dict[str, Any]:
        """Where this is: the name of its host, an address, and the GPUs that it was given."""
        from ray.util import get_node_ip_address

        address: Any = get_node_ip_address  # has no types
        gpus = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        return {
            "host": socket.gethostname(),
            "address": address(),
            "gpus": gpus,
            "pid": os.getpid(),
        }

    def start(
        self, name: str, command: list[str], environment: dict[str, str], log: str, python: str, folder: str
    ) -> int | str:
        """Start ``command``, which may begin with ``python``, the interpreter of who asks: that of this machine is meant;
        in ``folder``, where that is there. Its process id; why not, where it cannot be started."""
        if command[0] == python:
            command = [sys.executable, *command[1:]]
        path = self._logs[name] = Path(log)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as out:
                process = self._processes[name] = subprocess.Popen(
                    following(command, signal.SIGKILL),
                    env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, cwd=folder if Path(folder).is_dir() else None,
                )  # fmt: skip
        except OSError as error:
            return f"{error.filename or command[0]}: {error.strerror}"
        return process.pid

    def poll(self, name: str) -> tuple[bool, int]:
        """(whether it has ended, its exit status)"""
        status = self._processes[name].poll()
        return status is not None, status or 0

    def signal(self, name: str, number: int) -> None:
        """To it and to what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[name].pid, number)

    def said(self, name: str) -> str:
        """The end of its log, on one line."""
        with contextlib.suppress(OSError):
            text = self._logs[name].read_text(errors="replace")[-_QUOTED:]
            return " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return ""

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def end_all(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            alive = [name for name, process in self._processes.items() if process.poll() is None]
            for name in alive:
                self.signal(name, kind)
            for name in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._processes[name].wait(_END_S)
