"""Kernel features that confine a process: namespaces, mounts, Landlock and capabilities.

Each has a small function.

Each system call is made with ctypes, without dependencies, and raises an error with a clear message
if it fails. Which calls are used, and when, is decided in ``zygote.py`` and ``confine.py``; the
system call filter is in ``seccomp.py``, and what it asks the host is answered by
``seccomp_requests.py``. The zygote (the process that forks sessions) loads this module, so it uses
the standard library only. System call numbers below 400 differ between architectures, so those
calls go through the C library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramify.sandbox.jail import seccomp_requests as requests
else:
    # In the fork server, where Ramify is not installed: see host/guest_module_files.py.
    requests = sys.modules["ramify_jail_seccomp_requests"]

NEWNS, NEWCGROUP, NEWUTS = 0x20000, 0x2000000, 0x4000000
NEWIPC, NEWUSER, NEWPID, NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000

# The attributes of fsmount and mount_setattr with these names have the same values.
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36

_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 429, 430, 431, 432, 433
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class SyscallRefusedError(OSError):
    """Raised if the kernel refused an operation.

    ``what`` is the name of the operation.
    """

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, f"{what}: {os.strerror(number)}")
        self.what = what


def check_call_result(result: int, what: str) -> int:
    """Return the result of a C library call, or raise an error if the call failed.

    Raises SyscallRefusedError if the result is negative.
    """
    if result < 0:
        raise SyscallRefusedError(ctypes.get_errno(), what)
    return result


def syscall(number: int, *arguments: object, what: str) -> int:
    """Make a system call by number.

    Its arguments may be ints, bytes or None. Raises SyscallRefusedError if it fails.
    """
    return check_call_result(_syscall(ctypes.c_long(number), *map(_to_c_argument, arguments)), what)


def _to_c_argument(value: object) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value


def prctl(option: int, value: int) -> None:
    check_call_result(
        _libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, (value, 0, 0, 0))), f"prctl {option}"
    )


def unshare(flags: int, what: str) -> None:
    """Move this process to new namespaces of the kinds set in ``flags``.

    Raises SyscallRefusedError.
    """
    check_call_result(_libc.unshare(ctypes.c_int(flags)), what)


def set_host_name(name: str) -> None:
    check_call_result(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


# ------------------------------------------------------------------------------------------------
# forking a session

_CLONE = {"x86_64": 56, "aarch64": 220}
_PR_GET_TID_ADDRESS = 40
_EINTR = 4
_closerange, _close, _dup2, _Socket = os.closerange, os.close, os.dup2, socket.socket
"""Functions and a class of the standard library, saved before any cell runs so that a cell cannot
replace them."""
_forking = ctypes.PyDLL(None, use_errno=True).syscall  # keeps the interpreter's lock
_forking.restype = ctypes.c_long


_machine = os.uname().machine
# The kernel writes the child's thread id there, as in fork(). The parent's would stay otherwise.
_tid_place = ctypes.c_ulong()
"""Address at which the C library stores this thread's id. 0 if the kernel does not report it."""
_libc.prctl(
    ctypes.c_int(_PR_GET_TID_ADDRESS),
    *map(ctypes.c_ulong, (ctypes.addressof(_tid_place), 0, 0, 0)),
)
_clone_arguments = tuple(
    map(
        ctypes.c_long,
        (
            _CLONE.get(_machine, -1),
            requests.FORKS_APART[bool(_tid_place.value)],
            0,
            0,
            # The fourth argument on x86_64, the fifth on aarch64; the other one (tls) is ignored.
            *[_tid_place.value] * 2,
        ),
    )
)


def fork_sibling() -> int:
    """Fork a sibling of this process without running the fork hooks of Python and the C library.

    The hooks are those of Python and the C library. The new process is a sibling, that is, a child
    of this process's parent. So neither process is notified when the other ends. Use this only in a
    process with one thread.
    """
    while True:
        try:
            return check_call_result(_forking(*_clone_arguments), "fork")
        # Not InterruptedError: Python does not turn a subclass of OSError into it.
        except OSError as error:
            if error.errno != _EINTR:  # a signal arrived before the host's answer
                raise


