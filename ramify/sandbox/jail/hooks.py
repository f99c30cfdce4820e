"""Skips the after-fork hooks of the standard library, which a session does not need.

Without this, each session, forked from a process with one thread, would renew unused locks, list
threads that do not exist, and draw a random seed that is then replaced. This would write to about
two hundred memory pages, a fifth of the time of a fork. Skipping the hooks also leaves a branch the
random state of its origin. The hooks of the user's packages do run. Loaded first in the zygote.
Standard library only.
"""

from __future__ import annotations

import os
from typing import Any

_register = os.register_at_fork


def _leave_undone(**_: Any) -> None:
    """Replacement for ``os.register_at_fork`` that ignores the hooks."""


def begin() -> None:
    """Ignore after-fork hooks that are registered from now on."""
    os.register_at_fork = _leave_undone


def end() -> None:
    os.register_at_fork = _register


begin()
