"""The guess, from a command's arguments alone, that it will soon need a session of the jail.

The fork server's process then starts before anything else is imported, so this module imports
nothing but what every Python process has. Options in the configuration file, and how options go
together, are not known yet; a process that turns out not to be needed ends with the command. Not
here: starting it (see ``ramify/__main__.py``).
"""

from __future__ import annotations

import os
import sys

SMALL_BYTES = 32_000
"""Largest file (bytes) that one direct call is likely to answer."""
_WITHOUT_JAIL = ("-h", "--help", "--resume", "--dry-run", "--sandbox", "--mode")
"""Options with which a question needs no session of the jail, or none soon."""


def asks_over_much(arguments: list[str]) -> bool:
    """Return True if the arguments are those of ``ramify ask`` over a folder or a large file, which
    will soon need a session in the sandbox (the jail). Returns False if an option or a variable
    shows that no such session is needed."""
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
