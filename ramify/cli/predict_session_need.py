"""Guess from the command-line arguments whether a command will soon need a sandbox session.

If so, ``ramify/__main__.py`` starts the fork server, the process from which sessions are forked,
before anything else is imported. So this module imports only what Python has loaded anyway. Options
in the configuration file, and how options go together, are not known yet. If the fork server turns
out not to be needed, it ends with the command.
"""

from __future__ import annotations

import os
import sys

SMALL_BYTES = 32_000
"""Size in bytes of the largest file about which a question is likely to take only one direct model
call."""
_WITHOUT_JAIL = ("-h", "--help", "--resume", "--dry-run", "--sandbox", "--mode")
"""Options of ``ramify ask`` that make a sandbox session unnecessary, or needed only later."""


def is_ask_over_large_input(arguments: list[str]) -> bool:
    """Return True if the command is ``ramify ask`` over a folder or a large file.

    Such a command will soon need a sandbox session. Returns False if an option or an environment
    variable shows that it will not.
    """
    if arguments[:1] != ["ask"] or sys.platform != "linux":
        return False
    if os.environ.get("RAMIFY_SANDBOX", "jail") != "jail":
        return False
    if any(argument.partition("=")[0] in _WITHOUT_JAIL for argument in arguments):
        return False
    return any(map(_is_much, arguments[2:]))


def _is_much(path: str) -> bool:
    try:
        return os.path.isdir(path) or os.path.getsize(path) > SMALL_BYTES
    except (OSError, ValueError):  # no path
        return False