def adopt_host_connection(wire: int, *files: int) -> None:
    """Receive a new connection to the host, and the files sent over it, in a forked process.

    The connection's descriptor gets the number ``wire``.

    Over the connection, the host sends the standard input, the output file for standard output, the
    output file once more, and the shared buffers if there are any. The last two get the numbers in
    ``files``; the output file also stays open as standard error. Raises OSError if something is
    missing.
    """
    replace_descriptors_with_connection(wire)
    end = _Socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, wire)
    try:
        _, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(16))  # up to 4 descriptors
    finally:
        end.detach()
    received = len(ancillary[0][2]) // 4 if ancillary else 0  # as 0, 1, 2, …: no others are open
    if received != 2 + len(files):
        raise OSError(f"{received} descriptors arrived on the new wire")
    for fd, place in enumerate(files, 2):
        _dup2(fd, place, inheritable=False)
        if fd > 2:  # 2 is standard error
            _close(fd)


def replace_descriptors_with_connection(number: int) -> None:
    """Close all file descriptors of this process, then receive a new connection from the host.

    It gets the given number. The host gives one only to a process that has no open descriptors.
    Raises OSError if the host refuses.
    """
    while True:
        try:
            # In each attempt, because a signal handler may have opened a file meanwhile.
            _closerange(0, 1 << 20)
            syscall(requests.WIRE_CALL, number, what="take a new wire")
            break
        except OSError as error:
            if error.errno != _EINTR:  # a signal arrived before the host's answer
                raise
    # A host that cannot count the descriptors of this process has filled all numbers.
    _closerange(0, number)
    _closerange(number + 1, 1 << 20)


def end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------
# mounts


def mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [
        text.encode() if text is not None else None for text in (source, target, kind, options)
    ]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    check_call_result(result, f"mount {kind or source or 'flags'} on {target}")


def unmount(target: str) -> None:
    check_call_result(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def make_read_only(target: str) -> None:
    """Make a mount and everything below it read-only, and disable set-uid programs and device files
    there.

    Mount flags that the kernel has locked stay unchanged.
    """
    attributes = struct.pack("4Q", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    what = f"make {target} read-only (mount_setattr, Linux 5.12)"
    syscall(
        _MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        attributes,
        len(attributes),
        what=what,
    )


def pivot_root(root: str) -> None:
    """Make ``root`` the only file system that this process sees.

    It must be a mount.
    """
    os.chdir(root)
    # The old root gets the same place, on top of the new one, so it needs no folder there.
    syscall(_PIVOT_ROOT[os.uname().machine], b".", b".", what="pivot_root")
    unmount(".")
    os.chdir("/")


def create_detached_tmpfs(options: dict[str, str]) -> int:
    """Create an in-memory file system that is not mounted yet.

    Returns a descriptor for ``place_mount`` and ``freeze_filesystem``.
    """
    # Unlike with mount(), only the session that places it ever has it among its mounts.
    # Command 1 of fsconfig sets a string, 6 creates; the other 1s mean close-on-exec.
    context = syscall(_FSOPEN, b"tmpfs", 1, what="fsopen tmpfs (Linux 5.2)")
    try:
        for name, value in options.items():
            syscall(
                _FSCONFIG, context, 1, name.encode(), value.encode(), 0, what=f"fsconfig {name}"
            )
        syscall(_FSCONFIG, context, 6, None, None, 0, what="fsconfig create")
        return syscall(_FSMOUNT, context, 1, MS_NOSUID | MS_NODEV | MS_NOEXEC, what="fsmount")
    finally:
        os.close(context)


def place_mount(fd: int, target: str) -> None:
    # 4: the descriptor itself is moved, since its path is empty.
    syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), 4, what=f"move_mount to {target}")


