"""What libraries do in every new process: left undone for the standard library's, which a session
needs none of.

Decides that sessions, forked from a process with one thread, do not each renew locks that nobody
holds, list threads that are not there and draw a seed that they are given anyway: some two hundred
pages that a session would otherwise write to, a fifth of the time of a fork. It also leaves a
branch the random numbers of the session that it came from. What a user's packages ask for is done.
Loaded before all else in the zygote. Standard library only.
"""

from __future__ import annotations

import os
from typing import Any

_register = os.register_at_fork


def _leave_undone(**_: Any) -> None:
    """Stands for ``os.register_at_fork``."""


def begin() -> None:
    """From now on what asks to be called after a fork is not."""
    os.register_at_fork = _leave_undone


def end() -> None:
    os.register_at_fork = _register


begin()
