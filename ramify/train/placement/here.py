"""This machine as ``Hosts``: its processes are started by a keeper within this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ramify.errors import ConfigError
from ramify.train.placement.hosts import Placed
from ramify.train.placement.keeper import Keeper
from ramify.train.placement.seats import Member


class HereHosts:
    """Implements ``Hosts``. Processes are started in a thread of its own, which lasts: with it they end."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._keeper = Keeper()
        self._thread = ThreadPoolExecutor(1, "ramify hosts")

    def start(self, member: Member, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Placed:
        """As ``Hosts.start``."""
        name = f"{member.role}-{member.number}"
        told = self._ask("start", name, list(command), dict(environment), str(log), sys.executable, os.getcwd())
        if isinstance(told, str):
            raise ConfigError(f"{member.role} {member.number} cannot be started: {told}")
        return Placed(self._ask, name, told, os.uname().nodename, log)

    def address_of(self, member: Member) -> str:
        return self.address

    def free_port(self, member: Member) -> int:
        return self._keeper.free_port()

    def renew(self, member: Member) -> None:
        """This machine is there as long as the run is."""

    def close(self) -> None:
        self._ask("end_all")

    def _ask(self, verb: str, *arguments: Any) -> Any:
        return self._thread.submit(getattr(self._keeper, verb), *arguments).result()
