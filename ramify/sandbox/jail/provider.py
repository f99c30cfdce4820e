"""The provider ``jail``: sessions of full Python that reach no file, no network and no process, in milliseconds.

Decides which tier is taken and says what is missing, what each session is given, and how many are kept ready. Leaves
out how sessions are had from a fork server (``process.py``), the walls (``walls.py``, ``confine.py``, ``seccomp.py``), and
the budget of memory (``budget.py``).

    JailSandbox ──Link──> zygote in its walls ──┬─fork─> confined session <──SocketStream──> GuestSession
                    └──Link──> template ────────┴─fork─> confined session       asks for a process ──> Listener
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys

from ramify.errors import ConfigError, SandboxError
from ramify.sandbox.base import Caps, SandboxSpec
from ramify.sandbox.jail.door import JailDoor
from ramify.sandbox.jail.probe import EMPTY, MODULES, Reached, probe, read_walls, unreachable
from ramify.sandbox.link import Link, Server, start_server
from ramify.sandbox.packages import locate
from ramify.sandbox.process import ProcessSandbox

_NOT_HERE = (
    "sandbox 'jail' needs Linux and this is {platform}: run inside a container or WSL2, use provider 'docker', a cloud "
    "one or 'monty', or accept no isolation: SandboxSpec(provider='process', allow_weaker=True)"
)
_FORBIDDEN = ("/", "/proc", "/sys", "/dev", "/run")
WEAKER = {
    "B": "sandbox 'jail' at tier B: files of this machine cannot be opened, but their names, sizes and times can be seen",
    "C": "sandbox 'jail' at tier C: the filter of system calls is the only wall",
}


class JailSandbox(ProcessSandbox):
    """Implements ``base.Sandbox``."""

    def __init__(self, spec: SandboxSpec, *, deny: frozenset[int] = frozenset()) -> None:
        """``deny``: numbers of system calls to do without, as on a poorer kernel."""
        if sys.platform != "linux":
            raise SandboxError(_NOT_HERE.format(platform=sys.platform))
        check_mounts(spec.mounts)
        super().__init__(spec)
        self._deny = deny
        self._taken = _launched.pop(spec, None) if not deny else None
        self.reached: Reached = read_walls(self._taken) if self._taken is not None else probe(deny)
        self._settle_tier()
        self.caps = Caps(
            isolates_files=True, isolates_network=True, isolates_processes=True, limits_memory=True, interrupt=True,
            kill=True, fork=True, shares_context=True,
        )  # fmt: skip

    def _settle_tier(self) -> None:
        tier, spec = self.reached.tier, self.spec
        if tier is None or (tier > spec.tier and not spec.allow_weaker):
            if self._taken is not None:
                _end(self._taken)
            raise SandboxError(unreachable(spec.tier, self.reached.missing))
        self.warning = WEAKER[tier] if tier > spec.tier else None

    def start(self) -> Server:
        taken, self._taken = self._taken, None
        return taken if taken is not None else _start(self.spec, self.paths, self._deny, reports=False)

    def make_door(self, sock: socket.socket, link: Link, pid: int, pidfd: int, spool: int) -> JailDoor:
        return JailDoor(self.caps, sock, self.scratch, link, pid, pidfd, spool)

    async def close(self) -> None:
        if self._taken is not None:
            _end(self._taken)
            self._taken = None
        await super().close()


def check_mounts(mounts: tuple[tuple[str, str], ...]) -> None:
    """Raises ConfigError for what cannot or may not be shown to sessions."""
    for source, place in mounts:
        if not os.path.exists(source):
            raise ConfigError(f"sandbox mounts: there is no '{source}' on this machine")
        real = os.path.realpath(source)
        if real in _FORBIDDEN or real.startswith(("/proc/", "/sys/", "/dev/")):
            raise ConfigError(f"sandbox mounts: '{source}' is not allowed: give a folder or file of your own data")
        if not os.path.isabs(place) or os.path.normpath(place) != place or place in ("/", "/tmp", "/dev", "/proc"):
            raise ConfigError(
                f"sandbox mounts: '{place}' is no place for '{source}': give an absolute path such as /data"
            )


def _start(spec: SandboxSpec, paths: list[str], deny: frozenset[int], *, reports: bool) -> Server:
    config = EMPTY | {
        "paths": paths, "packages": list(spec.packages), "memory_bytes": spec.memory_bytes,
        "max_output_bytes": spec.max_output_bytes, "cpu_s": spec.cpu_s, "deny": sorted(deny), "reports": reports,
        "files_bytes": 0 if spec.rollback else spec.files_bytes,
        "mounts": [[place, os.path.realpath(source)] for source, place in spec.mounts],
    }  # fmt: skip
    return start_server(config, MODULES)


_launched: dict[SandboxSpec, Server] = {}


def launch(spec: SandboxSpec) -> None:
    """Start the zygote that the next sandbox of ``spec`` will take, while the caller does other things."""
    if sys.platform != "linux" or spec in _launched:
        return
    if not _launched:
        atexit.register(_discard)
    _launched[spec] = _start(spec, locate(spec.packages), frozenset(), reports=True)


def _discard() -> None:
    """End what was launched and never taken."""
    for server in _launched.values():
        _end(server)
    _launched.clear()


def _end(server: Server) -> None:
    server.control.close()
    try:
        server.process.wait(2.0)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    os.close(server.complaints)


def open_provider(spec: SandboxSpec) -> JailSandbox:
    """What ``base.open_sandbox`` calls."""
    return JailSandbox(spec)
