"""What starts a run's processes where they have their seats: the one interface that ranks, engines
and runners need of it.

    hosts.start(Member("trainer", 1), command, environment, log)   ->   Started: is it alive, what did it say, end it

Without one, processes are started on this machine (``backends/launch.py``,
``inference/http/engine_process.py``); ``ray_launcher.py`` has the one by Ray. What processes say to
each other, and who leads, is the same in either case.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ramify.inference.http.engine_process import engine_command, engine_environment
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.placement.placement_slots import SlotMember

_POLL_S = 0.02
_KILLED = -9


class LaunchedProcess(Protocol):
    """A process that was started somewhere."""

    pid: int
    """0 where it runs on another machine."""
    where: str
    """``process 4711 on node-2``"""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...

    def terminate(self, timeout_s: float) -> None:
        """Let it end, and see to it that it and what it started does. Idempotent."""
        ...

    def said(self) -> str:
        """The end of its log, on one line."""
        ...


class Launcher(Protocol):
    """Where processes can be started, each on the seat that it was given. For any thread."""

    @property
    def address(self) -> str:
        """Of this process, as the others reach it."""
        ...

    def start(
        self, member: SlotMember, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> LaunchedProcess:
        """``environment`` is added to that of its machine; ``log`` gets all that it writes. Raises
        ConfigError where the command is not there."""
        ...

    def address_of(self, member: SlotMember) -> str:
        """Of the member's machine, as others reach it."""
        ...

    def free_port(self, member: SlotMember) -> int:
        """On that machine."""
        ...

    def renew(self, member: SlotMember) -> None:
        """See to it that the member has a seat, where its own is gone another one, perhaps on
        another machine. May take its time. Raises ConfigError where there is none."""
        ...

    def close(self) -> None:
        """End all that was started. Idempotent."""
        ...


class PlacedProcess:
    """Implements ``LaunchedProcess``, by what keeps it."""

    def __init__(
        self,
        ask: Callable[..., Any],
        name: str,
        pid: int,
        host: str,
        log: Path,
        *,
        is_here: bool = True,
    ) -> None:
        """``ask`` carries out a verb of ``Keeper``, and returns None where that is gone, and with
        it the process."""
        self._ask, self._name, self._log = ask, name, log
        self.pid = pid if is_here else 0
        self.where = f"process {pid} on {host}"
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            told = self._ask("poll", self._name)
            if told is None:
                self._status = _KILLED
            elif told[0]:
                self._status = told[1]
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(_POLL_S)
        return status

    def kill(self) -> None:
        self._ask("signal", self._name, int(signal.SIGKILL))

    def terminate(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self._ask("signal", self._name, int(signal.SIGTERM))
        while self.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        self._ask("end", self._name)
        self.wait()

    def said(self) -> str:
        return str(
            self._ask("said", self._name) or f"nothing that can be read from here ({self._log})"
        )


class PlacedEngine:
    """An engine on its seat: as ``inference.http.process.EngineProcess``. Started again where its
    seat then is, perhaps at another address."""

    def __init__(
        self,
        hosts: Launcher,
        spec: InferenceSpec,
        index: int,
        checkpoint: Path,
        dtype: str,
        window: int,
        log: Path,
    ) -> None:
        self._hosts, self._member, self.log = hosts, SlotMember("inference", index), log
        self._spec, self._what = spec, (checkpoint.resolve(), dtype, window)
        self._fixed = spec.ports[index] if spec.ports else 0
        self._host = ""
        self._start()

    async def restart(self) -> None:
        """As ``Engine.restart``."""
        await asyncio.to_thread(self._restart)

    def _restart(self) -> None:
        self.close()
        self._hosts.renew(self._member)
        self._start()

    def _start(self) -> None:
        host = self._hosts.address_of(self._member)
        if host != self._host:
            self._host, self._port = host, self._fixed or self._hosts.free_port(self._member)
            self.url = f"http://{host}:{self._port}"
        checkpoint, dtype, window = self._what
        command = engine_command(self._spec, checkpoint, self._port, dtype, window, host)
        environment = engine_environment(self._spec, self._member.number)
        self._process = self._hosts.start(self._member, command, environment, self.log.resolve())

    @property
    def ended(self) -> int | None:
        return self._process.poll()

    def said(self) -> str:
        return f"({self._process.where}) {self._process.said()}"

    def close(self) -> None:
        self._process.terminate(10.0)
