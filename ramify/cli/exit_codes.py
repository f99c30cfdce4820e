"""How the command ends: the exit codes, and which one a run's end gives."""

from __future__ import annotations

import enum
from typing import Any

from ramify.errors import ConfigError, RunInUse, SourceError, UnknownRun
from ramify.types.trajectory import Stop


class ExitCode(enum.IntEnum):
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
    ExitCode.ANSWERED: "answered",
    ExitCode.ERROR: "it was tried and failed; one line on stderr says why",
    ExitCode.USAGE: "wrong usage: an option, a setting, a recipe, a name of what is not there; nothing was run",
    ExitCode.CUT_SHORT: "cut short by a limit or by Ctrl-C; the best answer so far was printed",
    ExitCode.NO_ANSWER: "ended without an answer",
    ExitCode.STOPPED: "stopped by a second Ctrl-C",
}


WRONG = (ConfigError, RunInUse, SourceError, UnknownRun)
"""Errors that say what is wrong with what was asked for, before anything is run."""


def exit_of(stop: Stop, answer: Any) -> ExitCode:
    """The exit code of a run that ended with ``stop``."""
    if stop is Stop.ERROR:
        return ExitCode.ERROR
    if answer is None:
        return ExitCode.NO_ANSWER
    return ExitCode.CUT_SHORT if stop.is_truncated() else ExitCode.ANSWERED


def epilog() -> str:
    """The codes for ``--help``."""
    return "\n".join(
        ["exit codes:", *(f"  {code.value:<4}{meaning}" for code, meaning in MEANINGS.items())]
    )
