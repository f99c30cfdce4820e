"""The launcher of this machine: processes are started by a node agent within this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ramify.errors import ConfigError
from ramify.train.placement.launcher import PlacedProcess
from ramify.train.placement.node_agent import NodeAgent
from ramify.train.placement.placement_slots import SlotMember


class LocalLauncher:
    """Starts processes on this machine; implements ``Launcher``. They are started from a dedicated
    thread, and end when that thread does."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._agent = NodeAgent()
        self._thread = ThreadPoolExecutor(1, "ramify hosts")

    def start(
        self, member: SlotMember, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> PlacedProcess:
        """As ``Launcher.start``."""
        name = f"{member.role}-{member.number}"
        started = self._ask(
            "start", name, list(command), dict(environment), str(log), sys.executable, os.getcwd()
        )
        if isinstance(started, str):
            raise ConfigError(f"{member.role} {member.number} cannot be started: {started}")
        return PlacedProcess(self._ask, name, started, os.uname().nodename, log)

    def address_of(self, member: SlotMember) -> str:
        return self.address

    def free_port(self, member: SlotMember) -> int:
        return self._agent.free_port()

    def renew(self, member: SlotMember) -> None:
        """Does nothing: this machine is available as long as the run is."""

    def close(self) -> None:
        self._ask("end_all")

    def _ask(self, verb: str, *arguments: Any) -> Any:
        return self._thread.submit(getattr(self._agent, verb), *arguments).result()
