"""Servers that a run asks besides its engines, for judgements or rewards: started on their seats,
found by a variable.

    run, runners ── variable: http://… ──▶ service                           on this machine
                                     └───▶ a door on this machine ──▶ service   on another one

Whoever asks them reads an environment variable, as for any server that somebody else started, and
reads it once: so the address stays as long as the run. One that ends is started again, aloud, at
the same port; behind a door it may be on another machine then. Decides that a service is there once
it can be connected to; leaves out what it says, and what a judge that is away for seconds costs
(who asks it decides).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ramify.errors import ConfigError
from ramify.train.placement.launcher import LaunchedProcess, Launcher
from ramify.train.placement.placement_slots import SlotMember
from ramify.train.placement.placement_spec import ServiceSpec

_POLL_S = 0.1
_LOOK_S = 0.5
_LOOK_S = 0.5
_END_S = 10.0
_BLOCK = 1 << 16


class RunServices:
    """Belongs to one run, and to its event loop."""

    def __init__(
        self,
        hosts: Launcher,
        services: Mapping[str, ServiceSpec],
        out: Path,
        *,
        restarts: int = 3,
        say: Callable[[str], None] = print,
    ) -> None:
        """``restarts``: how often one is started again without having been there for its
        ``start_s`` in between."""
        self._hosts, self._say, self._restarts = hosts, say, restarts
        self._all = [
            _RunningService(hosts, name, service, out) for name, service in services.items()
        ]
        self._watching: list[asyncio.Task[None]] = []
        self._before: dict[str, str | None] = {}
        """Variable -> what it was."""

    async def start(self) -> None:
        """Bring all of them up. Raises ConfigError for one that does not come."""
        try:
            await asyncio.gather(*(one.start() for one in self._all))
            for one in self._all:
                url = await one.opened()
                self._before[one.service.variable] = os.environ.get(one.service.variable)
                os.environ[one.service.variable] = url
        except BaseException:
            await self.close()
            raise
        self._watching = [asyncio.ensure_future(self._watch(one)) for one in self._all]

    async def close(self) -> None:
        """End them. Idempotent."""
        watching, self._watching = self._watching, []
        for task in watching:
            task.cancel()
        if watching:
            await asyncio.wait(watching)
        await asyncio.gather(*(one.close() for one in self._all))
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _watch(self, one: _RunningService) -> None:
        """Start it again whenever it ends, until it is given up."""
        tries = 0
        while True:
            came = time.monotonic()
            why = await one.ended()
            tries = tries + 1 if time.monotonic() - came < one.service.start_s else 1
            while True:
                is_last = tries > self._restarts
                self._say(f"{why}; it is {'given up' if is_last else 'started again'}")
                if is_last:
                    return
                try:
                    await one.start()
                    break
                except ConfigError as error:
                    why, tries = str(error), tries + 1
            self._say(f"{one.told} is back")


class _RunningService:
    """One service, wherever it is."""

    def __init__(self, hosts: Launcher, name: str, service: ServiceSpec, out: Path) -> None:
        self._hosts, self._name, self.service = hosts, name, service
        self._member = SlotMember(name, 0)
        self._log = Path(os.path.abspath(out)) / "services" / f"{name}.log"
        self._process: LaunchedProcess | None = None
        self._host, self._port = "", 0
        self._door: asyncio.Server | None = None

    @property
    def told(self) -> str:
        where = f" ({self._process.where})" if self._process is not None else ""
        return f"service '{self._name}'{where}"

    async def start(self) -> None:
        """Bring it up, the first time or again. Raises ConfigError."""
        await asyncio.to_thread(self._start)
        await self._reached()

    async def opened(self) -> str:
        """The address that it has as long as the run goes on."""
        host, port = self._host, self._port
        if host != self._hosts.address:
            self._door = await asyncio.start_server(self._pass, self._hosts.address, 0)
            host, port = self._door.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}{self.service.path}"

    async def ended(self) -> str:
        """Return once it has ended: how."""
        assert self._process is not None
        while True:
            if (status := await asyncio.to_thread(self._process.poll)) is not None:
                return f"{self.told} ended with status {status}: {await asyncio.to_thread(self._process.said)}"
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        if self._door is not None:
            self._door.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.terminate, _END_S)

    def _start(self) -> None:
        if self._process is not None:
            self._process.terminate(0.0)
            self._hosts.renew(self._member)
        host = self._hosts.address_of(self._member)
        if host != self._host:
            self._host, self._port = host, self._hosts.free_port(self._member)
        places = {"{host}": host, "{port}": str(self._port)}
        command = [_filled(word, places) for word in self.service.command]
        self._process = self._hosts.start(self._member, command, {}, self._log)

    async def _reached(self) -> None:
        process, until = self._process, time.monotonic() + self.service.start_s
        assert process is not None
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(self._host, self._port)
                writer.close()
                return
            if (status := await asyncio.to_thread(process.poll)) is not None:
                said = await asyncio.to_thread(process.said)
                raise ConfigError(
                    f"{self.told} ended with status {status} before it could be asked: {said}"
                )
            if time.monotonic() > until:
                raise ConfigError(
                    f"{self.told} cannot be connected to at {self._host}:{self._port} after "
                    f"{self.service.start_s:g} s"
                )
            await asyncio.sleep(_POLL_S)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection through the door, to where the service is now."""
        with (
            contextlib.closing(writer),
            contextlib.suppress(OSError),
        ):  # who asks finds it closed, as at the service itself
            theirs, to_them = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(to_them):
                await asyncio.gather(_copied(reader, to_them), _copied(theirs, writer))


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(_BLOCK):
        writer.write(block)
        await writer.drain()
    writer.write_eof()


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(name, value)
    return word
