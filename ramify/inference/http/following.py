"""Commands that end with whoever started them, also where that is killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Sequence

_FOLLOW = """
import ctypes, os, sys
parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
if os.getppid() != parent:  # it was killed before it was asked for
    os._exit(1)
os.execvp(command[0], command)
"""


def following(command: Sequence[str], number: signal.Signals) -> list[str]:
    """``command`` so that the kernel sends it ``number`` when the thread that starts it ends; where there is no Linux, as it
    is. Raises FileNotFoundError where there is none.

    A small program asks for that and becomes the command. Asked for between fork and exec (``preexec_fn``), a process of
    several threads stands still for ever now and then: what another thread had locked stays locked in the child."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _FOLLOW, str(os.getpid()), str(int(number)), *command]
