"""What one session's process does to itself before any code of a cell runs. After it there is no way back.

Decides the order, which matters: the own user namespace comes before the limit of processes, which then counts this
session alone; mounts before Landlock, which forbids them; descriptors before the filter, which is last. Leaves out the
walls around all sessions (``walls.py``). Standard library only.
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
"""Where sessions have no user of their own: threads of all that their user runs, from which on they get no more."""
_SPOOL_BYTES = 32 << 20
"""Least size of a file that a session may write: its raw output is one."""


class Bounds(NamedTuple):
    """What one session may use."""

    cpu_s: int
    files_bytes: int
    """Of its folder; 0: it has none."""
    scratch: str
    """Where its folder is."""


class Confinement:
    """Everything about the confinement that can be prepared once, for all sessions of a zygote."""

    def __init__(self, bounds: Bounds, *, own_user: bool, landlock: Any, paths: bool, drops: bool) -> None:
        """``own_user``: each session gets user and mount namespaces. ``paths``: calls may name files. ``drops``: there
        are capabilities to be dropped."""
        self._bounds = bounds
        self._own_user, self._landlock, self._drops = own_user, landlock, drops
        self._filter = seccomp.Filter(seccomp.filter_for(os.uname().machine, paths=paths, changes=own_user))

    def prepare(self) -> int:
        """Made by the zygote for one session: the file system of its folder, or -1."""
        if not self._own_user or not self._bounds.files_bytes:
            return -1
        size, inodes = str(self._bounds.files_bytes), str(max(self._bounds.files_bytes >> 14, 64))
        return primitives.memory_mount({"size": size, "nr_inodes": inodes, "mode": "0700"})

    def enter(self, scratch: int) -> None:
        """First part, while the zygote's descriptors are still open."""
        if self._own_user:
            spaces = primitives.NEWUSER | (primitives.NEWNS | primitives.NEWIPC if scratch >= 0 else 0)
            primitives.unshare(spaces, "own user namespace")
        folder = None
        if scratch >= 0:
            folder = self._bounds.scratch
            primitives.place_mount(scratch, folder)
            os.chdir(folder)
        if self._landlock is not None:
            self._landlock.enforce(folder)
        if folder is not None:
            os.environ.update(HOME=folder, TMPDIR=folder)

    def limit(self) -> None:
        limits = {
            "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64, "CPU": self._bounds.cpu_s,
            "FSIZE": max(self._bounds.files_bytes, _SPOOL_BYTES),
        }  # fmt: skip
        limits["NPROC"] = MAX_THREADS if self._own_user else _ALL_THREADS
        for name, value in limits.items():
            number = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))

    def finish(self, wire: int | None) -> None:
        """Last part: give up every right, and send the host the descriptor at which it is asked for processes."""
        if self._drops:
            primitives.drop_capabilities()
        primitives.prctl(primitives.PR_SET_DUMPABLE, 0)
        if wire is None:
            self._filter.install(listener=False)
            return
        listener = self._filter.install(listener=True)
        with socket.socket(fileno=wire) as end:
            end.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
            end.detach()
        os.close(listener)
