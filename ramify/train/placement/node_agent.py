"""What sits on a seat: it starts the processes of the seat, says how they are, and takes them with
it when it ends.

One per seat, in a process of its own that a cluster's software starts. Needs nothing of it, and
nothing heavy.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from ramify.child import ChildProcess, end_all

_END_S = 5.0


class NodeAgent:
    """Belongs to one thread, which lasts: with it end the processes that it started."""

    def __init__(self) -> None:
        self._children: dict[str, ChildProcess] = {}

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
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: str,
        python: str,
        folder: str,
    ) -> int | str:
        """Start ``command``, which may begin with ``python``, the interpreter of who asks: that of
        this machine is meant; in ``folder``, where that is there. Its process id; why not, where it
        cannot be started."""
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
        """(whether it has ended, its exit status)"""
        status = self._children[name].poll()
        return status is not None, status or 0

    def signal(self, name: str, number: int) -> None:
        """To it and to what it started."""
        self._children[name].signal(number)

    def end(self, name: str) -> None:
        """Kill what is left of it and of what it started."""
        self._children[name].end(0.0)

    def said(self, name: str) -> str:
        """The end of its log, on one line."""
        return self._children[name].log_tail()

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def end_all(self) -> None:
        end_all(self._children.values(), _END_S)
