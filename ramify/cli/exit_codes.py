"""Exit codes of the ``ramify`` command, and the code for each way that a run can end."""

from __future__ import annotations

import enum
from typing import Any

from ramify.errors import ConfigError, RunInUse, SourceError, UnknownRun
from ramify.types.trajectory import Stop


class ExitCode(enum.IntEnum):
    """Exit code that the shell receives."""

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
    ExitCode.ERROR: "failed; one line on stderr says why",
    ExitCode.USAGE: "usage error: a wrong option, setting, recipe or name; nothing was run",
    ExitCode.CUT_SHORT: "stopped by a limit or by Ctrl-C; the best answer so far was printed",
    ExitCode.NO_ANSWER: "ended without an answer",
    ExitCode.STOPPED: "stopped by a second Ctrl-C",
}


WRONG = (ConfigError, RunInUse, SourceError, UnknownRun)
"""Errors in the request itself, found before anything runs; they exit with ``USAGE``."""


def exit_of(stop: Stop, answer: Any) -> ExitCode:
    """Exit code of a run that ended with ``stop``."""
    if stop is Stop.ERROR:
        return ExitCode.ERROR
    if answer is None:
        return ExitCode.NO_ANSWER
    return ExitCode.CUT_SHORT if stop.is_truncated() else ExitCode.ANSWERED


def epilog() -> str:
    """List of exit codes for ``--help``."""
    return "\n".join(
        ["exit codes:", *(f"  {code.value:<4}{meaning}" for code, meaning in MEANINGS.items())]
    )
