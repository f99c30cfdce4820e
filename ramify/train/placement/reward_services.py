"""Start the judge and reward servers that a run needs, and publish their addresses in environment
variables.

    run, rollout workers ── variable: http://… ──▶ service on this machine
                                               └─▶ forwarder on this machine ──▶ service elsewhere

Callers read an environment variable only once, as for any external server, so the address stays
the same for the whole run. A service that ends is restarted on the same port, and the restart is
logged. If the service is behind a forwarder, it may then be on another machine. A service counts
as ready once it accepts connections. What to do while a judge is away for some seconds is decided
by its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ramify.actors.child_process import ProcessHandle
from ramify.actors.launcher import Launcher, RoleInstanceId
from ramify.actors.restarts import ProcessRestartLimiter, cancel_all, retry_until_started
from ramify.errors import ConfigError
from ramify.logging import ComponentLogger
from ramify.train.placement.placement_spec import RewardServiceSpec

_log = ComponentLogger("train")
_POLL_S = 0.1
_LOOK_S = 0.5
_END_S = 10.0
_BLOCK = 1 << 16


class RewardServiceManager:
    """All services of one run, i.e. its judge and reward servers.

    This class starts, watches and ends them, in the run's event loop.
    """

    def __init__(
        self,
        hosts: Launcher,
        services: Mapping[str, RewardServiceSpec],
        out: Path,
        *,
        restarts: int = 3,
    ) -> None:
        """Prepare the services without starting them.

        A service that ends is restarted up to ``restarts`` times in a row, after which the run
        continues without it. The count starts again once the service has run for its ``start_s``
        seconds.
        """
        self._hosts = hosts
        self._restarts = restarts
        self._all = [
            _RunningService(hosts, name, service, out) for name, service in services.items()
        ]
        self._watchers: list[asyncio.Task[None]] = []
        self._environment: dict[str, str | None] = {}
        """The earlier value of each environment variable that the run has set."""

    async def start(self) -> None:
        """Start all services, and set the environment variables with their addresses.

        Raises ConfigError if one does not start.
        """
        try:
            await asyncio.gather(*(service.start() for service in self._all))
            for service in self._all:
                url = await service.opened()
                variable = service.spec.variable
                self._environment[variable] = os.environ.get(variable)
                os.environ[variable] = url
        except BaseException:
            await self.close()
            raise
        self._watchers = [asyncio.ensure_future(self._watch(service)) for service in self._all]

    async def close(self) -> None:
        """End all services and restore the environment variables.

        Calling it again does nothing.
        """
        watchers, self._watchers = self._watchers, []
        await cancel_all(watchers)
        await asyncio.gather(*(service.close() for service in self._all))
        environment, self._environment = self._environment, {}
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _watch(self, service: _RunningService) -> None:
        """Restart ``service`` whenever it ends, until it has used up its restarts."""
        restarts = ProcessRestartLimiter(self._restarts, _log, "service")

        def failed(why: object) -> bool:
            return restarts.decide_restart(service.name, str(why))

        async def restarted() -> bool:
            await service.start()
            return True

        while True:
            started = time.monotonic()
            why = await service.ended()
            if time.monotonic() - started >= service.spec.start_s:
                restarts.record_success(service.name)
            if not failed(why) or not await retry_until_started(restarted, failed):
                return
            restarts.record_recovery(service.name, f"{service.description} is back")


class _RunningService:
    """A judge or reward server that the run has started, possibly on another machine."""

    def __init__(self, hosts: Launcher, name: str, spec: RewardServiceSpec, out: Path) -> None:
        self._hosts = hosts
        self.name = name
        self.spec = spec
        self._member = RoleInstanceId(name, 0)
        self._log = Path(os.path.abspath(out)) / "services" / f"{name}.log"
        self._process: ProcessHandle | None = None
        self._host = ""
        self._port = 0
        self._forwarder: asyncio.Server | None = None

    @property
    def description(self) -> str:
        where = f" ({self._process.where})" if self._process is not None else ""
        return f"service '{self.name}'{where}"

    async def start(self) -> None:
        """Start or restart the service, and wait until it accepts connections.

        Raises ConfigError if the service ends first or does not accept them in time.
        """
        await asyncio.to_thread(self._start)
        await self._wait_until_reachable()

    async def opened(self) -> str:
        """Open access to the service and return its URL, which stays valid for the whole run.

        If the service runs on another machine, a forwarder for it starts on this machine.
        """
        host, port = self._host, self._port
        if host != self._hosts.address:
            self._forwarder = await asyncio.start_server(
                self._forward_connection, self._hosts.address, 0
            )
            host, port = self._forwarder.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}{self.spec.path}"

    async def ended(self) -> str:
        """Wait until the service has ended.

        Returns a description of how it ended.
        """
        assert self._process is not None
        while True:
            if await asyncio.to_thread(self._process.poll) is not None:
                return f"{self.description} {await asyncio.to_thread(self._process.exit_reason)}"
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, _END_S)

    def _start(self) -> None:
        if self._process is not None:
            self._process.end(0.0)
            self._hosts.ensure_slot(self._member)
        host = self._hosts.address_of(self._member)
        if host != self._host:
            self._host, self._port = host, self._hosts.free_port(self._member)
        address = {"{host}": host, "{port}": str(self._port)}
        command = [_fill_placeholders(word, address) for word in self.spec.command]
        self._process = self._hosts.start(self._member, command, {}, self._log)

    async def _wait_until_reachable(self) -> None:
        process, until = self._process, time.monotonic() + self.spec.start_s
        assert process is not None
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(self._host, self._port)
                writer.close()
                return
            if await asyncio.to_thread(process.poll) is not None:
                reason = await asyncio.to_thread(process.exit_reason)
                raise ConfigError(f"{self.description} did not accept connections: it {reason}")
            if time.monotonic() > until:
                raise ConfigError(
                    f"{self.description} did not accept connections at {self._host}:{self._port} "
                    f"within {self.spec.start_s:g} s (start_s)"
                )
            await asyncio.sleep(_POLL_S)

    async def _forward_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one connection to the machine on which the service currently runs."""
        # If forwarding fails, the caller sees a closed connection, as from the service itself.
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_service, to_service = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(to_service):
                await asyncio.gather(
                    _copy_stream(reader, to_service), _copy_stream(from_service, writer)
                )


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(_BLOCK):
        writer.write(block)
        await writer.drain()
    writer.write_eof()


def _fill_placeholders(word: str, address: Mapping[str, str]) -> str:
    for name, value in address.items():
        word = word.replace(name, value)
    return word
