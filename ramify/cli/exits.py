"""How the command ends: the exit codes, and which one a run's end gives."""

from __future__ import annotations

import enum
from typing import Any

from ramify.errors import ConfigError, RunInUse, SourceError, UnknownRun
from ramify.types.trajectory import Stop


class Exit(enum.IntEnum):
    """What the shell sees."""

    ANSWERED = 0
    ERROR = 1
    USAGE = 2
    CUT_SHORT = 3
    NO_ANSWER = 4
    STOPPED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANINGS = {
    Exit.ANSWERED: "answered",
    Exit.ERROR: "it was tried and failed; one line on stderr says why",
    Exit.USAGE: "wrong usage: an option, a setting, a recipe, a name of what is not there; nothing was run",
    Exit.CUT_SHORT: "cut short by a limit or by Ctrl-C; the best answer so far was printed",
    Exit.NO_ANSWER: "ended without an answer",
    Exit.STOPPED: "stopped by a second Ctrl-C",
}


WRONG = (ConfigError, RunInUse, SourceError, UnknownRun)
"""Errors that say what is wrong with what was asked for, before anything is run."""


def exit_of(stop: Stop, answer: Any) -> Exit:
    """The exit code of a run that ended with ``stop``."""
    if stop is Stop.ERROR:
        return Exit.ERROR
    if answer is None:
        return Exit.NO_ANSWER
    return Exit.CUT_SHORT if stop.is_truncated() else Exit.ANSWERED


def epilog() -> str:
    """The codes for ``--help``."""
    return "\n".join(["exit codes:", *(f"  {code.value:<4}{meaning}" for code, meaning in MEANINGS.items())])
