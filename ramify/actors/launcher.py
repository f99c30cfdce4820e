"""Start the processes of a run on slots, which are reserved shares of machines.

Processes run on this machine, or on other machines through Ray.

    launcher.start(RoleInstanceId("trainer", 1), command, environment, log)
        ->  a Process, which can be polled and ended, and says why it ended

    LocalLauncher ──────────────────────────────────── ChildProcess
    RayLauncher ── NodeAgent, one per slot (an actor) ── ChildProcess
                   └─ NodeProcessHandle, here ◀── asks ──┘

``train/placement/`` decides which process runs on which slot. How processes communicate, and which
of them leads, does not depend on the launcher.

A slot is the share of a machine that one process uses, or that several colocated processes share:

    NodeResourceSlot("gpus", node=0, needs=HardwareResources(gpus=1, cpus=8),
                     members=(RoleInstanceId("trainer", 0), RoleInstanceId("inference", 0)))
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ramify.actors.child_process import ChildProcess, ProcessHandle, end_all
from ramify.errors import ConfigError
from ramify.logging import ComponentLogger

ALMOST = 1e-9
"""Tolerance when fractions of a GPU are added up: three times a third is one GPU."""


class HardwareResources(NamedTuple):
    """The GPUs, CPUs and memory that a slot requires or that a node offers."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory_gb: float = 0.0

    def __add__(self, other: object) -> HardwareResources:
        assert isinstance(other, HardwareResources)
        return HardwareResources(*(a + b for a, b in zip(self, other, strict=True)))

    def subtract(self, other: HardwareResources) -> HardwareResources:
        return HardwareResources(*(a - b for a, b in zip(self, other, strict=True)))

    def fits_in(self, available: HardwareResources) -> bool:
        return all(a <= b + ALMOST for a, b in zip(self, available, strict=True))


class RoleInstanceId(NamedTuple):
    """The identity of one process of a run: its role, such as ``trainer``, and its number within
    that role."""

    role: str
    number: int


class NodeResourceSlot(msgspec.Struct, frozen=True):
    """A share of one node's resources, reserved for a process or for several colocated
    processes."""

    pool: str
    """Name of the node pool; empty if the placement declares no pools."""
    node: int
    """Index of the node in its pool."""
    needs: HardwareResources
    members: tuple[RoleInstanceId, ...]
    offsets: tuple[float, ...] = ()
    """Index of each member's first GPU within the slot. If empty, all members use all GPUs."""

    def gpus_for(self, member: RoleInstanceId, gpus: float, slot_gpus: Sequence[str]) -> list[str]:
        """Return the GPUs of this slot that ``member``, one of its processes, may use.

        ``slot_gpus`` lists all GPUs of the slot, and ``gpus`` is how many of them the process
        needs. If there are no ``offsets``, or if ``gpus`` is 0, the process shares all GPUs with
        the others.
        """
        if not self.offsets or not gpus:
            return list(slot_gpus)
        first = int(self.offsets[self.members.index(member)] + ALMOST)
        return list(slot_gpus[first : first + max(1, int(gpus + ALMOST))])


_log = ComponentLogger("actors")
STOPPED_S = 30.0
"""Seconds after which a stopped process (SIGSTOP) counts as lost and is killed."""
_END_S = 5.0
_KILLED = -int(signal.SIGKILL)


class Launcher(Protocol):
    """Starts the processes of a run on their slots, which are reserved shares of machines.

    Implementations are thread-safe.
    """

    @property
    def address(self) -> str:
        """Return the address at which other processes can reach this one."""
        ...

    def start(
        self,
        member: RoleInstanceId,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stdin: bytes = b"",
    ) -> ProcessHandle:
        """Start a process on the slot that is reserved for it, and return a handle to it.

        ``environment`` is added to the machine's environment, ``log`` receives all output, and
        ``stdin`` holds a few bytes for the standard input. Raises ConfigError if the process cannot
        be started."""
        ...

    def address_of(self, member: RoleInstanceId) -> str:
        """Return the network address of the machine on which a process is placed.

        Other processes connect to this address.
        """
        ...

    def free_port(self, member: RoleInstanceId) -> int:
        """Return a free TCP port on the machine where a process is placed."""
        ...

    def ensure_slot(self, member: RoleInstanceId) -> None:
        """Renew the slot of a process, which is its share of a machine.

        If its slot is lost, find another one, perhaps on another machine. This may take a while.
        Raises ConfigError if no slot is available.
        """
        ...

    def close(self) -> None:
        """End all processes that this launcher started.

        Calling this again has no effect.
        """
        ...


