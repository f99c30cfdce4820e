"""What one session's process does to itself before any code of a cell runs. After it there is no
way back.

Decides the order, which matters: the own user namespace comes before the limit of processes, which
then counts this session alone; mounts before Landlock, which forbids them; descriptors before the
filter, which is last. Leaves out the walls around all sessions (``walls.py``). Standard library
only.
"""

from __future__ import annotations

import array
import os
import resource
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ramify.sandbox.jail import primitives, seccomp
else:
    primitives = sys.modules["ramify_jail_primitives"]
    seccomp = sys.modules["ramify_jail_seccomp"]

MAX_THREADS = 512
"""Threads and branches of one session together."""
_ALL_THREADS = 4096
"""Where sessions have no user of their own: threads of all that their user runs, from which on they
get no more."""
_SPOOL_BYTES = 32 << 20
"""Least size of a file that a session may write: its raw output is one."""


_OWN_SPACES = primitives.NEWUSER | primitives.NEWNS | primitives.NEWIPC


class JailLimits(NamedTuple):
    """What one session may use."""

    cpu_s: int
    files_bytes: int
    """Of its folder; 0: it has none."""
    scratch: str
    """Where its folder is."""


class PreparedSession(NamedTuple):
    """What the zygote makes for one session: two descriptors, each -1 for none."""

    scratch: int
    """The file system of its folder."""
    rules: int
    """The Landlock rules."""

    def drop_rules(self) -> None:
        """In the zygote, once they are the session's."""
        if self.rules >= 0:
            os.close(self.rules)

    def drop(self) -> None:
        """After the session's end."""
        if self.scratch >= 0:
            os.close(self.scratch)


class JailConfinement:
    """Everything about the confinement that can be prepared once, for all sessions of a zygote."""

    def __init__(
        self, bounds: JailLimits, *, own_user: bool, landlock: Any, paths: bool, drops: bool
    ) -> None:
        """``own_user``: each session gets user and mount namespaces. ``paths``: calls may name
        files. ``drops``: there are capabilities to be dropped."""
        self._bounds = bounds
        self._own_user, self._landlock, self._drops = own_user, landlock, drops
        self._filter = seccomp.SeccompFilter(
            seccomp.filter_for(os.uname().machine, paths=paths, changes=own_user)
        )
        self._has_folder = own_user and bounds.files_bytes > 0
        if self._has_folder:
            os.environ.update(HOME=bounds.scratch, TMPDIR=bounds.scratch)
        self._limits = _limits(bounds, own_user)

    def prepare(self) -> PreparedSession:
        """Made by the zygote for one session, where it costs no copies of pages."""
        scratch = -1
        if self._has_folder:
            size, inodes = (
                str(self._bounds.files_bytes),
                str(max(self._bounds.files_bytes >> 14, 64)),
            )
            scratch = primitives.memory_mount({"size": size, "nr_inodes": inodes, "mode": "0700"})
        return PreparedSession(
            scratch, -1 if self._landlock is None else self._landlock.ruleset(scratch)
        )

    def enter(self, prepared: PreparedSession) -> None:
        """First part, while the zygote's descriptors are still open."""
        if self._own_user:
            primitives.unshare(
                _OWN_SPACES if self._has_folder else primitives.NEWUSER, "own user namespace"
            )
        if self._has_folder:
            primitives.place_mount(prepared.scratch, self._bounds.scratch)
            os.chdir(self._bounds.scratch)
        if prepared.rules >= 0:
            primitives.restrict(prepared.rules)

    def limit(self) -> None:
        for number, value in self._limits:
            resource.setrlimit(number, value)

    def finish(self, wire: int | None) -> None:
        """Last part: give up every right, and send the host the descriptor at which it is asked for
        processes."""
        if self._drops:
            primitives.drop_capabilities()
        primitives.prctl(primitives.PR_SET_DUMPABLE, 0)
        if wire is None:
            self._filter.install(listener=False)
            return
        listener = self._filter.install(listener=True)
        with socket.socket(fileno=wire) as end:
            end.sendmsg(
                [b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))]
            )
            end.detach()
        os.close(listener)


def _limits(bounds: JailLimits, own_user: bool) -> list[tuple[int, tuple[int, int]]]:
    """(number of a limit, what it is set to): never above what this process may have."""
    wanted = {
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
        "CPU": bounds.cpu_s,
        "FSIZE": max(bounds.files_bytes, _SPOOL_BYTES),
        "NPROC": MAX_THREADS if own_user else _ALL_THREADS,
    }
    found = []
    for name, value in wanted.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        found.append((number, (most, most)))
    return found
