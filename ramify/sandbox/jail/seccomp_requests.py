"""Receives system calls of confined processes, and sends the host's decisions on them.

The kernel blocks each call until it is answered.

The system call filter of a session (``seccomp.py``) has a listener, a descriptor that the host
holds. A process that makes such a call is blocked until the host answers through the listener. The
answers are decided in ``providers/jail_limits.py``, and for the trial session of a zygote in
``walls.py``. Both the host and the zygote load this module, so it uses the standard library only,
without ctypes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from typing import NamedTuple

WIRE_CALL = {"x86_64": 187, "aarch64": 213}.get(os.uname().machine, -1)
"""Number of the system call ``readahead``. With this call, a process asks the host for a
connection.

No session needs this call for its own purpose, and the filters of container engines allow it.
"""
_CLONE_PARENT, _KEEP_TID = 0x8000, 0x01200000
FORKS_APART = (_CLONE_PARENT | signal.SIGCHLD, _CLONE_PARENT | _KEEP_TID | signal.SIGCHLD)
"""The flags that ``primitives.fork_sibling`` passes to ``clone``."""
_RECEIVE, _SEND, _ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
_SET_NUMBER, _AND_ANSWER, CONTINUE = 1, 2, 1
_ENOENT = 2


class SeccompNotification(NamedTuple):
    """A system call that a confined process has made and that waits for a decision.

    It stays blocked until the owner of the system call filter answers.
    """

    id: int
    pid: int
    """Process id as the filter's owner sees it; 0 if it does not see the process."""
    number: int
    arguments: tuple[int, ...]


def is_branch_connection_request(request: SeccompNotification) -> bool:
    return request.number == WIRE_CALL


def receive_seccomp_notification(listener: int) -> SeccompNotification:
    """Receive the next system call of a confined process on which the host must decide.

    Raises OSError if there is none, or if its process has ended.
    """
    data = bytearray(80)
    fcntl.ioctl(listener, _RECEIVE, data)
    id, pid, _, number, _, _, *arguments = struct.unpack("<QIIiIQ6Q", data)
    return SeccompNotification(id, pid, number, tuple(arguments))


def answer_seccomp_notification(listener: int, id: int, *, error: int = 0, flags: int = 0) -> bool:
    """Answer a system call that waits for a decision, so that its process continues.

    Returns False if the process no longer waits for the answer.
    """
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, _SEND, struct.pack("<QqiI", id, 0, -error, flags))
        return True
    return False


def insert_descriptor(
    listener: int, id: int, fd: int, number: int, *, answers: bool = False
) -> None:
    """Copy a file descriptor into a process that waits for a decision on a system call.

    It gets the given number there. Raises OSError if that fails, for example because the process no
    longer waits.

    ``answers``: also answer the system call, in the same step (Linux 5.14). Otherwise each
    insertion wakes the process and waits for it.
    """
    flags = _SET_NUMBER | (_AND_ANSWER if answers else 0)
    request = struct.pack("<QIIII", id, flags, fd, number & 0xFFFFFFFF, os.O_CLOEXEC)
    fcntl.ioctl(listener, _ADD_FD, request)


def can_insert_descriptors(listener: int) -> bool:
    """Return True if this kernel can insert descriptors into a process that is blocked in a system
    call.

    Linux 5.9 and later can.
    """
    try:
        insert_descriptor(listener, 0, listener, 0)
    except OSError as error:
        return error.errno == _ENOENT  # the call exists: it only found no such request
    return True
