"""Starts a fork server process, if possible before this process imports other modules.

The new process gets a fixed, minimal environment and one file descriptor of the host. The sandbox's
configuration is sent to it later. So a command that will probably need a session starts the process
first (``start_early``), and it loads its modules while this process imports its own. This module
therefore imports nothing from this package except ``guest_module_files.py``, which lists the files
that the server runs. The configuration and the control socket are handled by
``forkserver_channel.py``.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys

from ramify.sandbox.host.guest_module_files import FOLDER, LOADER

_BOOT = f"""{LOADER}
load(sys.argv[1], sys.argv[2:-1]).main(int(sys.argv[-1]))
"""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All environment variables of a session. They make the order of sets reproducible and forks cheap,
and prevent extra threads.

With huge pages, large heaps fork fast. With two malloc arenas, threads do not each reserve address
space. The thread counts keep libraries from starting threads before the fork.
"""
JAIL_MODULES = (
    "jail/seccomp_requests",
    "jail/primitives",
    "jail/seccomp",
    "jail/confine",
    "guest",
    "server/process_setup",
    "server/forkserver",
    "jail/walls",
    "jail/zygote",
)
"""The modules that the fork server of a jail loads. The last one runs the server."""


class StartedForkServer:
    """A started fork server: its process, its control socket and the files that belong to it."""

    __slots__ = ("complaints", "control", "folder", "process")

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, complaints: int
    ) -> None:
        self.process = process
        self.control = control
        self.complaints = complaints
        """File with the server's standard error output, which explains a failed start."""
        self.folder = ""
        """Folder that contains the sessions' folders; empty if there is none."""

    def discard(self) -> None:
        """End a fork server that was started in advance but never used."""
        self.control.close()
        self.process.kill()
        self.process.wait()
        os.close(self.complaints)

    def leave_to_parent(self) -> None:
        """Close the copies of the parent's fork server handles that this forked child has
        inherited.

        The fork server itself keeps running. Call this in a forked child.
        """
        self.control.close()
        os.close(self.complaints)
        self.process.returncode = 0  # not a child of this process


def start_process(modules: tuple[str, ...], complaints: int) -> StartedForkServer:
    """Start the process of a fork server, which then waits for its configuration.

    ``complaints`` is a file descriptor for its standard error output.
    """
    host_end, server_end = socket.socketpair()
    with server_end:
        command = [
            sys.executable,
            "-s",
            # Without site-packages: the configuration names the folders of the packages.
            "-S",
            "-P",
            "-c",
            _BOOT,
            FOLDER,
            *modules,
            str(server_end.fileno()),
        ]
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            pass_fds=[server_end.fileno()],
            cwd="/",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        )
    return StartedForkServer(process, host_end, complaints)


_early: dict[tuple[str, ...], StartedForkServer] = {}


def start_early(modules: tuple[str, ...] = JAIL_MODULES) -> None:
    """Start the process of the next fork server in advance, if this system has memory files.

    An unused process ends together with this one. Errors are ignored, because the next start
    reports them.
    """
    if modules in _early or not hasattr(os, "memfd_create"):
        return
    if not _early:
        atexit.register(_discard_early_servers)
    try:
        complaints = os.memfd_create("ramify-errors", os.MFD_CLOEXEC)
        try:
            _early[modules] = start_process(modules, complaints)
        except OSError:
            os.close(complaints)
    except OSError:
        return


def take_prestarted_server(modules: tuple[str, ...]) -> StartedForkServer | None:
    """Take the fork server that was started early for the given modules, or return None.

    Each process is returned only once.
    """
    return _early.pop(modules, None)


def _discard_early_servers() -> None:
    while _early:
        _early.popitem()[1].discard()


def _leave_to_parent() -> None:
    while _early:
        _early.popitem()[1].leave_to_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
