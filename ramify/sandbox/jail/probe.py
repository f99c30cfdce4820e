"""Finds out which tier this machine reaches, by building the walls and letting a trial session
attack them.

Decides how the answer is obtained without an event loop, and that this happens once per process.
Not here: the walls (see ``walls.py``). A tier is reported only if it was tested, never because of a
version number.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping

import msgspec

from ramify.errors import SandboxError
from ramify.sandbox.forkserver_channel import StartedForkServer, start_server
from ramify.sandbox.guest.frames import open_frame

MODULES = (
    "jail/hooks",
    "shared_buffers",
    "guest",
    "process_setup",
    "forkserver",
    "jail/primitives",
    "jail/seccomp",
    "jail/confine",
    "jail/walls",
    "jail/zygote",
)
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
"""Part of a reason -> what to do about it; the first that fits counts."""
_OTHER_REMEDY = "allow what was refused (docker: --security-opt seccomp=unconfined)"


class ProbedTier(msgspec.Struct, frozen=True):
    """The strongest tier of this machine."""

    tier: str | None
    """None: not even C."""
    missing: dict[str, str]
    """Stronger tier -> what the kernel refused."""
    landlock: int = 0
    """Version of Landlock in use, 0 for none."""


NEWEST = 1 << 10
"""A version of Landlock that no kernel has yet: use the kernel's own version."""
_probed: dict[tuple[frozenset[int], int], ProbedTier] = {}


def learn(server: StartedForkServer) -> None:
    """Read the result, once, from a zygote that was started with ``reports``."""
    _probed[frozenset(), NEWEST] = read_walls(server)


def probe(deny: frozenset[int] = frozenset(), landlock: int = NEWEST) -> ProbedTier:
    """Start a zygote only to find the tier. ``deny``: numbers of system calls to do without;
    ``landlock``: newest version of Landlock to use."""
    if (deny, landlock) not in _probed:
        poorer = {"deny": sorted(deny), "landlock": landlock}
        server = start_server({**EMPTY, **poorer, "probes": True, "reports": True}, MODULES)
        try:
            _probed[deny, landlock] = read_walls(server)
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


def read_walls(server: StartedForkServer) -> ProbedTier:
    """Read the first frame of a zygote that reports. Blocks for the milliseconds that building the
    walls takes."""
    sock = server.control
    header = msgspec.json.decode(open_frame(memoryview(_receive(sock)))[0])
    if header["op"] == "walls":
        return ProbedTier(header["tier"], header["missing"], header["landlock"])
    if "missing" in header:
        return ProbedTier(None, header["missing"])
    raise SandboxError(f"the jail could not be tested: {header.get('message', header)}")


def _receive(sock: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(sock, 4), "little")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    poll = select.poll()  # select does not support descriptors above 1023
    poll.register(sock, select.POLLIN)
    while len(data) < count:
        if not poll.poll(_WAIT_S * 1000):
            raise SandboxError(f"the jail could not be tested: no answer within {_WAIT_S:g} s")
        part = b""
        with contextlib.suppress(OSError):
            part = sock.recv(count - len(data))
        if not part:
            raise SandboxError("the jail could not be tested: its process ended")
        data += part
    return data


def unreachable(tier_needed: str, missing: Mapping[str, str]) -> str:
    """Return the error message for a machine without tier ``asked``: what failed, and what to
    do."""
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
