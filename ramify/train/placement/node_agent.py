"""The agent of a slot: it starts the slot's processes, reports on them, and ends them when it ends
itself.

There is one agent per slot, in a separate process that the cluster's software starts. It imports
nothing heavy, and uses that software only to report its location.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from ramify.actors.child_process import ChildProcess, end_all

_END_S = 5.0


class NodeAgent:
    """Starts and controls the processes of one slot."""

    def __init__(self) -> None:
        self._children: dict[str, ChildProcess] = {}

    def about(self) -> dict[str, Any]:
        """Where this agent runs: host name, address, and the GPUs of its slot."""
        from ray.util import get_node_ip_address

        address: Any = get_node_ip_address  # an untyped function
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = [gpu for gpu in visible.split(",") if gpu]
        return {
            "host": socket.gethostname(),
            "address": address(),
            "gpus": gpus,
            "pid": os.getpid(),
        }

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: str,
        python: str,
        folder: str,
    ) -> int | str:
        """Start ``command`` in ``folder``, if that exists here, and return its process id, or why
        it cannot be started. If the command begins with ``python``, the caller's interpreter, it is
        replaced by this machine's."""
        if command[0] == python:
            command = [sys.executable, *command[1:]]
        if name in self._children:
            self.end(name)
        try:
            child = self._children[name] = ChildProcess(
                command, environment=environment, log=Path(log), folder=Path(folder)
            )
        except OSError as error:
            return f"{error.filename or command[0]}: {error.strerror}"
        return child.pid

    def poll(self, name: str) -> tuple[bool, int]:
        """(whether the process has ended, its exit status)"""
        status = self._children[name].poll()
        return status is not None, status or 0

    def signal(self, name: str, number: int) -> None:
        """Send signal ``number`` to the process and to those it started."""
        self._children[name].signal(number)

    def end(self, name: str) -> None:
        """Kill the process and those it started."""
        self._children[name].end(0.0)

    def said(self, name: str) -> str:
        """The end of the process's log, as one line."""
        return self._children[name].log_tail()

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def end_all(self) -> None:
        end_all(self._children.values(), _END_S)
