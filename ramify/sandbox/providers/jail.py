"""The sandbox provider ``jail``, whose sessions have full Python and open in milliseconds, but have
no access to files, the network or other processes.

This module decides which tier (level of isolation) is used, reports what is missing for a stronger
one, and decides what each session gets and how many sessions are kept ready. The tier is determined
once per process, by building the isolation and letting a trial session attack it: it is reported
only if it was tested, never because of a version number. Forking sessions from a server is done by
``process.py``, the isolation is built in ``sandbox/jail/``, and the memory budget is enforced by
``jail_limits.py``.

    JailSandbox ──> zygote in its walls ─┬─fork─> confined session <──> GuestSessionProxy
              └───> template ────────────┴─fork─> confined session
                                                      └─ fork request ──> ProcessCreationGate
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError, SandboxError
from ramify.sandbox.base import (
    JailSpec,
    PreparedContext,
    Sandbox,
    SandboxCapabilities,
    SandboxSpec,
    Session,
)
from ramify.sandbox.guest.message_frames import MessageFrameReader, split_frame
from ramify.sandbox.host.forkserver_channel import ForkServerChannel, start_server
from ramify.sandbox.host.forkserver_process import JAIL_MODULES, StartedForkServer
from ramify.sandbox.host.importable_packages import locate, partly_visible_folders, readable_paths
from ramify.sandbox.host.process_transport import ForkedSessionHandles, pid_of_pidfd
from ramify.sandbox.host.session import GuestSessionProxy
from ramify.sandbox.providers.isolation_tier_cache import (
    ProbedIsolationTier,
    forget_tier,
    keep_tier,
    kept_tier,
)
from ramify.sandbox.providers.jail_limits import JailMemoryBudgetWatcher, machine_memory_bytes
from ramify.sandbox.providers.jail_transport import JailTransport
from ramify.sandbox.providers.process import ProcessSandbox, close_inherited_servers

_WAIT_S = 30.0
_USER_NAMESPACES = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; docker: --security-opt seccomp=unconfined)"
)
_REMEDIES = {
    "as root": "give root the capability CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN), or run as an "
    f"ordinary user and {_USER_NAMESPACES}",
    "user namespace": _USER_NAMESPACES,
    "landlock": "use a kernel with Landlock (Linux 5.13 or later, lsm=landlock,…)",
    "seccomp filter": "use a kernel with CONFIG_SECCOMP_FILTER",
    "system calls": "use a machine of the architecture x86_64 or aarch64",
    "(linux": "use that kernel or a later one, and allow the call (docker: --security-opt "
    "seccomp=unconfined)",
}
"""Substring of the reason for a failure -> advice. The first match counts."""
_OTHER_REMEDY = "allow what was refused (docker: --security-opt seccomp=unconfined)"


NEWEST = 1 << 10
"""A number above every version of Landlock. It selects the newest version that the kernel
supports."""
_WHOLE = (frozenset[int](), NEWEST)
_probed: dict[tuple[frozenset[int], int], ProbedIsolationTier] = {}


def cache_zygote_tier(server: StartedForkServer) -> None:
    """Read the isolation level that a jail's fork server has reached, and cache it.

    The server must have been started with ``reports``, and its report must not have been read yet.
    """
    _probed[_WHOLE] = found = read_reached_tier(server)
    keep_tier(found)


def cached_tier() -> ProbedIsolationTier | None:
    """Return the isolation tier of this machine if it is already known, otherwise None.

    It is the tier of a jail that may use all features of the kernel.
    """
    if _WHOLE not in _probed and (kept := kept_tier()) is not None:
        _probed[_WHOLE] = kept
    return _probed.get(_WHOLE)


def probe(deny: frozenset[int] = frozenset(), landlock: int = NEWEST) -> ProbedIsolationTier:
    """Start a jail's fork server to determine the level of isolation that this machine supports.

    The result is cached. ``deny`` holds the numbers of system calls that the server must not use.
    ``landlock`` is the newest version of Landlock that it may use.
    """
    if (deny, landlock) not in _probed:
        poorer = {"deny": sorted(deny), "landlock": landlock}
        server = start_server({**EMPTY, **poorer, "probes": True, "reports": True}, JAIL_MODULES)
        try:
            _probed[deny, landlock] = read_reached_tier(server)
        finally:
            server.control.close()
            server.process.kill()
            server.process.wait()
            os.close(server.complaints)
    return _probed[deny, landlock]


EMPTY = {
    "paths": [],
    "shown": [],
    "listed": [],
    "packages": [],
    "folder": "",
    "memory_bytes": 1 << 30,
    "max_output_bytes": 1 << 16,
    "mounts": [],
    "cpu_s": 60,
    "files_bytes": 1 << 20,
    "tiers": "ABC",
    "deny": [],
    "landlock": NEWEST,
    "probes": False,
    "reports": False,
}
"""Default configuration of a zygote."""


def read_reached_tier(server: StartedForkServer) -> ProbedIsolationTier:
    """Read from a fork server's first message which isolation the server has reached.

    Blocks for some milliseconds, until the isolation has been built.
    """
    header = msgspec.json.decode(split_frame(_first_frame(server.control))[0])
    if header["op"] == "walls":
        return ProbedIsolationTier(header["tier"], header["missing"], header["landlock"])
    if "missing" in header:
        return ProbedIsolationTier(None, header["missing"])
    raise SandboxError(f"the jail could not be tested: {header.get('message', header)}")


def _first_frame(sock: socket.socket) -> memoryview:
    """Read the first message of a jail's fork server, but none of the bytes after it.

    All later bytes are left for another reader.
    """
    reader = MessageFrameReader()
    poll = select.poll()  # select does not support descriptors above 1023
    poll.register(sock, select.POLLIN)
    while (view := reader.next()) is None:
        if not poll.poll(_WAIT_S * 1000):
            raise SandboxError(f"the jail could not be tested: no answer within {_WAIT_S:g} s")
        part = b""
        with contextlib.suppress(OSError):
            part = sock.recv(reader.num_missing_bytes())
        if not part:
            raise SandboxError("the jail could not be tested: its process ended")
        reader.feed(part)
    return view


def missing_tier_message(tier_needed: str, missing: Mapping[str, str]) -> str:
    """Return the error message for a machine that does not reach the required level of isolation.

    It says what failed and what to do about it.
    """
    tried = "; ".join(f"tier {tier}: {why}" for tier, why in missing.items() if tier <= tier_needed)
    remedies = "; ".join(
        f"for tier {tier} {_remedy(why)}" for tier, why in missing.items() if tier <= tier_needed
    )
    return (
        f"sandbox 'jail' does not reach tier {tier_needed} on this machine ({tried}): {remedies}; "
        "or accept less: allow_weaker=True (--allow-weaker)"
    )


def _remedy(why: str) -> str:
    fitting = (remedy for part, remedy in _REMEDIES.items() if part in why.lower())
    return next(fitting, _OTHER_REMEDY)


_NOT_HERE = (
    "sandbox 'jail' needs Linux and this is {platform}: run inside a container or WSL2, use the "
    "provider 'docker', a cloud provider or 'monty' (--sandbox NAME), or accept no isolation: "
    "SandboxSpec(provider='process', allow_weaker=True), --sandbox process --allow-weaker"
)
_LATER_S = 0.002
"""Delay in seconds before the next session is prepared, which leaves the CPU to the first cell of
the session that was just handed out."""
_FORBIDDEN = ("/", "/proc", "/sys", "/dev", "/run")
WEAKER = {
    "B": "sandbox 'jail' at tier B: files of this machine cannot be opened, but their names, "
    "sizes and times are visible",
    "C": "sandbox 'jail' at tier C: the system call filter is the only wall",
}


class JailSandbox(ProcessSandbox):
    """A sandbox that confines its sessions with Linux kernel features.

    Implements ``base.Sandbox``.
    """

    def __init__(
        self,
        spec: JailSpec,
        *,
        deny: frozenset[int] = frozenset(),
        landlock: int = NEWEST,
        counts: bool = True,
    ) -> None:
        """Create a jail and determine its level of isolation.

        Raises SandboxError if that level is too low.

        The other parameters simulate a less capable kernel. ``deny``: numbers of system calls that
        must not be used. ``landlock``: the newest version of Landlock to use. ``counts``: use the
        kernel's count of a process's open descriptors.
        """
        if sys.platform != "linux":
            raise SandboxError(_NOT_HERE.format(platform=sys.platform))
        check_mounts(spec.mounts)
        check_memory_available(spec)
        super().__init__(spec)
        self.spec: JailSpec = spec
        self._deny, self._landlock, self._counts = deny, landlock, counts
        if self._uses_whole_kernel():
            with _lock:
                if cached_tier() is None:
                    _read_report(spec)
        self.reached: ProbedIsolationTier = probe(deny, landlock)
        self.warning = self._settle_tier()
        check_mounts_at_tier(spec.mounts, self.reached)
        self._budget = JailMemoryBudgetWatcher(spec.all_memory_bytes, self._ask_folders)
        self._ready: deque[GuestSessionProxy] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._modules: dict[str, str] = {}
        """Modules that sessions will probably install: name -> source."""
        self._is_used_again = False
        """True once a session was requested. Further sessions are kept ready only from the second
        request on."""
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

    def _uses_whole_kernel(self) -> bool:
        """Return True if the jail may use all features of this machine's kernel."""
        return not self._deny and self._landlock == NEWEST

    def _settle_tier(self) -> str | None:
        tier, spec = self.reached.tier, self.spec
        if tier is None or (tier > spec.tier and not spec.allow_weaker):
            raise SandboxError(missing_tier_message(spec.tier, self.reached.missing))
        return WEAKER[tier] if tier > spec.tier else None

    def describe(self) -> list[str]:
        """Describe the jail's tier and its isolation of files, network and processes, line by
        line."""
        tier, landlock = str(self.reached.tier), self.reached.landlock
        files = {
            "A": "do not exist (mount namespace)",
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
        if not self.spec.rollback:
            return session
        from ramify.sandbox.providers.rollback import RollbackSession

        return RollbackSession(session)

    def start_fork_server(self) -> StartedForkServer:
        with _lock:
            if self._uses_whole_kernel() and self.spec in launched:
                _reported.discard(self.spec)
                return launched.pop(self.spec)
        poorer = {"deny": sorted(self._deny), "landlock": self._landlock}
        return _start(self.spec, self.paths, poorer, reports=False)

    async def fork_server(self) -> ForkServerChannel:
        try:
            return await super().fork_server()
        except SandboxError:
            # An earlier process may have found a tier that no longer works: the next one tests it.
            forget_tier()
            raise

    def check_server_report(self, ready: Mapping[str, Any]) -> None:
        """Check the isolation that a fork server reports, and record it if it differs from the
        expected one.

        The expectation may come from an earlier process. Raises SandboxError if the isolation is
        weaker than allowed.
        """
        found = ProbedIsolationTier(ready["tier"], ready["missing"], ready["landlock"])
        if found != self.reached:
            if self._uses_whole_kernel():
                _probed[_WHOLE] = found
                keep_tier(found)
            self.reached = found
            self.warning = self._settle_tier()
            check_mounts_at_tier(self.spec.mounts, found)

    # -- sessions kept ready

    def expect_module(self, module: str, source: str) -> None:
        self._modules.setdefault(module, source)

    async def fork_session(
        self, channel: ForkServerChannel, seed: str, *, early: bool = False
    ) -> GuestSessionProxy:
        if early or channel is not await self.fork_server():
            return await super().fork_session(channel, seed, early=early)
        session = await self._take_ready_session(seed)
        if session is None:
            session = await super().fork_session(channel, seed)
        # Many questions need one session only, and this machine has better work at their start.
        if self._filling is None and self.spec.pool and self._is_used_again:
            self._filling = asyncio.ensure_future(self._fill_ready_sessions())
        self._is_used_again = True
        return session

    async def _take_ready_session(self, seed: str) -> GuestSessionProxy | None:
        while self._ready:
            session = self._ready.popleft()
            with contextlib.suppress(RamifyError):
                session.seed(seed)
                return session
            await session.close()
        return None

    async def _fill_ready_sessions(self) -> None:
        try:
            await asyncio.sleep(_LATER_S)
            with contextlib.suppress(RamifyError):  # the next ``open`` reports the error
                channel = await self.fork_server()
                for module, source in self._modules.items():
                    if channel.modules.get(module) != source:
                        await channel.preinstall_module(module, source)
                while len(self._ready) < self.spec.pool:
                    self._ready.append(
                        await self.fork_session(await self.fork_server(), "", early=True)
                    )
        finally:
            self._filling = None

    def register_session(self, session: GuestSessionProxy) -> None:
        super().register_session(session)
        self._budget.watch(session, pid_of_pidfd(session.pidfd))

    def unregister_session(self, session: GuestSessionProxy) -> None:
        super().unregister_session(session)
        self._budget.forget(session)

    async def _ask_folders(self) -> None:
        """Update the recorded sizes of all sessions' private folders by asking the fork servers.

        The folders count towards the memory budget.
        """
        places = {session.server_and_pid: session for session in self.sessions}
        with contextlib.suppress(SandboxError):  # a server that is gone has no sessions
            for channel in {channel for channel, _ in places}:
                reply, _ = await channel.ask({"op": "folders"})
                for pid, num_bytes in reply["bytes"]:
                    if (session := places.get((channel, pid))) is not None:
                        self._budget.record_folder_size(session, num_bytes)

    def make_transport(self, process: ForkedSessionHandles) -> JailTransport:
        return JailTransport(self.caps, self.buffers, process, self._counts)

    async def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait((self._filling,))
        await super().close()


def check_mounts(mounts: tuple[tuple[str, str], ...]) -> None:
    """Raise ConfigError if the source of a mount does not exist, or if its source or target is not
    allowed."""
    for source, place in mounts:
        if not os.path.exists(source):
            raise ConfigError(
                f"sandbox mounts: '{source}' does not exist on this machine: correct the path"
            )
        real = os.path.realpath(source)
        if real in _FORBIDDEN or real.startswith(("/proc/", "/sys/", "/dev/")):
            raise ConfigError(
                f"sandbox mounts: '{source}' may not be mounted: give a folder or file that holds "
                "only your data"
            )
        if (
            not os.path.isabs(place)
            or os.path.normpath(place) != place
            or place in ("/", "/tmp", "/dev", "/proc")
        ):
            raise ConfigError(
                f"sandbox mounts: '{source}' cannot be mounted at '{place}': give an absolute path "
                "such as /data"
            )


def check_mounts_at_tier(mounts: tuple[tuple[str, str], ...], reached: ProbedIsolationTier) -> None:
    """Raise ConfigError if a mount is not possible at the isolation tier that was reached.

    At tier B, a file can be mounted only at its real path. At tier C, nothing can be mounted.
    """
    if reached.tier == "A":
        return
    for source, place in mounts:
        if reached.tier == "C" or os.path.realpath(source) != place:
            where = (
                ""
                if reached.tier == "C"
                else f", only at its own path: ({source!r}, {os.path.realpath(source)!r})"
            )
            raise ConfigError(
                f"sandbox mounts: this machine reaches tier {reached.tier}, at which '{source}' "
                f"cannot be mounted at '{place}'{where}"
            )


def check_memory_available(spec: JailSpec) -> None:
    """Raise ConfigError if a jail is configured with more memory than this machine has."""
    available, default = machine_memory_bytes(), SandboxSpec().memory_bytes
    for name, num_bytes in (
        ("memory_bytes", spec.memory_bytes),
        ("all_memory_bytes", spec.all_memory_bytes),
    ):
        # The default is accepted on a smaller machine, too.
        if num_bytes > max(available, default):
            raise ConfigError(
                f"sandbox {name} is {num_bytes:,}, more than the {available:,} bytes of this "
                "machine"
            )


def _start(
    spec: JailSpec, paths: list[str], poorer: dict[str, Any], *, reports: bool
) -> StartedForkServer:
    """Start a fork server for a jail with this configuration.

    ``poorer`` holds settings that exclude some features of the kernel. With ``reports``, the
    server's first message reports its isolation tier.
    """
    config = (
        EMPTY
        | poorer
        | {
            "paths": paths,
            "shown": readable_paths(spec.packages),
            "listed": partly_visible_folders(spec.packages),
            "packages": list(spec.packages),
            "memory_bytes": spec.memory_bytes,
            "max_output_bytes": spec.max_output_bytes,
            "cpu_s": spec.cpu_s,
            "reports": reports,
            # A rollback forks the session before each cell, after which it could not write files.
            "files_bytes": 0 if spec.rollback else spec.files_bytes,
            "mounts": [[place, os.path.realpath(source)] for source, place in spec.mounts],
        }
    )
    return start_server(config, JAIL_MODULES)


_lock = threading.Lock()
"""Protects the variables below, since several threads may need a fork server's report."""
launched: dict[JailSpec, StartedForkServer] = {}
_reported: set[JailSpec] = set()
"""Configurations in ``launched`` whose fork server's report was read."""


def launch(spec: JailSpec) -> None:
    """Start the fork server for the next jail with this configuration in advance."""
    if sys.platform != "linux" or spec in launched:
        return
    with _lock:
        if not launched:
            atexit.register(_discard_unused_servers)
        if spec not in launched:
            launched[spec] = _start(spec, locate(spec.packages), {}, reports=True)


def _read_report(spec: JailSpec) -> None:
    """Read the isolation report of a jail's fork server.

    Does nothing unless one was launched in advance and its report is still unread.
    """
    if spec in launched and spec not in _reported:
        _reported.add(spec)
        try:
            cache_zygote_tier(launched[spec])
        except SandboxError:  # it was killed, or says why it cannot start: the next one will too
            _end(launched.pop(spec))
            _reported.discard(spec)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: close_inherited_servers(launched))


def _discard_unused_servers() -> None:
    """Stop all fork servers that were started in advance but never used."""
    for server in launched.values():
        _end(server)
    launched.clear()


def _end(server: StartedForkServer) -> None:
    server.control.close()
    try:
        server.process.wait(2.0)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    os.close(server.complaints)


def open_provider(spec: JailSpec) -> Sandbox:
    """Open a jail, or a weaker sandbox if the configuration allows that.

    ``base.open_sandbox`` calls this function. If no jail is available and the configuration accepts
    weaker isolation, return a process sandbox with a warning instead.
    """
    try:
        return JailSandbox(spec)
    except SandboxError:
        if not spec.allow_weaker:
            raise
    if spec.mounts:
        raise ConfigError(
            "sandbox 'process' does not support mounts, only 'jail' does: remove them"
        )
    return ProcessSandbox(spec)
