"""Restricts the kernel for this process and its children to the features of other machines, with a
system call filter.

``A``: no restriction. ``B``: no namespaces and no mounts, as in a container with Docker's defaults.
``C``: no Landlock either, as before Linux 5.13. The filter refuses calls exactly like a kernel
without them.
"""

from __future__ import annotations

import ctypes
import platform
import struct

_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x50001, 0x50026
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NEW_NAMESPACE = 0x7E020080
_COLUMN = 1 if platform.machine() == "aarch64" else 0
_UNSHARE, _SETNS, _CLONE, _MOUNT, _PIVOT = ((272, 97), (308, 268), (56, 220), (165, 40), (155, 41))
_LANDLOCK, _CLONE3, _SECCOMP = 444, 435, (317, 277)


def _program(tier: str) -> bytes:
    steps = [(_LOAD, 0, 0, 0)]  # the number of the call
    refused = [(number[_COLUMN], _EPERM) for number in (_UNSHARE, _SETNS, _MOUNT, _PIVOT)] + [
        (_CLONE3, _ENOSYS)
    ]
    if tier == "C":
        refused.append((_LANDLOCK, _ENOSYS))
    for number, error in refused:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, error)]
    steps += [
        (_EQUAL, 0, 3, _CLONE[_COLUMN]),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def impoverish(tier: str) -> None:
    """Restrict this process to the features of ``tier``. Raises OSError if that is not possible."""
    if tier == "A":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    program = _program(tier)
    held = ctypes.create_string_buffer(program, len(program))
    filter = _Filter(len(program) // 8, ctypes.addressof(held))
    no_new_privileges = libc.prctl(38, 1, 0, 0, 0)
    if no_new_privileges or libc.syscall(_SECCOMP[_COLUMN], 1, 0, ctypes.byref(filter)):
        raise OSError(ctypes.get_errno(), "this machine cannot be made poorer")