def freeze_filesystem(fd: int) -> None:
    """Make the file system behind a mount read-only wherever it is mounted.

    Raises SyscallRefusedError (busy) while a file in it is open for writing.
    """
    # 1 | 8: close-on-exec, and an empty path. Command 0 sets a flag, 7 reconfigures.
    context = syscall(_FSPICK, fd, b"", 1 | 8, what="fspick")
    try:
        syscall(_FSCONFIG, context, 0, b"ro", None, 0, what="fsconfig ro")
        syscall(_FSCONFIG, context, 7, None, None, 0, what="make its files read-only")
    finally:
        os.close(context)


# ------------------------------------------------------------------------------------------------
# Landlock

_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 14
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _TRUNCATE
_NO_WRITER_NEEDS = _EXECUTE | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 15
"""Landlock rights that are denied even in a session's own folder: executing files, creating
devices, sockets and FIFOs, and device ioctl."""


def landlock_version() -> int:
    """Return the version of Landlock that the kernel supports, or 0 if it has none."""
    return max(
        int(_syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1))),
        0,
    )


def _rights(version: int) -> int:
    """Return a bit mask of the file access rights that a Landlock version can restrict."""
    return ((1 << 13) - 1) | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15


class LandlockRules:
    """Landlock rules that determine which files confined processes may read.

    The files are opened once, and the rules can then restrict any number of processes.
    """

    def __init__(self, readable: list[str], listed: list[str], version: int) -> None:
        """Prepare Landlock rules that allow only the given files and folders to be read.

        In the folders of ``listed``, only the file names may be read.
        """
        self._rights = _rights(version)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        # Rights to files; to TCP; to abstract sockets and signals.
        self._attributes = struct.pack("3Q", self._rights, 3, 3)[:size]
        grants = [(path, _READ_FILE | _READ_DIR) for path in readable] + [
            (path, _READ_DIR) for path in listed
        ]
        self._rules = [
            rule for path, rights in grants if (rule := self._path_rule(path, rights)) is not None
        ]

    @staticmethod
    def _rule_of(fd: int, rights: int) -> bytes:
        return struct.pack("<Qi", rights, fd)

    def _path_rule(self, path: str, rights: int) -> bytes | None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return None  # a missing file needs no rule
        # For a file, the kernel refuses rules with rights that only folders have.
        rights &= self._rights if os.path.isdir(path) else _FILE_RIGHTS
        return self._rule_of(fd, rights)

    def ruleset(self, writable: int) -> int:
        """Create a Landlock ruleset and return its descriptor, which ``apply_landlock_ruleset``
        takes.

        ``writable``: the descriptor of a folder that may be written to, or -1.
        """
        size = len(self._attributes)
        rules = syscall(
            _LANDLOCK_CREATE, self._attributes, size, 0, what="landlock_create_ruleset (Linux 5.13)"
        )
        own = [] if writable < 0 else [self._rule_of(writable, self._rights & ~_NO_WRITER_NEEDS)]
        for rule in [*self._rules, *own]:
            syscall(_LANDLOCK_ADD, rules, 1, rule, 0, what="landlock_add_rule")
        return rules


def apply_landlock_ruleset(rules: int) -> None:
    """Apply a Landlock ruleset to this process permanently.

    This requires the flag no_new_privs. Afterwards the process cannot change any mount.
    """
    syscall(_LANDLOCK_RESTRICT, rules, 0, what="landlock_restrict_self")


# ------------------------------------------------------------------------------------------------
# rights

_NO_CAPABILITIES = (struct.pack("Ii", 0x20080522, 0), bytes(24))


def drop_capabilities() -> None:
    check_call_result(_libc.capset(*_NO_CAPABILITIES), "capset")


def switch_user(uid: int) -> None:
    """Switch permanently to user and group ``uid``, without supplementary groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def map_ids(proc: int, inside: int, uid: int, gid: int) -> None:
    """Map a user and a group in this process's new user namespace to ids outside the namespace.

    ``proc`` is a descriptor of /proc.
    """
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        write_kernel_file(f"self/{name}", text, proc)


def write_kernel_file(path: str, text: str, folder: int | None = None) -> None:
    """Write a string to a kernel file, such as one in /proc.

    Raises SyscallRefusedError if that fails.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise SyscallRefusedError(error.errno or 0, f"write {path}") from None
