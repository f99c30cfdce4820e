"""Confine a session's process before any code of a cell runs.

This cannot be undone.

The order of the steps matters. The user namespace is created before the limit on processes is set,
so that the limit counts only this session's processes. Mounts come before Landlock, which forbids
them. Descriptors come before the system call filter, which is last. The isolation that all sessions
share is built by ``walls.py``.

This module also skips the after-fork hooks of the standard library, which a session does not need.
Otherwise each session, forked from a process with one thread, would renew unused locks, list
threads that do not exist, and draw a random seed that is then replaced. This would write to about
two hundred memory pages, a fifth of the time of a fork. Skipping the hooks also lets a branch
continue with the random state of the session that it was forked from. The hooks of the user's
packages do run. So the zygote, the process that forks sessions, loads this file before any module
that has hooks. Standard library only.
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
    # In the fork server, where Ramify is not installed: see host/guest_module_files.py.
    primitives = sys.modules["ramify_jail_primitives"]
    seccomp = sys.modules["ramify_jail_seccomp"]

MAX_THREADS = 512
"""Maximum number of threads and branches of one session together."""
_ALL_THREADS = 4096
"""Maximum number of threads of all sessions together, if they share one system user."""
_SPOOL_BYTES = 32 << 20
"""Lower bound for the file size limit of a session. The session's raw output goes to a file, to
which the limit applies as well."""


_OWN_SPACES = primitives.NEWUSER | primitives.NEWNS | primitives.NEWIPC


class JailLimits(NamedTuple):
    """The resource limits of one session in the jail."""

    cpu_s: int
    files_bytes: int
    """Maximum size of the session's folder in bytes; 0 if it has none."""
    scratch: str
    """Path of the session's folder."""


class JailFolderDescriptors(NamedTuple):
    """File descriptors of one session's private folder and Landlock rules, opened before its fork.

    The zygote, the process that forks sessions, opens them. A descriptor that is not needed is -1.
    """

    scratch: int
    """Descriptor of the file system in the session's folder."""
    rules: int
    """Descriptor of the session's Landlock rules."""

    def close_rules_descriptor(self) -> None:
        """Close the fork server's copy of a session's Landlock rules after the fork."""
        if self.rules >= 0:
            os.close(self.rules)

    def drop_scratch(self) -> None:
        """Close the descriptor of the file system that held a finished session's private folder."""
        if self.scratch >= 0:
            os.close(self.scratch)


class JailSessionConfiner:
    """Confines the process of each session before it runs any cell.

    It prepares once what all sessions have in common, such as the compiled system call filter.
    """

    def __init__(
        self, bounds: JailLimits, *, own_user: bool, landlock: Any, paths: bool, drops: bool
    ) -> None:
        """Prepare what all sessions need to be confined, such as the system call filter.

        ``own_user``: give each session its own user and mount namespaces. ``landlock``: the
        Landlock rules, or None. ``paths``: allow system calls that name files. ``drops``: drop all
        capabilities of the session's process.
        """
        self._bounds = bounds
        self._own_user = own_user
        self._landlock = landlock
        self._drops = drops
        self._filter = seccomp.SeccompFilter(
            seccomp.filter_for(os.uname().machine, paths=paths, changes=own_user)
        )
        self._has_folder = own_user and bounds.files_bytes > 0
        if self._has_folder:
            # Once here, because in a session it would write to memory pages that sessions share.
            os.environ.update(HOME=bounds.scratch, TMPDIR=bounds.scratch)
        self.max_file_bytes = max(bounds.files_bytes, _SPOOL_BYTES)
        """Maximum size of a session's file: that of its whole folder, or of its output file."""
        self._limits = _limits(bounds.cpu_s, self.max_file_bytes, own_user)

    def prepare_session(self) -> JailFolderDescriptors:
        """Create a session's private folder and Landlock rules before its process is forked.

        Doing this after the fork would cause more memory pages to be copied.
        """
        scratch = -1
        if self._has_folder:
            # Inodes need kernel memory that the size does not include.
            size, inodes = (
                str(self._bounds.files_bytes),
                str(max(self._bounds.files_bytes >> 14, 64)),
            )
            scratch = primitives.create_detached_tmpfs(
                {"size": size, "nr_inodes": inodes, "mode": "0700"}
            )
        return JailFolderDescriptors(
            scratch, -1 if self._landlock is None else self._landlock.ruleset(scratch)
        )

    def set_up_session_process(self, prepared: JailFolderDescriptors) -> None:
        """Confine a new session with namespaces, its private folder and Landlock rules.

        This is the first part of the confinement, while the inherited descriptors are still open.
        It enters new namespaces, mounts the session's folder and applies the Landlock rules.
        """
        if self._own_user:
            primitives.unshare(
                _OWN_SPACES if self._has_folder else primitives.NEWUSER, "own user namespace"
            )
        if self._has_folder:
            primitives.place_mount(prepared.scratch, self._bounds.scratch)
            os.chdir(self._bounds.scratch)
        if prepared.rules >= 0:
            primitives.apply_landlock_ruleset(prepared.rules)

    def apply_resource_limits(self) -> None:
        for number, value in self._limits:
            resource.setrlimit(number, value)

    def finish(self, wire: int) -> None:
        """Complete the confinement: drop all capabilities and install the system call filter.

        The filter has a listener, a descriptor at which requests to create a process arrive. It is
        sent to the host over the connection ``wire``.
        """
        if self._drops:
            primitives.drop_capabilities()
        # Then other processes of its user cannot read its memory or list its descriptors.
        primitives.prctl(primitives.PR_SET_DUMPABLE, 0)
        listener = self._filter.install(listener=True)
        with socket.socket(fileno=wire) as end:
            end.sendmsg(
                [b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))]
            )
            end.detach()
        # With the listener, a session could answer its own requests.
        os.close(listener)


def _limits(cpu_s: int, max_file_bytes: int, own_user: bool) -> list[tuple[int, tuple[int, int]]]:
    """Return the soft and hard limits on the resources that a session's process may use.

    No limit exceeds the current hard limit.
    """
    limits = {
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
        "CPU": cpu_s,
        "FSIZE": max_file_bytes,
        "NPROC": MAX_THREADS if own_user else _ALL_THREADS,
    }
    settings = []
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        # RLIM_INFINITY is -1 in Python, so it would be the minimum.
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        settings.append((number, (limit, limit)))
    return settings


_register_at_fork = os.register_at_fork


def _leave_undone(**_: Any) -> None:
    """A replacement for ``os.register_at_fork`` that registers no hooks.

    It accepts any hooks and registers none.
    """


def restore_fork_hooks() -> None:
    """Restore ``os.register_at_fork``, so that hooks registered from now on run after forks."""
    os.register_at_fork = _register_at_fork


os.register_at_fork = _leave_undone
