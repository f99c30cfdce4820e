"""The ``ramify`` command: Ctrl-C ends it silently even while its modules are still being imported.

The default signal handler is installed before anything else is imported. ``_signal`` is used
because importing ``signal`` takes as long as the rest of this file. The fork server of a question
over files starts next, so that it is ready when this process is.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import sys

SMALL_BYTES = 32_000
"""Largest file (bytes) that one direct call is likely to answer."""

_WITHOUT_JAIL = ("-h", "--help", "--resume", "--dry-run", "--sandbox", "--mode")
"""Options with which a question needs no session of the jail, or none soon."""


def main() -> None:
    """Command-line entry point. Never returns."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if asks_over_much(sys.argv[1:]):
        from ramify.sandbox.host.forkserver_process import start_early

        start_early()
    from ramify.cli.main import main as run

    run()


def asks_over_much(arguments: list[str]) -> bool:
    """Return True for ``ramify ask`` over more than a small file, unless an option says that no
    session of the jail is needed. It is a guess: options in the configuration file and relations
    between options are not known yet, and a process that is not needed ends."""
    if arguments[:1] != ["ask"] or sys.platform != "linux":
        return False
    if os.environ.get("RAMIFY_SANDBOX", "jail") != "jail":
        return False
    for argument in arguments:
        if argument.partition("=")[0] in _WITHOUT_JAIL:
            return False
    return any(map(_is_much, arguments[2:]))


def _is_much(path: str) -> bool:
    try:
        return os.path.isdir(path) or os.path.getsize(path) > SMALL_BYTES
    except (OSError, ValueError):  # no path
        return False


if __name__ == "__main__":
    main()
