"""Servers that a run asks besides its engines, for judgements or rewards: started on their seats, found by a variable.

Whoever asks them reads an environment variable, as for any server that somebody else started. Decides that a service is there
once it can be connected to; leaves out what it says, and what becomes of a run whose judge dies (who asks it decides).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ramify.errors import ConfigError
from ramify.train.placement.hosts import Hosts, Started
from ramify.train.placement.seats import Member
from ramify.train.placement.spec import Service

_POLL_S = 0.1
_END_S = 10.0


class Services:
    """Belongs to one run."""

    def __init__(self, hosts: Hosts, services: Mapping[str, Service], out: Path) -> None:
        self._hosts, self._services, self._out = hosts, services, out
        self._processes: list[Started] = []
        self._before: dict[str, str | None] = {}
        """Variable -> what it was."""

    async def start(self) -> None:
        """Bring all of them up. Raises ConfigError for one that does not come."""
        try:
            await asyncio.gather(*(self._start(name, service) for name, service in self._services.items()))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End them. Idempotent."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.terminate(_END_S)
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _start(self, name: str, service: Service) -> None:
        member = Member(name, 0)
        host, port = self._hosts.address_of(member), self._hosts.free_port(member)
        places = {"{host}": host, "{port}": str(port)}
        command = [_filled(word, places) for word in service.command]
        log = Path(os.path.abspath(self._out)) / "services" / f"{name}.log"  # noqa: ASYNC240 (touches no disk)
        process = self._hosts.start(member, command, {}, log)
        self._processes.append(process)
        await self._reached(name, service, process, host, port)
        self._before[service.variable] = os.environ.get(service.variable)
        os.environ[service.variable] = f"http://{host}:{port}{service.path}"

    async def _reached(self, name: str, service: Service, process: Started, host: str, port: int) -> None:
        until = time.monotonic() + service.start_s
        where = f"service '{name}' ({process.where})"
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return
            if (status := process.poll()) is not None:
                raise ConfigError(f"{where} ended with status {status} before it could be asked: {process.said()}")
            if time.monotonic() > until:
                raise ConfigError(f"{where} cannot be connected to at {host}:{port} after {service.start_s:g} s")
            await asyncio.sleep(_POLL_S)


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(name, value)
    return word
