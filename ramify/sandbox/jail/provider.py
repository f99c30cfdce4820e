"""The provider ``jail``: sessions of full Python that reach no file, no network and no process, in
milliseconds.

Decides which tier is taken and says what is missing, what each session is given, and how many are
kept ready. Leaves out how sessions are had from a fork server (``process.py``), the walls
(``walls.py``, ``confine.py``, ``seccomp.py``), and the budget of memory (``budget.py``).

    JailSandbox ──Link──> zygote in its walls ──┬─fork─> confined session <──SocketStream──> GuestSession
                    └──Link──> template ────────┴─fork─> confined session       asks for a process ──> Listener
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from ramify.errors import ConfigError, RamifyError, SandboxError
from ramify.sandbox.base import PreparedContext, Sandbox, SandboxCapabilities, SandboxSpec, Session
from ramify.sandbox.forkserver_channel import ForkServerChannel, StartedForkServer, start_server
from ramify.sandbox.jail.budget import JailBudgetWatcher, machine_bytes
from ramify.sandbox.jail.jail_transport import JailTransport
from ramify.sandbox.jail.notify import pid_of
from ramify.sandbox.jail.probe import EMPTY, MODULES, NEWEST, ProbedTier, learn, probe, unreachable
from ramify.sandbox.jail.rollback import RollbackSession
from ramify.sandbox.packages import listed, locate, readable
from ramify.sandbox.process import ProcessSandbox
from ramify.sandbox.process_transport import SessionMemoryFiles
from ramify.sandbox.session import GuestSession

_NOT_HERE = (
    "sandbox 'jail' needs Linux and this is {platform}: run inside a container or WSL2, use "
    "provider 'docker', a cloud "
    "one or 'monty' (--sandbox NAME), or accept no isolation: SandboxSpec(provider='process', "
    "allow_weaker=True), "
    "--sandbox process --allow-weaker"
)
_LATER_S = 0.002
"""Before the next session is made ready: the one that was taken has a cell to run first."""
_FORBIDDEN = ("/", "/proc", "/sys", "/dev", "/run")
WEAKER = {
    "B": "sandbox 'jail' at tier B: files of this machine cannot be opened, but their names, sizes and times can be seen",
    "C": "sandbox 'jail' at tier C: the filter of system calls is the only wall",
}


class JailSandbox(ProcessSandbox):
    """Implements ``base.Sandbox``."""

    def __init__(
        self, spec: SandboxSpec, *, deny: frozenset[int] = frozenset(), landlock: int = NEWEST
    ) -> None:
        """``deny``: numbers of system calls to do without, and ``landlock``: the newest version of
        Landlock to use, both as on a poorer kernel."""
        if sys.platform != "linux":
            raise SandboxError(_NOT_HERE.format(platform=sys.platform))
        check_mounts(spec.mounts)
        check_memory(spec)
        super().__init__(spec)
        self._deny, self._landlock = deny, landlock
        if self._is_whole():
            with _lock:
                _hear(spec)
        self.reached: ProbedTier = probe(deny, landlock)
        self.warning = self._settle_tier()
        check_places(spec.mounts, self.reached)
        self._budget = JailBudgetWatcher(spec.all_memory_bytes)
        self._ready: deque[GuestSession] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self.caps = SandboxCapabilities(
            isolates_files=True,
            isolates_network=True,
            isolates_processes=True,
            limits_memory=True,
            interrupt=True,
            kill=True,
            fork=True,
            shares_context=True,
        )

    def _is_whole(self) -> bool:
        """Nothing that this kernel has is left out."""
        return not self._deny and self._landlock == NEWEST

    def _settle_tier(self) -> str | None:
        tier, spec = self.reached.tier, self.spec
        if tier is None or (tier > spec.tier and not spec.allow_weaker):
            raise SandboxError(unreachable(spec.tier, self.reached.missing))
        return WEAKER[tier] if tier > spec.tier else None

    def describe(self) -> list[str]:
        """The tier, and what keeps what away."""
        tier, landlock = str(self.reached.tier), self.reached.landlock
        files = {
            "A": "not there (mount namespace)",
            "B": "cannot be opened (Landlock)",
            "C": "cannot be named (seccomp)",
        }
        spaces = "namespace and seccomp" if tier == "A" else "seccomp"
        lines = [
            f"tier {tier}; files: {files[tier]}; network: {spaces}; processes: {spaces}",
            f"seccomp: yes; Landlock: {f'version {landlock}' if landlock else 'no'}",
        ]
        return lines + [
            f"no tier {stronger}: {why}" for stronger, why in self.reached.missing.items()
        ]

    async def open(self, *, context: PreparedContext | None = None, seed: str = "") -> Session:  # type: ignore[override]
        session = await super().open(context=context, seed=seed)
        return RollbackSession(session) if self.spec.rollback else session

    def start(self) -> StartedForkServer:
        with _lock:
            if self._is_whole() and self.spec in _launched:
                _hear(self.spec)
                _heard.discard(self.spec)
                return _launched.pop(self.spec)
        poorer = {"deny": sorted(self._deny), "landlock": self._landlock}
        return _start(self.spec, self.paths, poorer, reports=False)

    # -- sessions kept ready

    async def fork(
        self, link: ForkServerChannel, seed: str, *, early: bool = False
    ) -> GuestSession:
        if early or link is not await self.base():
            return await super().fork(link, seed, early=early)
        session = await self._take(seed)
        if session is None:
            session = await super().fork(link, seed)
        if self._filling is None and self.spec.pool:
            self._filling = asyncio.ensure_future(self._fill())
        return session

    async def _take(self, seed: str) -> GuestSession | None:
        while self._ready:
            session = self._ready.popleft()
            with contextlib.suppress(RamifyError):
                session.seed(seed)
                return session
            await session.close()
        return None

    async def _fill(self) -> None:
        try:
            await asyncio.sleep(_LATER_S)
            with contextlib.suppress(RamifyError):  # whoever wants a session next is told
                while len(self._ready) < self.spec.pool:
                    self._ready.append(await self.fork(await self.base(), "", early=True))
        finally:
            self._filling = None

    def compiled(self) -> None:
        """Those that are ready know nothing of it: they make room for better ones, once there is
        time."""
        old = [*self._ready]
        self._ready.clear()
        for session in old:
            session.kill("it was never taken")
            self._leaving.add(task := asyncio.ensure_future(session.close()))
            task.add_done_callback(self._leaving.discard)

    def opened(self, session: GuestSession) -> None:
        super().opened(session)
        self._budget.watch(session, pid_of(session.process))

    def closed(self, session: GuestSession) -> None:
        super().closed(session)
        self._budget.forget(session)

    def make_transport(
        self,
        sock: socket.socket,
        link: ForkServerChannel,
        pid: int,
        pidfd: int,
        files: SessionMemoryFiles,
    ) -> JailTransport:
        return JailTransport(self.caps, sock, self.buffers, link, pid, pidfd, files)

    async def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait((self._filling,))
        await super().close()
        if self._leaving:
            await asyncio.wait(self._leaving)


def check_mounts(mounts: tuple[tuple[str, str], ...]) -> None:
    """Raises ConfigError for what cannot or may not be shown to sessions."""
    for source, place in mounts:
        if not os.path.exists(source):
            raise ConfigError(f"sandbox mounts: there is no '{source}' on this machine")
        real = os.path.realpath(source)
        if real in _FORBIDDEN or real.startswith(("/proc/", "/sys/", "/dev/")):
            raise ConfigError(
                f"sandbox mounts: '{source}' is not allowed: give a folder or file of your own data"
            )
        if (
            not os.path.isabs(place)
            or os.path.normpath(place) != place
            or place in ("/", "/tmp", "/dev", "/proc")
        ):
            raise ConfigError(
                f"sandbox mounts: '{place}' is no place for '{source}': give an absolute path such "
                "as /data"
            )


def check_places(mounts: tuple[tuple[str, str], ...], reached: ProbedTier) -> None:
    """Without a file system of their own, sessions see a mount where it is, or not at all. Raises
    ConfigError."""
    if reached.tier == "A":
        return
    for source, place in mounts:
        if reached.tier == "C" or os.path.realpath(source) != place:
            where = (
                ""
                if reached.tier == "C"
                else f", only where it is: ({source!r}, {os.path.realpath(source)!r})"
            )
            raise ConfigError(
                f"sandbox mounts: at tier {reached.tier}, which is what this machine reaches, "
                f"'{source}' cannot be shown "
                f"as '{place}'{where}"
            )


def check_memory(spec: SandboxSpec) -> None:
    """Raises ConfigError for what this machine does not have."""
    most, default = machine_bytes(), SandboxSpec().memory_bytes
    for name, wanted in (
        ("memory_bytes", spec.memory_bytes),
        ("all_memory_bytes", spec.all_memory_bytes),
    ):
        if wanted > max(most, default):
            raise ConfigError(
                f"sandbox {name} is {wanted:,}, more than the {most:,} bytes of this machine"
            )


def _start(
    spec: SandboxSpec, paths: list[str], poorer: dict[str, Any], *, reports: bool
) -> StartedForkServer:
    """``poorer``: what to do without."""
    config = (
        EMPTY
        | poorer
        | {
            "paths": paths,
            "shown": readable(spec.packages),
            "listed": listed(spec.packages),
            "packages": list(spec.packages),
            "memory_bytes": spec.memory_bytes,
            "max_output_bytes": spec.max_output_bytes,
            "cpu_s": spec.cpu_s,
            "reports": reports,
            "files_bytes": 0 if spec.rollback else spec.files_bytes,
            "mounts": [[place, os.path.realpath(source)] for source, place in spec.mounts],
        }
    )
    return start_server(config, MODULES)


_lock = threading.Lock()
"""Of what follows: the first words of a zygote are read once, whichever thread asks."""
_launched: dict[SandboxSpec, StartedForkServer] = {}
_heard: set[SandboxSpec] = set()
"""Those of them whose report was read."""


def launch(spec: SandboxSpec) -> None:
    """Start the zygote that the next sandbox of ``spec`` will take, while the caller does other
    things."""
    if sys.platform != "linux" or spec in _launched:
        return
    with _lock:
        if not _launched:
            atexit.register(_discard)
        if spec not in _launched:
            _launched[spec] = _start(spec, locate(spec.packages), {}, reports=True)


def _hear(spec: SandboxSpec) -> None:
    """Take what the zygote that was launched for ``spec`` says of its walls."""
    if spec in _launched and spec not in _heard:
        _heard.add(spec)
        learn(_launched[spec])


def _discard() -> None:
    """End what was launched and never taken."""
    for server in _launched.values():
        _end(server)
    _launched.clear()


def _end(server: StartedForkServer) -> None:
    server.control.close()
    try:
        server.process.wait(2.0)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    os.close(server.complaints)


def open_provider(spec: SandboxSpec) -> Sandbox:
    """What ``base.open_sandbox`` calls. Where there is no jail, whoever accepts weaker gets
    processes, with their warning."""
    try:
        return JailSandbox(spec)
    except SandboxError:
        if spec.allow_weaker:
            return ProcessSandbox(spec)
        raise