class LocalLauncher:
    """Starts all processes of a run on this machine; implements ``Launcher``."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._children: dict[RoleInstanceId, ChildProcess] = {}

    def start(
        self,
        member: RoleInstanceId,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stdin: bytes = b"",
    ) -> ChildProcess:
        """Start a process on this machine.

        Raises ConfigError if the process cannot be started.
        """
        try:
            child = self._children[member] = ChildProcess(
                command, environment=environment, log=log, stdin=stdin, stopped_s=STOPPED_S
            )
        except OSError as error:
            raise start_error(member, "", f"{error.filename}: {error.strerror}") from None
        return child

    def address_of(self, member: RoleInstanceId) -> str:
        return self.address

    def free_port(self, member: RoleInstanceId) -> int:
        return free_port(self.address)

    def ensure_slot(self, member: RoleInstanceId) -> None:
        """Do nothing, because this machine stays available for the whole run."""

    def close(self) -> None:
        end_all(self._children.values(), _END_S)


class NodeAgent:
    """Starts and controls the run's processes on one slot of a cluster node.

    An agent is itself a process on that node.

    The cluster's software (Ray) starts the agent; the agent uses that software only to report its
    location.
    """

    def __init__(self) -> None:
        self._children: dict[str, ChildProcess] = {}

    def describe_location(self) -> dict[str, Any]:
        """Return where this agent runs: the host name, the network address, and the GPUs of its
        slot."""
        from ray.util import get_node_ip_address

        address: Any = get_node_ip_address  # an untyped function
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = [gpu for gpu in visible.split(",") if gpu]
        return {"host": socket.gethostname(), "address": address(), "gpus": gpus}

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: str,
        python: str,
        folder: str,
        stdin: bytes = b"",
    ) -> int | str:
        """Start a command on the machine of this node agent.

        Returns the process id, or an error message if the command cannot be started.

        The command runs in ``folder`` if that exists there. If its first word is ``python``, the
        path of the caller's interpreter, the interpreter of the agent's machine is used instead.
        """
        if command[0] == python:
            command = [sys.executable, *command[1:]]
        if name in self._children:
            self.end(name, 0.0)
        try:
            child = self._children[name] = ChildProcess(
                command,
                environment=environment,
                log=Path(log),
                folder=Path(folder),
                stdin=stdin,
                stopped_s=STOPPED_S,
            )
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return child.pid

    def poll(self, name: str) -> tuple[int | None]:
        """Return a process's exit status in a 1-tuple, which holds None while the process runs.

        The tuple distinguishes a running process from a lost agent, because a remote call to a lost
        agent returns None.
        """
        return (self._children[name].poll(),)

    def exit_reason(self, name: str) -> str:
        return self._children[name].exit_reason()

    def signal(self, name: str, number: int) -> None:
        self._children[name].signal(number)

    def end(self, name: str, timeout_s: float) -> None:
        self._children[name].end(timeout_s)

    def free_port(self) -> int:
        return free_port("")

    def end_all(self) -> None:
        end_all(self._children.values(), _END_S)


class NodeProcessHandle:
    """A handle to a process that a node agent runs, perhaps on another machine.

    Implements ``ProcessHandle``.
    """

    def __init__(
        self, ask: Callable[..., Any], name: str, pid: int, host: str, *, is_here: bool
    ) -> None:
        """Create a handle to the process that the node agent runs under the name ``name``.

        ``ask`` calls a method of the node agent, and returns None if the agent is gone. In that
        case the process has ended, too.
        """
        self._ask = ask
        self._name = name
        self.pid = pid if is_here else 0
        self.where = f"process {pid} on {host}"
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            (self._status,) = self._ask("poll", self._name) or (_KILLED,)
        return self._status

    def exit_reason(self) -> str:
        return self._ask("exit_reason", self._name) or "ended with its node agent"

    def signal(self, number: int) -> None:
        self._ask("signal", self._name, number)

    def end(self, timeout_s: float) -> None:
        self._ask("end", self._name, timeout_s)
        self.poll()


def start_error(member: RoleInstanceId, where: str, why: str) -> ConfigError:
    return ConfigError(f"{member.role} {member.number} cannot be started{where}: {why}")


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


# --- closing


def add_to_exit_stack(
    stack: contextlib.AsyncExitStack, part: str, close: Callable[[], object]
) -> None:
    """Register ``close`` to be called for the resource ``part`` when the exit stack unwinds.

    Resources are closed in reverse order of registration. The first failure of the block or of a
    resource is raised; later failures are logged.
    """

    async def closed(kind: object, first: BaseException | None, trace: object) -> None:
        try:
            result = close()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            if first is None:
                raise
            text = f"{part} could not be closed: {type(error).__name__}: {error}"
            _log.warning("close_failed", text, shown=True, part=part)

    stack.push_async_exit(closed)
