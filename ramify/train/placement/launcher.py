"""The launcher interface: starts a run's processes, ranks, engines and rollout workers, on their
slots.

    hosts.start(SlotMember("trainer", 1), command, environment, log)
        ->  LaunchedProcess: is it alive, what is in its log, end it

Without a launcher, processes start on this machine (``backends/launch.py``,
``inference/http/engine_process.py``); ``ray_launcher.py`` has the launcher of Ray. How processes
communicate, and which one leads, does not depend on it.
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
    """A process that was started on a slot."""

    pid: int
    """Process id; 0 if it runs on another machine."""
    where: str
    """Description such as ``process 4711 on node-2``."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...

    def terminate(self, timeout_s: float) -> None:
        """Ask it to end, and kill it and its children after ``timeout_s``. Idempotent."""
        ...

    def said(self) -> str:
        """The end of its log, as one line."""
        ...


class Launcher(Protocol):
    """Starts processes, each on its slot. Thread-safe."""

    @property
    def address(self) -> str:
        """The address at which other processes reach this one."""
        ...

    def start(
        self, member: SlotMember, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> LaunchedProcess:
        """Start a process on the slot of ``member``. ``environment`` is added to that of its
        machine; ``log`` receives all its output. Raises ConfigError if the command does not
        exist."""
        ...

    def address_of(self, member: SlotMember) -> str:
        """The address at which others reach the member's machine."""
        ...

    def free_port(self, member: SlotMember) -> int:
        """A free port on the member's machine."""
        ...

    def renew(self, member: SlotMember) -> None:
        """Ensure that the member has a slot: if its own is lost, find another, perhaps on another
        machine. This may take a while. Raises ConfigError if there is none."""
        ...

    def close(self) -> None:
        """End all started processes. Idempotent."""
        ...


class PlacedProcess:
    """A process that is controlled through its node agent; implements ``LaunchedProcess``."""

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
        """``ask`` runs a method of ``NodeAgent``; it returns None if the agent is gone, and with it
        the process."""
        self._ask = ask
        self._name = name
        self._log = log
        self.pid = pid if is_here else 0
        self.where = f"process {pid} on {host}"
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            status = self._ask("poll", self._name)
            if status is None:
                self._status = _KILLED
            elif status[0]:
                self._status = status[1]
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
            self._ask("said", self._name) or f"no readable log from this machine ({self._log})"
        )


class PlacedEngine:
    """An engine on its slot, with the interface of ``EngineProcess``. It restarts wherever its slot
    is by then, perhaps at another address."""

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
        self._hosts = hosts
        self._member = SlotMember("inference", index)
        self.log = log
        self._spec = spec
        self._model = (checkpoint.resolve(), dtype, window)
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
        checkpoint, dtype, window = self._model
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
